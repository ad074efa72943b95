import pytest
import tiny
import torch

from quantkit.errors import CheckpointError
from quantkit.evaluators import perplexity
from quantkit.evaluators.divergence import bootstrap_interval, compare
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


def test_interval_covers_the_true_mean_nineteen_times_in_twenty():
    """Neighbours that are alike: 100 texts from a process whose mean is 1, each prediction shared by eight neighbours."""
    random = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(100):
        values = torch.rand(4, 64, generator=random, dtype=torch.float64).repeat_interleave(8, dim=1) * 2
        low, high = bootstrap_interval(values)
        inside += low <= 1 <= high
    assert 87 <= inside <= 99


def test_interval_of_few_values():
    assert bootstrap_interval(torch.tensor([[3.0]])) == (3.0, 3.0)
    low, high = bootstrap_interval(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
    assert 0 <= low < 0.5 < high <= 1
