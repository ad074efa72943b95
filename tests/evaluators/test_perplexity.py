import math
from dataclasses import replace

import pytest
import tiny
import torch

from quantkit.errors import CalibrationError, GateError, RequestError, UsageError
from quantkit.evaluators import perplexity
from quantkit.evaluators.perplexity import Perplexity, cut_windows, score
from quantkit.runtime.load import load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(tiny.write_model(tmp_path_factory.mktemp("model")))


def windows_of(rows, length, vocab=320, seed=0):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def plain_losses(model, windows, first=1):
    """The definition, spelled out: full logits of one window at a time, softmax in float64."""
    losses = []
    for window in windows:
        probabilities = model(window[None])[0].double().softmax(-1)
        losses.append([-math.log(probabilities[at - 1, window[at]]) for at in range(first, len(window))])
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "length"), [(3, 2), (5, 17), (2, 64)])
def test_score_is_the_mean_over_all_predictions_of_all_windows(model, rows, length):
    windows = windows_of(rows, length)
    expected = plain_losses(model, windows)
    found = score(model, windows)
    assert found.mean_nll == pytest.approx(float(expected.mean()), abs=1e-5)
    assert found.window_nll == pytest.approx(expected.mean(dim=1).tolist(), abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(float(expected.mean())), rel=1e-5)
    assert (found.windows, found.tokens, found.predictions) == (rows, rows * length, rows * (length - 1))


def test_pieces_and_batches_do_not_change_the_score(model, monkeypatch):
    windows = windows_of(5, 30)
    whole = score(model, windows)
    monkeypatch.setattr(perplexity, "LOGIT_BYTES", 4 * 320 * 7)
    monkeypatch.setattr(perplexity, "BATCH_TOKENS", 1)
    assert score(model, windows).window_nll == pytest.approx(whole.window_nll, abs=1e-6)


def test_no_more_logits_than_allowed_exist_at_once(model, monkeypatch):
    sizes = []
    monkeypatch.setattr(perplexity, "LOGIT_BYTES", 4 * 320 * 11)
    watched = replace(model, head=lambda states: sizes.append(states.shape[:2].numel()) or model.head(states))
    score(watched, windows_of(3, 40))
    assert max(sizes) <= 11 and sum(sizes) == 3 * 39


def test_bos_in_front_scores_the_same_tokens(model):
    ids = windows_of(1, 40)[0].tolist()
    windows = cut_windows(ids, 10, None, 2048, bos_id=1)
    assert windows.shape == (4, 11) and set(windows[:, 0].tolist()) == {1}
    found = score(model, windows, first=2)
    assert found.mean_nll == pytest.approx(float(plain_losses(model, windows, first=2).mean()), abs=1e-5)
    assert (found.windows, found.tokens, found.predictions) == (4, 40, 36)


@pytest.mark.parametrize("stride", [1, 3, 7, 10])
def test_with_a_stride_every_token_is_scored_once(model, stride):
    ids = windows_of(1, 31)[0].tolist()
    windows = cut_windows(ids, 10, None, 2048, stride=stride)
    assert windows.tolist() == [ids[at : at + 10] for at in range(0, 31 - 9, stride)]
    found = score(model, windows, first=1, later=10 - stride if stride < 10 else None)
    last = 10 - stride if stride < 10 else 1
    losses = [plain_losses(model, windows[:1]), *(plain_losses(model, row[None], last) for row in windows[1:])]
    assert found.window_nll == pytest.approx([float(row.mean()) for row in losses], abs=1e-5)
    assert found.mean_nll == pytest.approx(float(torch.cat([row.flatten() for row in losses]).mean()), abs=1e-5)
    covered = (len(windows) - 1) * stride + 10
    assert found.tokens == covered and found.predictions == covered - (len(windows) if stride == 10 else 1)


def test_with_a_stride_a_text_of_one_window_is_scored_whole(model):
    windows = windows_of(1, 10)
    assert score(model, windows, first=1, later=7) == score(model, windows)


@pytest.mark.parametrize("stride", [0, 11])
def test_a_stride_that_leaves_gaps_is_refused(stride):
    with pytest.raises(UsageError, match=f"`--stride` is {stride}"):
        cut_windows(list(range(50)), 10, None, 2048, stride=stride)


def test_windows_do_not_overlap_and_the_rest_is_dropped():
    windows = cut_windows(list(range(23)), 5, None, context=2048)
    assert windows.flatten().tolist() == list(range(20)) and windows.shape == (4, 5)
    assert cut_windows(list(range(23)), 5, 2, context=2048).flatten().tolist() == list(range(10))


@pytest.mark.parametrize(
    ("tokens", "length", "count", "error", "message", "hint"),
    [
        (
            9,
            10,
            None,
            CalibrationError,
            "the text has 9 tokens, which makes 0 windows of 10; 1 asked for",
            "a longer text, or --length 9 at most",
        ),
        (0, 10, None, CalibrationError, "the text has 0 tokens", "a longer text"),
        (25, 10, 3, CalibrationError, "25 tokens, which makes 2 windows of 10; 3 asked for", "--windows 2"),
        (99, 65, None, RequestError, "windows of 65 tokens do not fit into the model's context of 64", "--length 64"),
        (99, 1, None, UsageError, "a window needs 2 tokens", "--length 2048"),
        (99, 10, 0, UsageError, "`--windows` is 0", "leave it out"),
    ],
)
def test_what_cannot_be_cut_is_refused(tokens, length, count, error, message, hint):
    with pytest.raises(error) as caught:
        cut_windows(list(range(tokens)), length, count, context=64)
    assert message in caught.value.message and hint in caught.value.hint


def test_no_window_length_is_hinted_at_where_none_would_do():
    for tokens in (0, 1):
        with pytest.raises(CalibrationError) as caught:
            cut_windows([0] * tokens, 10, None, context=64)
        assert caught.value.hint == "a longer text"


def test_tokens_the_model_does_not_know_are_refused(model):
    with pytest.raises(RequestError, match="token id 320 is outside"):
        score(model, torch.tensor([[1, 320, 2]]))


def test_a_model_that_makes_nan_has_no_perplexity(tmp_path):
    path = tiny.write_model(tmp_path / "model")
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 0, torch.float32)
    tensors["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    tiny.write_tensors(path, tensors)
    with pytest.raises(GateError, match=r"block 1"):
        score(load(path), windows_of(1, 8))


def test_perplexity_beyond_a_float_is_infinite():
    assert Perplexity.of(torch.full((1, 2), 1e4, dtype=torch.float64)).perplexity == math.inf


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_windows_score_as_with_transformers(family, tmp_path):
    from transformers import AutoModelForCausalLM

    path = tiny.write_model(tmp_path / "model", family)
    windows = windows_of(2, 40)
    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        expected = [float(peer(window[None], labels=window[None]).loss) for window in windows]
    assert score(load(path), windows).window_nll == pytest.approx(expected, abs=1e-4)
