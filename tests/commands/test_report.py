import json
import re
import shlex
from html.parser import HTMLParser

import pytest
import tiny
import torch

from quantkit import cli
from quantkit.checkpoint.fingerprint import fingerprint
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.commands import report
from quantkit.commands.evaluation.card import _calibration
from quantkit.commands.evaluation.plots import Axis, Point, heat_map, lines, pareto, scatter
from quantkit.commands.report import ModelFacts, _labels
from quantkit.evaluators.depth import depth_errors
from quantkit.runtime import load as runtime_load
from quantkit.runtime.load import load
from quantkit.settings import DegenerationSettings


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A reference, a 4-bit and a 3-bit quantization of it, and the report on both."""
    folder = tmp_path_factory.mktemp("report")
    reference = tiny.write_model(folder / "original", hidden_size=128, intermediate_size=192)
    text = folder / "notes.txt"
    text.write_text("the end of the thing and another <in> the sands & more\n" * 40)
    candidates = []
    for bits in (4, 3):
        candidates.append(folder / f"tiny-{bits}bit")
        arguments = ["--bits", str(bits), "--group-size", "32", "--effort", "nearest", "--no-eval"]
        assert cli.run(["quantize", str(reference), "-o", str(candidates[-1]), *arguments]) == 0
    out = folder / "out"
    arguments = [str(reference), *map(str, candidates), "-o", str(out), "--text", str(text), "--length", "32"]
    assert cli.run(["eval", "report", *arguments, "--windows", "6"]) == 0
    return folder, arguments, out


class Page(HTMLParser):
    """What a browser would look for."""

    def __init__(self):
        super().__init__()
        self.ids, self.targets, self.loads, self.tags, self.open = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.targets += attrs.get("aria-labelledby", "").split()
        self.targets += [attrs["href"][1:]] if attrs.get("href", "").startswith("#") else []
        self.loads += [attrs[key] for key in ("src", "href", "srcset", "data") if key in attrs and not attrs[key].startswith("#")]
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_for_nothing_else(made):
    _, _, out = made
    html = (out / "index.html").read_text()
    page = Page()
    page.feed(html)
    assert page.open == [] and len(page.ids) == len(set(page.ids)) and set(page.targets) <= set(page.ids)
    assert page.loads == ["data:,"], "an icon of no bytes, so that browsers do not ask for one"
    assert "<script" not in html and not re.search(r"url\(|@import|http(?!://www\.w3\.org/2000/svg)", html)
    assert "&lt;in&gt;" in html and "<in>" not in html
    images = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(images) == 5 and all(one["role"] == "img" for one in images)
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    captions = re.findall(r"<caption>(.*?)</caption>", html)
    assert "bits per weight, tiny-3bit" in captions and not any("plot-" in one for one in captions)
    for name in ("tiny-4bit", "tiny-3bit", "original", "prefers-color-scheme"):
        assert name in html


def test_the_json_has_every_figure(made):
    folder, _, out = made
    found = json.loads((out / "report.json").read_text())
    assert [one["label"] for one in found["candidates"]] == ["tiny-4bit", "tiny-3bit"]
    four, three = found["candidates"]
    assert 4 < four["bits_per_weight"] < 5 > three["bits_per_weight"] + 0.4
    assert four["compared"]["kl_mean"] < three["compared"]["kl_mean"]
    assert len(four["depth"]) == 2 and 0 < four["depth"][0] < three["depth"][0]
    assert set(four["bits"]) == {f"self_attn.{one}_proj" for one in "qkvo"} | {f"mlp.{one}_proj" for one in ("gate", "up", "down")}
    assert four["fingerprint"] == fingerprint(open_checkpoint(folder / "tiny-4bit"))
    assert four["command"].startswith("quantkit quantize MODEL -o tiny-4bit") and "--group-size 32" in four["command"]
    assert "--effort nearest" in four["command"] and "--bits" not in four["command"] and "--bits 3" in three["command"]
    assert found["command"].startswith("quantkit eval report ")


def test_the_command_it_names_makes_the_same_model(made, tmp_path, monkeypatch):
    folder, _, out = made
    found = json.loads((out / "report.json").read_text())["candidates"][1]
    monkeypatch.chdir(tmp_path)
    words = [str(folder / "original") if word == "MODEL" else word for word in shlex.split(found["command"])[1:]]
    assert cli.run([*words, "--no-eval"]) == 0
    assert fingerprint(open_checkpoint(tmp_path / "tiny-3bit")) == found["fingerprint"]


def test_each_model_is_read_once(made, tmp_path, monkeypatch):
    _, arguments, _ = made
    read, real = [], runtime_load.check_contents

    def counted(checkpoint, *others):
        read.append(checkpoint.path.name)
        return real(checkpoint, *others)

    monkeypatch.setattr(runtime_load, "check_contents", counted)
    again = [*arguments[:3], "-o", str(tmp_path / "out"), *arguments[5:], "--windows", "1", "--probe"]
    monkeypatch.setattr(report, "DegenerationSettings", lambda *values, **named: DegenerationSettings(*values, tokens=16, **named))
    assert cli.run(["eval", "report", *again]) == 0
    assert read == ["original", "tiny-4bit", "tiny-3bit"]


def test_labels_are_different():
    assert _labels(["x/q 2", "y/q", "z/q"]) == ["q 2", "q", "q 3"]
    assert _labels(["x/q", "y/q", "z/q", "w/q 2"]) == ["q", "q 2", "q 3", "q 2 2"]


def facts_of_a_record(**made):
    return ModelFacts("out", "out", "exl2", 4.0, 1, {}, "", {"command": "quantize", **made})


def test_the_command_says_what_can_be_run():
    """Only options that there are; a record has digests of files, and tuples in Python's words."""
    one = facts_of_a_record(format="exl2", plan="ab" * 32, measurement=None, skip="()")
    assert one.command == f"quantkit quantize MODEL -o out --format exl2  # with the plan of sha256 {'ab' * 32}"
    two = facts_of_a_record(skip="('a.*b', \"it's\")", rule="('x:bits=8',)", sym=False, act_order=True)
    words = shlex.split(two.command)[5:]
    assert words == ["--asym", "--act-order", "--rule", "x:bits=8", "--skip", "a.*b", "--skip", "it's"]


