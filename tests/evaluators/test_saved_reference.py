import json

import pytest
import safetensors.torch
import tiny
import torch

from quantkit.errors import CheckpointError
from quantkit.evaluators import saved_reference
from quantkit.evaluators.divergence import compare
from quantkit.evaluators.saved_reference import Recorder, SavedReference, compare_saved, entries_for, estimate, record
from quantkit.runtime.load import load

WINDOWS = torch.randint(0, 300, (4, 33), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return load(tiny.write_model(folder / "a")), load(tiny.write_model(folder / "b", seed=1))


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "reference.safetensors"
    record(pair[0], WINDOWS, {"model": "a"}).save(path)
    return SavedReference.load(path)


def logits_like_a_model(vocab, predictions, seed):
    """Few likely words and a long tail of unlikely ones, and a candidate that is a little off."""
    random = torch.Generator().manual_seed(seed)
    rank = torch.arange(1, vocab + 1, dtype=torch.float64)
    rows = [-(1.2 * rank.log())[torch.randperm(vocab, generator=random)] for _ in range(predictions)]
    reference = torch.stack(rows)[None] + 0.3 * torch.randn(1, predictions, vocab, generator=random)
    return reference, reference + 0.2 * torch.randn(1, predictions, vocab, generator=random)


def estimated(reference, candidate):
    targets = torch.zeros(reference.shape[:2], dtype=torch.int64)
    recorder = Recorder(torch.zeros(1, reference.shape[1] + 1, dtype=torch.int64), 1, reference.shape[-1])
    recorder.put(0, 0, reference, targets)
    saved = recorder.finish({})
    return saved, estimate(saved, 0, 0, candidate, targets)


@pytest.mark.parametrize("vocab", [20_000, 70_000])
def test_a_fiftieth_of_the_logits_tells_the_divergence_within_what_it_states(vocab):
    reference, candidate = logits_like_a_model(vocab, 60, seed=vocab)
    left, right = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    exact = float((left.exp() * (left - right)).sum(-1).mean())
    saved, scores = estimated(reference, candidate)
    assert saved.share <= 0.02
    error = abs(float(scores[0].mean()) - exact)
    stated = 3 * float(scores[1].sum().sqrt()) / 60 + float(scores[9].mean())
    assert error < stated < 0.06 * exact
    top = left.gather(-1, saved.ids[..., : saved.top].long())
    missed = exact - float((top.exp() * (top - right.gather(-1, saved.ids[..., : saved.top].long()))).sum(-1).mean())
    assert error < 0.1 * abs(missed), "the sample must tell what the likeliest words alone do not"


def test_a_candidate_that_found_a_new_favourite_is_not_underrated():
    """Half of its probability on a word that the sample has most likely missed: the control variate would err there."""
    reference, candidate = logits_like_a_model(20_000, 60, seed=3)
    odd = reference.argsort(-1)[..., 5000:5001]  # an unlikely word
    broken = candidate.scatter(-1, odd, candidate.logsumexp(-1, keepdim=True))
    left, right = reference.double().log_softmax(-1), broken.double().log_softmax(-1)
    exact = float((left.exp() * (left - right)).sum(-1).mean())
    _, scores = estimated(reference, broken)
    stated = 3 * float(scores[1].sum().sqrt()) / 60 + float(scores[9].mean())
    assert abs(float(scores[0].mean()) - exact) < max(stated, 0.01 * exact)


def test_rounding_costs_no_more_than_is_stated_where_the_sum_to_one_moves_all():
    """What rounding did to a rare id that changed much is spread over all when they are made to sum to one."""
    random = torch.Generator().manual_seed(0)
    rare = 0.05 + 0.1 * torch.rand(1, 400, 1, generator=random, dtype=torch.float64)
    least = 1e-3 * (1 + torch.rand(1, 400, 1, generator=random, dtype=torch.float64))
    reference = torch.cat([rare, 1 - rare - least, least], dim=-1).log()
    candidate = reference - torch.tensor([20.0, 0.0, 0.0], dtype=torch.float64)
    left, right = reference.log_softmax(-1), candidate.log_softmax(-1)
    exact = (left.exp() * (left - right)).sum(-1)
    _, scores = estimated(reference, candidate)
    error = (scores[0] - exact).abs()
    assert bool((error <= 1.01 * scores[9]).all()) and float((error / scores[9]).max()) > 0.8


def test_a_model_does_not_diverge_from_what_was_saved_of_it():
    reference, _ = logits_like_a_model(20_000, 20, seed=0)
    assert abs(float(estimated(reference, reference)[1][0].mean())) < 1e-6


def test_probabilities_far_below_sixteen_nats_are_kept():
    reference, candidate = logits_like_a_model(20_000, 20, seed=1)
    sharp = 9 * reference
    _, scores = estimated(sharp, sharp)
    assert abs(float(scores[0].mean())) < 1e-5
    left, right = sharp.double().log_softmax(-1), candidate.double().log_softmax(-1)
    exact = float((left.exp() * (left - right)).sum(-1).mean())
    assert float(estimated(sharp, candidate)[1][0].mean()) == pytest.approx(exact, rel=0.01)


def test_all_figures_come_from_the_file(pair, saved):
    expected, found = compare(*pair, WINDOWS), compare_saved(saved, pair[1])
    assert found.kl_mean == pytest.approx(expected.kl_mean, abs=found.kl_error) and found.kl_error > 0
    assert (found.top1_agreement, found.top5_agreement) == (expected.top1_agreement, expected.top5_agreement)
    assert found.change_rms == pytest.approx(expected.change_rms, rel=1e-5)
    assert found.correlation == pytest.approx(expected.correlation, abs=1e-6)
    assert found.reference.mean_nll == pytest.approx(expected.reference.mean_nll, abs=1e-6)
    assert found.candidate == expected.candidate
    assert [token.target for token in found.worst][:3] == [token.target for token in expected.worst][:3]
    assert saved.about == {"model": "a"}


def test_a_candidate_with_padding_rows_is_cut_and_one_that_lacks_words_refused(pair, saved, tmp_path):
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 1, torch.float32)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], 9 * torch.ones(32, 64)])
    padded = tiny.write_model(tmp_path / "padded", vocab_size=352)
    tiny.write_tensors(padded, tensors)
    found, plain = compare_saved(saved, load(padded)), compare_saved(saved, pair[1])
    assert found.kl_mean == pytest.approx(plain.kl_mean, rel=1e-9) and "first 320" in found.notes[0]
    small = load(tiny.write_model(tmp_path / "small", vocab_size=312))
    with pytest.raises(CheckpointError, match="knows 320 ids, the candidate 312"):
        compare_saved(saved, small)


