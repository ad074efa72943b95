import pytest
import tiny
import torch

from quantkit.errors import CheckpointError
from quantkit.evaluators import perplexity
from quantkit.evaluators.divergence import CONTEXT, WORST, compare
from quantkit.runtime.load import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def pair(folder):
    return load(tiny.write_model(folder / "a")), load(tiny.write_model(folder / "b", seed=1))


WINDOWS = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(0))


def plain_divergence(reference, candidate, windows):
    """The definition, from full logits: KL of every prediction `[windows, L - 1]` and whether both choose the same."""
    left, right = (model(windows)[:, :-1].double().log_softmax(-1) for model in (reference, candidate))
    return (left.exp() * (left - right)).sum(-1), (left.argmax(-1) == right.argmax(-1)).double()


def test_figures_are_those_of_the_definition(pair):
    divergence, agrees = plain_divergence(*pair, WINDOWS)
    found = compare(*pair, WINDOWS)
    assert found.kl_mean == pytest.approx(float(divergence.mean()), rel=1e-5)
    assert found.kl_p90 == pytest.approx(float(divergence.quantile(0.9)), rel=1e-5)
    assert found.kl_p99 == pytest.approx(float(divergence.quantile(0.99)), rel=1e-5)
    assert found.top1_agreement == pytest.approx(float(agrees.mean()))
    low, high = found.kl_ci95
    assert low < found.kl_mean < high
    for model, result in zip(pair, (found.reference, found.candidate), strict=True):
        assert result.mean_nll == pytest.approx(perplexity.score(model, WINDOWS).mean_nll, abs=1e-6)


def test_a_model_does_not_diverge_from_itself(pair):
    found = compare(pair[0], pair[0], WINDOWS)
    assert abs(found.kl_mean) < 1e-12 and found.kl_p99 < 1e-12 and found.top1_agreement == 1.0
    assert found.reference == found.candidate


def test_divergence_is_that_of_the_candidate_from_the_reference(pair):
    assert compare(*pair, WINDOWS).kl_mean != pytest.approx(compare(pair[1], pair[0], WINDOWS).kl_mean, rel=1e-3)


def test_pieces_and_batches_do_not_change_the_figures(pair, monkeypatch):
    whole = compare(*pair, WINDOWS)
    monkeypatch.setattr(perplexity, "LOGIT_BYTES", 4 * 320 * 5)
    monkeypatch.setattr(perplexity, "BATCH_TOKENS", 1)
    pieces = compare(*pair, WINDOWS)
    assert pieces.kl_mean == pytest.approx(whole.kl_mean, rel=1e-6)
    assert pieces.kl_p99 == pytest.approx(whole.kl_p99, rel=1e-5)


def test_likely_and_unlikely_words_both_count(folder):
    """A reference far more certain than 16 nats: nothing is clipped."""
    path = tiny.write_model(folder / "sharp")
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 0, torch.float32)
    tensors["lm_head.weight"] *= 40
    tiny.write_tensors(path, tensors)
    sharp, blunt = load(path), load(folder / "a") if (folder / "a").exists() else load(tiny.write_model(folder / "a"))
    assert float(sharp(WINDOWS).log_softmax(-1).min()) < -100
    assert compare(blunt, sharp, WINDOWS).kl_mean == pytest.approx(
        float(plain_divergence(blunt, sharp, WINDOWS)[0].mean()), rel=1e-5
    )


def test_padding_rows_of_one_vocabulary_are_left_out_and_said(folder):
    """64 words, and the same model with 32 rows of padding that would take most of the probability."""
    config = tiny.make_config("LlamaForCausalLM", vocab_size=64)
    tensors = tiny.make_tensors(config, 0, torch.float32)
    small = tiny.write_model(folder / "small", vocab_size=64)
    large = tiny.write_model(folder / "large", vocab_size=96)
    tiny.write_tensors(small, tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], 9 * torch.ones(32, 64)])
    tiny.write_tensors(large, tensors)
    windows = WINDOWS % 64
    for models in ((load(small), load(large)), (load(large), load(small))):
        found = compare(*models, windows)
        assert abs(found.kl_mean) < 1e-9 and found.top1_agreement == 1.0
        assert found.reference.mean_nll == pytest.approx(found.candidate.mean_nll, abs=1e-9)
        assert "compared on the first 64" in found.notes[0]
    with pytest.raises(CheckpointError, match="token id 70"):
        compare(load(small), load(large), torch.full((1, 4), 70))


def test_top_five_changes_and_worst_tokens_are_those_of_the_definition(pair):
    left, right = (model(WINDOWS)[:, :-1].double().log_softmax(-1) for model in pair)
    found = compare(*pair, WINDOWS)
    shared = [
        len(set(one.topk(5).indices.tolist()) & set(other.topk(5).indices.tolist())) / 5
        for one, other in zip(left.flatten(0, 1), right.flatten(0, 1), strict=True)
    ]
    assert found.top5_agreement == pytest.approx(sum(shared) / len(shared))
    targets = WINDOWS[:, 1:, None]
    before, after = left.gather(-1, targets)[..., 0], right.gather(-1, targets)[..., 0]
    change = after.exp() - before.exp()
    for percentile, value in found.change_percentiles.items():
        assert value == pytest.approx(float(change.quantile(percentile / 100)), abs=1e-7)
    assert found.change_rms == pytest.approx(float((change**2).mean().sqrt()), rel=1e-5)
    assert found.correlation == pytest.approx(float(torch.corrcoef(torch.stack([before.flatten(), after.flatten()]))[0, 1]), abs=1e-6)
    divergence, _ = plain_divergence(*pair, WINDOWS)
    assert len(found.worst) == WORST and found.kl_error == 0
    assert [token.kl for token in found.worst] == pytest.approx(divergence.flatten().topk(WORST).values.tolist(), rel=1e-5)
    worst = found.worst[0]
    window = WINDOWS[worst.window].tolist()
    assert list(worst.context) == window[max(0, worst.position - CONTEXT) : worst.position]
    assert worst.target == window[worst.position]
    place = worst.window, worst.position - 1
    assert worst.choices[0] == (int(left[place].argmax()), pytest.approx(float(left[place].max().exp()), rel=1e-5))
    assert worst.target_probabilities[1] == pytest.approx(float(right[place][worst.target].exp()), rel=1e-5)


def test_a_model_agrees_with_itself_in_everything(pair):
    found = compare(pair[0], pair[0], WINDOWS)
    assert found.top5_agreement == 1 and found.change_rms == 0 and found.correlation == pytest.approx(1)