def test_cards_say_what_was_measured(made):
    folder, _, out = made
    text = (out / "tiny-4bit.md").read_text()
    assert text.startswith("---\nbase_model: \"original\"\n")
    assert fingerprint(open_checkpoint(folder / "original")) in text and "quantkit eval report" in text
    assert "no text, effort `nearest`" in text and "mean KL" in text


def test_a_folder_with_files_is_not_replaced_unasked(made, capsys):
    _, arguments, out = made
    before = (out / "report.json").read_bytes()
    assert cli.run(["eval", "report", *arguments, "--windows", "2"]) == 10
    assert "is not empty" in capsys.readouterr().err and (out / "report.json").read_bytes() == before


def test_a_measurement_shows_what_would_hurt(made, tmp_path):
    folder, arguments, _ = made
    measurement = tmp_path / "measurement.json"
    words = ["--samples", "4", "--length", "32"]
    assert cli.run(["measure", arguments[0], "-o", str(measurement), *words]) == 0
    out = tmp_path / "out"
    words = [*arguments[:2], "-o", str(out), "--text", str(folder / "notes.txt"), "--length", "32", "--windows", "2"]
    assert cli.run(["eval", "report", *words, "--measurement", str(measurement)]) == 0
    found = json.loads((out / "report.json").read_text())["sensitivity"]
    assert len(found["damage"]) == 7 and all(len(row) == 2 and row[0] > 0 for row in found["damage"].values())
    assert "What would hurt" in (out / "index.html").read_text()
    assert cli.run(["eval", "report", arguments[1], *words[1:3], str(tmp_path / "x"), "--measurement", str(measurement)]) == 12


def test_depth_errors_are_those_of_the_states(tmp_path):
    one, other = load(tiny.write_model(tmp_path / "a")), load(tiny.write_model(tmp_path / "b", seed=1))
    ids = torch.arange(5, 25)[None]
    errors = depth_errors(one, other, ids)
    left, right = (model.hidden(ids)[:, 1:] for model in (one, other))
    assert errors[-1] == pytest.approx(float((right - left).norm() / left.norm()), rel=1e-5)
    assert depth_errors(one, one, ids) == [0, 0]


def test_pareto_front():
    points = [Point("a", 4, 0.1), Point("b", 3, 0.3), Point("c", 4.5, 0.2), Point("d", 5, 0.05), Point("e", 3, 0.4)]
    assert [point.label for point in pareto(points)] == ["b", "a", "d"]


@pytest.mark.parametrize(("low", "high", "log"), [(2.1, 8, False), (1e-4, 3, True), (1, 1, False), (0.5, 0.6, True), (0.11, 0.165, True)])
def test_axes_have_round_marks_inside(low, high, log):
    axis = Axis.over([low, high], 0, 100, log=log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 9 and all(-0.01 <= axis.place(tick) <= 100.01 for tick in ticks)
    assert 0 < axis.place(low) <= axis.place(high) < 100


def test_plots_of_one_point_and_of_nothing_known():
    assert "<circle" in scatter("a", "t", "x", "y", [Point("p", 4, 0.1, 0.0, 0.2)], log=True)
    assert "polyline" in lines("b", "t", "x", "y", [("s", [0.0])])
    assert "<rect" not in heat_map("c", "t", "bits", ["k"], [[None]])


def test_a_report_never_takes_the_place_of_a_model_that_it_judges(tmp_path, capsys):
    first, second = (tiny.write_model(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    (tmp_path / "notes.txt").write_text("some words " * 400)
    words = ["--text", str(tmp_path / "notes.txt"), "--length", "32", "--windows", "1", "--overwrite"]
    for out in (first, second):
        assert cli.run(["eval", "report", str(first), str(second), "-o", str(out), *words]) == 10
        assert "must not be the same folder" in capsys.readouterr().err
        assert (out / "model.safetensors").is_file()


def test_a_saved_reference_takes_no_place_of_another_file(tmp_path, capsys):
    model = tiny.write_model(tmp_path / "a")
    place = model / "model.safetensors"
    before = place.read_bytes()
    (tmp_path / "notes.txt").write_text("some words " * 400)
    words = ["--text", str(tmp_path / "notes.txt"), "--length", "32", "--windows", "1"]
    assert cli.run(["eval", "compare", str(model), "--save-reference", str(place), *words]) == 10
    assert "exists, and is not replaced" in capsys.readouterr().err
    assert place.read_bytes() == before


def test_a_card_says_what_was_read_and_by_what():
    made = {"quantkit": "1", "torch": "2", "samples": 8, "length": 32, "calibration": "bundled", "seed": 0}
    free = _calibration({**made, "command": "convert gptq-to-exl2", "route": "gptq-to-exl2", "data_free": True})
    assert free == "no text, by `quantkit convert gptq-to-exl2`, quantkit 1, torch 2"
    read = _calibration({**made, "command": "convert gptq-to-exl2", "route": "gptq-to-exl2", "data_free": False})
    assert read.startswith("8 × 32 tokens of `bundled`, seed 0, by")
    assert _calibration({**made, "command": "quantize", "effort": "nearest"}).startswith("no text, effort `nearest`")