def test_what_is_no_saved_reference_is_refused(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    (tmp_path / "text").write_text("no such thing")
    for path in (folder / "model.safetensors", tmp_path / "text", tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="saved reference"):
            SavedReference.load(path)


def damaged(path, change):
    """The saved reference with its facts and tensors changed in place by `change`."""
    with safetensors.safe_open(path, framework="pt") as file:
        facts, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(facts, tensors)
    kept = {name: text for name, text in facts.items() if not name.startswith(saved_reference.DIGESTS)}
    safetensors.torch.save_file(tensors, path, {**kept, **saved_reference._digests(kept, tensors)})


@pytest.mark.parametrize(
    "change",
    [
        lambda facts, tensors: facts.pop("top"),
        lambda facts, tensors: facts.update(vocab="many"),
        lambda facts, tensors: facts.update(top="9999"),
        lambda facts, tensors: facts.update(first="33"),
        lambda facts, tensors: facts.update(vocab="200"),
        lambda facts, tensors: tensors.pop("loss"),
        lambda facts, tensors: tensors.update(loss=tensors["loss"][:, 1:].contiguous()),
        lambda facts, tensors: tensors.update(codes=tensors["codes"][:, 1:].contiguous()),
        lambda facts, tensors: tensors.update(windows=tensors["windows"].flatten()),
        lambda facts, tensors: tensors["range"].fill_(float("nan")),
        lambda facts, tensors: tensors["rest"].fill_(2),
        lambda facts, tensors: tensors.update(rest=tensors["rest"].bfloat16()),
        lambda facts, tensors: tensors.update(rest=tensors["rest"][:, :0].contiguous()),
        lambda facts, tensors: tensors["ids"].fill_(32767),
    ],
)
def test_a_damaged_saved_reference_is_refused(change, pair, tmp_path):
    path = tmp_path / "reference"
    record(pair[0], WINDOWS[:1], {}).save(path)
    SavedReference.load(path)
    damaged(path, change)
    with pytest.raises(CheckpointError, match="is a damaged saved reference"):
        SavedReference.load(path)


def test_a_flipped_bit_anywhere_is_refused_by_name(pair, tmp_path):
    path = tmp_path / "reference"
    record(pair[0], WINDOWS[:1], {"model": "abc"}).save(path)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    places = {name: start + entry["data_offsets"][0] for name, entry in json.loads(whole[8:start]).items() if name != "__metadata__"}
    assert set(places) == {"windows", "ids", "codes", "range", "rest", "loss"}
    for name, place in {**places, "facts": whole.index(b'"abc"') + 1}.items():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=f"is a damaged saved reference: `{name}` is not what was saved"):
            SavedReference.load(path)


def test_an_unwritable_place_is_named(saved, tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        saved.save(tmp_path / "absent" / "file")


def test_entries():
    top, sample = entries_for(49_152)
    assert 4 * (top + sample) + 16 <= 0.02 * 2 * 49_152 and top > sample > 100
    assert entries_for(20) == (20, 0)
