import json
import math

import pyarrow
import pyarrow.parquet
import pytest
import tiny
import torch

from quantkit.calibration.text import held_back_text
from quantkit.commands import evaluate
from quantkit.commands.evaluation import text
from quantkit.errors import CalibrationError, CheckpointError, RequestError, UsageError
from quantkit.evaluators.saved_reference import record
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import CompareSettings, PerplexitySettings, TextSettings

ROWS = ["the end of the thing and another on the sands", "", "\u4f60\u597d, w\xf6rld", "in the beginning " * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The same rows in every form that is read."""
    folder = tmp_path_factory.mktemp("texts")
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    (folder / "rows.txt").write_text("\n\n".join(ROWS), encoding="utf-8")
    return folder


def perplexity(folder, text=None, dtype="auto", **settings):
    settings = {"length": 16, **settings}
    return evaluate.perplexity(
        PerplexitySettings(str(folder), TextSettings(text=text, **settings), dtype=dtype), Silent()
    )


def compare(reference, candidate, text=None, **settings):
    settings = {"length": 16, **settings}
    return evaluate.compare(
        CompareSettings(str(reference), str(candidate), TextSettings(text=text, **settings)), Silent()
    )


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.txt"])
def test_perplexity_is_that_of_the_convention(name, folder, texts):
    """Rows joined by a blank line, no special tokens, windows without overlap, the first token of each unscored."""
    ids = Tokenizer.open(folder).encode("\n\n".join(ROWS))
    model, losses = load(folder), []
    for start in range(0, len(ids) // 16 * 16, 16):
        window = torch.tensor([ids[start : start + 16]])
        scores = model(window)[0, :-1].double().log_softmax(-1)
        losses += [-float(scores[at, token]) for at, token in enumerate(window[0, 1:])]
    report = perplexity(folder, texts / name)
    found = json.loads(json.dumps(report.as_json()))
    assert found["mean_nll"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["mean_nll"]))
    assert (found["windows"], found["tokens"], found["predictions"]) == (
        len(ids) // 16,
        len(ids) // 16 * 16,
        len(losses),
    )
    assert (found["text_tokens"], found["length"], found["bos"], found["dtype"]) == (len(ids), 16, False, "fp32")
    assert found["source"] == str(texts / name) and found["notes"] == []
    rows = dict(report.rows())
    assert rows["BOS"] == "no" and "fp32" in rows["arithmetic"] and str(len(ids)) in rows["windows"]


def test_first_windows_only(folder, texts):
    report = perplexity(folder, texts / "rows.txt", windows=2)
    assert report.score.windows == 2
    assert report.score.window_nll == pytest.approx(
        perplexity(folder, texts / "rows.txt").score.window_nll[:2], abs=1e-5
    )


def test_held_back_text_is_the_default_and_named(folder):
    report = perplexity(folder, windows=2, length=64)
    assert report.as_json()["text_tokens"] == len(Tokenizer.open(folder).encode(held_back_text()))
    assert "bundled held-back text" in dict(report.rows())["text"]


def test_low_precision_is_close_and_stated(folder, texts):
    exact, rough = perplexity(folder, texts / "rows.txt"), perplexity(folder, texts / "rows.txt", dtype="bf16")
    assert rough.as_json()["dtype"] == "bf16"
    assert rough.score.mean_nll != exact.score.mean_nll
    assert rough.score.mean_nll == pytest.approx(exact.score.mean_nll, rel=0.02)


def test_bos_is_put_in_front_only_when_asked_for(tmp_path, texts):
    """A tokenizer that asks for a BOS: the usual convention has none, and a note says what it would change."""
    folder = tiny.write_model(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = perplexity(folder, texts / "rows.txt")
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    noted = perplexity(folder, texts / "rows.txt")
    with_bos = perplexity(folder, texts / "rows.txt", bos=True)
    assert noted.score == plain.score and plain.notes == with_bos.notes == ()
    assert with_bos.score.predictions == plain.score.predictions and with_bos.score != plain.score
    assert with_bos.as_json()["bos"] and not noted.as_json()["bos"]
    assert (
        f"scores {with_bos.score.window_nll[0]:.4f} nats instead of {plain.score.window_nll[0]:.4f}" in noted.notes[0]
    )


def test_a_text_that_begins_with_the_bos_gets_it_once(tmp_path, folder, texts):
    (tmp_path / "bos.txt").write_text("<s>" + (texts / "rows.txt").read_text(encoding="utf-8"), encoding="utf-8")
    once, expected = (
        perplexity(folder, tmp_path / "bos.txt", bos=True),
        perplexity(folder, texts / "rows.txt", bos=True),
    )
    assert once.score == expected.score


def test_bos_of_a_model_that_has_none(tmp_path, texts):
    folder = tiny.write_model(tmp_path / "model", bos_token_id=None)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match="names no BOS token"):
        perplexity(folder, texts / "rows.txt", bos=True)


def test_a_model_compared_with_itself_and_with_another(tmp_path, folder, texts):
    same = compare(folder, folder, texts / "rows.txt").as_json()
    assert abs(same["kl_mean"]) < 1e-12 and same["top1_agreement"] == 1.0
    other = tiny.write_model(tmp_path / "other", seed=1)
    report = compare(folder, other, texts / "rows.txt")
    found = json.loads(json.dumps(report.as_json()))
    assert found["kl_ci95"][0] < found["kl_mean"] < found["kl_ci95"][1]
    assert 0 < found["kl_p90"] <= found["kl_p99"] and 0 <= found["top1_agreement"] < 1
    assert found["perplexity_reference"] == pytest.approx(perplexity(folder, texts / "rows.txt").score.perplexity)
    assert found["perplexity_candidate"] == pytest.approx(perplexity(other, texts / "rows.txt").score.perplexity)
    assert (found["length"], found["dtype"], found["bos"], found["notes"]) == (16, "fp32", False, [])
    assert "nats" in dict(report.rows())["mean KL"]


def test_candidate_without_tokenizer_is_noted(tmp_path, folder, texts):
    bare = tiny.write_model(tmp_path / "bare", tokenizer=False)
    assert "has no `tokenizer.json`" in compare(folder, bare, texts / "rows.txt").notes[0]
    with pytest.raises(CheckpointError, match=r"has no `tokenizer\.json`"):
        compare(bare, folder, texts / "rows.txt")


def test_candidate_that_reads_text_otherwise_is_refused(tmp_path, folder, texts):
    other = tiny.write_model(tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:4]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="split the text into different tokens"):
        compare(folder, other, texts / "rows.txt")


def test_padding_of_a_vocabulary_is_noted(tmp_path, folder, texts):
    padded = tiny.write_model(tmp_path / "padded", vocab_size=352)
    notes = compare(folder, padded, texts / "rows.txt").as_json()["notes"]
    assert notes == ["vocabularies of 320 and 352 rows: compared on the first 320"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"length": 4096}, RequestError, "do not fit into the model's context of 2048"),
        ({"length": 512}, CalibrationError, "makes 0 windows of 512"),
        ({"windows": 999}, CalibrationError, "999 asked for"),
        ({"dataset": "wikitext2"}, UsageError, "`--text` and `--dataset` given"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_weights_are_read(settings, error, message, tmp_path, texts):
    folder = tiny.write_model(tmp_path / "model")
    tiny.write_tensors(folder, {})
    with pytest.raises(error, match=message):
        perplexity(folder, texts / "rows.txt", **settings)
    with pytest.raises(error, match=message):
        compare(folder, folder, texts / "rows.txt", **settings)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens"):
        perplexity(folder, texts / "rows.txt")


def test_a_tokenizer_of_another_model_is_refused_before_the_weights_are_read(folder, tmp_path, texts):
    small = tiny.write_model(tmp_path / "model", vocab_size=100)
    tiny.write_tensors(small, {})
    for measure in (
        lambda: perplexity(small, texts / "rows.txt"),
        lambda: compare(small, folder, texts / "rows.txt"),
        lambda: compare(folder, small, texts / "rows.txt"),
    ):
        with pytest.raises(RequestError, match=f"`{small}` knows 100 ids: tokenizer and model do not belong together"):
            measure()


def test_an_unknown_cache_is_refused_before_the_weights_are_read(tmp_path, texts):
    folder = tiny.write_model(tmp_path / "model")
    tiny.write_tensors(folder, {})
    for candidate in (None, str(folder)):
        settings = CompareSettings(
            str(folder), candidate, TextSettings(text=texts / "rows.txt", length=16), kv="int3"
        )
        with pytest.raises(UsageError, match="there is no cache format `int3`"):
            evaluate.compare(settings, Silent())


@pytest.mark.parametrize("about", [{}, dict.fromkeys(evaluate.ABOUT, "x")])
def test_a_saved_reference_that_does_not_say_what_made_it_is_refused(about, folder, tmp_path):
    path = tmp_path / "reference"
    record(load(folder), torch.arange(20)[None], about).save(path)
    with pytest.raises(CheckpointError, match=r"is a damaged saved reference: .*`text_tokens`"):
        evaluate.compare(CompareSettings(str(path), str(folder), TextSettings()), Silent())


def test_a_model_that_cannot_be_computed_is_refused_before_the_text_is_read(folder, tmp_path):
    other = tiny.write_model(tmp_path / "model", rope_scaling={"type": "spiral"})
    for measure in (
        lambda: perplexity(other, tmp_path / "absent.txt"),
        lambda: compare(other, folder, tmp_path / "absent.txt"),
        lambda: compare(folder, other, tmp_path / "absent.txt"),
    ):
        with pytest.raises(CheckpointError, match="unknown rope type `spiral`"):
            measure()


def test_empty_and_absent_text(folder, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(CalibrationError, match="the text has 0 tokens"):
        perplexity(folder, tmp_path / "empty.txt")
    with pytest.raises(CalibrationError, match="no such file"):
        perplexity(folder, tmp_path / "absent.txt")


def test_data_set_that_cannot_be_had_points_to_local_text(folder, monkeypatch):
    monkeypatch.setattr(text, "read_dataset", offline)
    with pytest.raises(CalibrationError, match="no network") as caught:
        perplexity(folder, dataset="wikitext2")
    assert "--text FILE" in caught.value.hint


def offline(name, split, limit=None):
    raise CalibrationError("no network", hint="something else")


@pytest.mark.parametrize(
    ("dataset", "windows", "expected"),
    [
        ("wikitext2", None, ("wikitext2", "test", None)),
        ("c4", None, ("c4", "validation", 256 * 16 * 16)),
        ("c4", 3, ("c4", "validation", 3 * 16 * 16)),
        ("someone/texts", None, ("someone/texts", "test", None)),
    ],
)
def test_data_sets_are_read_from_the_usual_split(dataset, windows, expected, folder, monkeypatch):
    """An endless one only as far as its windows need, and only so many windows are scored."""
    asked = []
    monkeypatch.setattr(text, "read_dataset", lambda *call: asked.append(call) or ["in the end " * 40] * 40)
    report = perplexity(folder, dataset=dataset, windows=windows)
    assert asked == [expected]
    whole = report.scored.text_tokens // 16
    assert report.score.windows == (windows or (256 if dataset == "c4" else whole)) and whole > 256
    assert dataset in report.scored.source and expected[1] in report.scored.source
