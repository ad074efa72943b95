import json
from pathlib import Path

import pytest
import tiny

from quantkit import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "notes.txt"
    file.write_text("the end of the thing and another in the sands\n" * 20)
    return str(file)


def test_perplexity_json(folder, text, capsys):
    arguments = ["eval", "perplexity", folder, "--text", text, "--length", "32", "--windows", "3", "--dtype", "fp32"]
    assert cli.run([*arguments, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["windows"], found["tokens"], found["predictions"], found["length"]) == (3, 96, 93, 32)
    assert (found["bos"], found["dtype"], found["source"]) == (False, "fp32", text)
    assert {"perplexity", "mean_nll", "text_tokens", "convention", "device", "backend", "notes"} <= found.keys()
    assert cli.run([*arguments, "--bos", "--json"]) == 0
    with_bos = json.loads(capsys.readouterr().out)
    assert with_bos["bos"] and with_bos["predictions"] == 93 and with_bos["mean_nll"] != found["mean_nll"]


def test_compare_json(folder, text, tmp_path, capsys):
    other = str(tiny.write_model(tmp_path / "other", seed=1))
    assert cli.run(["eval", "compare", folder, other, "--text", text, "--length", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_ci95"][0] < found["kl_mean"] < found["kl_ci95"][1]
    assert {
        "kl_p90",
        "kl_p99",
        "top1_agreement",
        "perplexity_reference",
        "perplexity_candidate",
        "tokens",
        "windows",
        "length",
        "bos",
        "dtype",
        "convention",
        "notes",
    } <= found.keys()


def test_people_see_what_defines_the_figures(folder, text, capsys):
    assert cli.run(["eval", "perplexity", folder, "--text", text, "--length", "32"]) == 0
    shown = capsys.readouterr().out
    assert "perplexity" in shown and "BOS" in shown and "fp32" in shown and "windows without overlap" in shown
    assert cli.run(["eval", "compare", folder, folder, "--text", text, "--length", "32"]) == 0
    shown = capsys.readouterr().out
    assert "mean KL" in shown and "100.00%" in shown and "interval" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--length", "9999"], 16, "windows of 9999 tokens do not fit into the model's context of 2048"),
        (["--windows", "999"], 13, "the text has"),
        (["--length", "1"], 2, "invalid value for '--length'"),
        (["--dataset", "wikitext2"], 2, "`--text` and `--dataset` given"),
        (["--dtype", "fp8"], 2, "unknown dtype `fp8`"),
        (["--text", "nowhere.parquet"], 13, "no such file: `nowhere.parquet`"),
    ],
)
@pytest.mark.parametrize("command", ["perplexity", "compare"])
def test_errors_are_two_lines_on_stderr_and_nothing_on_stdout(command, arguments, code, message, folder, text, capsys):
    models = [folder] if command == "perplexity" else [folder, folder]
    assert cli.run(["eval", command, *models, "--text", text, *arguments, "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}") and captured.err.splitlines()[1].startswith("hint: ")


def test_a_missing_tokenizer_is_a_checkpoint_error(tmp_path, text, capsys):
    folder = tiny.write_model(tmp_path / "model", tokenizer=False)
    assert cli.run(["eval", "perplexity", str(folder), "--text", text, "--length", "32"]) == 10
    assert capsys.readouterr().err.startswith(f"error: `{folder}` has no `tokenizer.json`")


def test_several_models_make_one_table(folder, text, tmp_path, capsys):
    other = str(tiny.write_model(tmp_path / "other", seed=1))
    arguments = ["eval", "perplexity", folder, other, "--text", text, "--length", "32", "--stride", "16"]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [model["model"] for model in found] == [folder, other] and found[0]["mean_nll"] != found[1]["mean_nll"]
    assert found[0]["stride"] == 16 and found[0]["perplexity_error"] > 0 and "16 tokens apart" in found[0]["convention"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr().out
    assert "standard error" in shown and "16 tokens apart" in shown
    assert cli.run([*arguments[:-1], "64"]) == 2
    assert capsys.readouterr().err.startswith("error: `--stride` is 64, expected 1 to the length of a window, 32")


def test_a_gate_decides_the_exit_code_and_leaves_the_result(folder, text, tmp_path, capsys):
    other = str(tiny.write_model(tmp_path / "other", seed=1))
    arguments = ["eval", "compare", folder, other, "--text", text, "--length", "32"]
    assert cli.run([*arguments, "--gate", "kl_mean<0.001,ppl_ratio<99", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["kl_mean"] > 0.001 and len(found["gate"]["failed"]) == 1 and len(found["worst"]) == 10
    assert cli.run([*arguments, "--gate", "kl_mean<99"]) == 0
    assert "passed: kl_mean<99" in capsys.readouterr().out
    assert cli.run([*arguments, "--gate", "loss<1"]) == 2
    assert "no figure `loss`" in capsys.readouterr().err


def test_a_saved_reference_stands_for_its_model(folder, text, tmp_path, capsys):
    other, file = str(tiny.write_model(tmp_path / "other", seed=1)), str(tmp_path / "reference")
    windows = ["--text", text, "--length", "32"]
    assert cli.run(["eval", "compare", folder, *windows, "--save-reference", file, "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert abs(saved["self_kl"]) < 1e-6 and saved["saved"] == file and saved["bytes"] > 0
    assert cli.run(["eval", "compare", folder, other, *windows, "--save-reference", file, "--json"]) == 0
    direct = json.loads(capsys.readouterr().out)
    assert cli.run(["eval", "compare", file, other, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_mean"] == pytest.approx(direct["kl_mean"], abs=found["kl_error"])
    assert found["kl_mean"] == pytest.approx(direct["saved_reference"]["kl_mean"], rel=1e-9)
    for key in ("windows", "length", "source", "text_tokens", "bos", "reference"):
        assert found[key] == direct[key]
    assert cli.run(["eval", "compare", file, other, "--bos"]) == 2
    assert "has its own text" in capsys.readouterr().err
    assert cli.run(["eval", "compare", folder, *windows]) == 2
    assert "a reference alone" in capsys.readouterr().err
    assert cli.run(["eval", "compare", str(tmp_path / "other" / "config.json"), other]) == 10
    assert "saved reference" in capsys.readouterr().err


def test_a_saved_reference_with_bos_has_windows_that_begin_with_it(folder, text, tmp_path, capsys):
    file = str(tmp_path / "reference")
    arguments = ["eval", "compare", folder, "--text", text, "--length", "32", "--bos", "--save-reference", file]
    assert cli.run(arguments) == 0
    capsys.readouterr()
    assert cli.run(["eval", "compare", file, folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bos"] and found["length"] == 32 and abs(found["kl_mean"]) < 1e-6 and found["top1_agreement"] == 1


def test_degeneration_says_what_it_found_and_exits_by_it(folder, tmp_path, capsys, monkeypatch):
    """Random weights talk nonsense, which is judged as such alone, and as no worse than itself beside itself."""
    arguments = ["eval", "degeneration", folder, "--quick", "--tokens", "16"]
    assert cli.run([*arguments, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "degenerate" and 0 <= found["loop_rate"] <= 1
    (form,) = found["formats"]
    assert form["format"] == "fp32" and any("entropy" in finding for finding in form["findings"])
    assert len(found["prompts"]) == form["conversations"] == 12 and {"greedy", "sampled"} == {
        one["way"] for one in found["prompts"]
    }
    assert any("left out" in note for note in found["notes"])
    assert cli.run([*arguments, "--reference", folder, "--kv", "fp16,int8"]) == 0
    shown = capsys.readouterr().out
    assert "healthy" in shown and "fp16" in shown and "int8" in shown and "beside the reference" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--kv", "int3"], 2, "there is no cache format `int3`"),
        (["--kv", "int8,fp16,int8"], 2, "`--kv` names the cache format `int8` twice"),
        (["--tokens", "9999"], 16, "conversations of 9999 tokens take up to"),
        (["--tokens", "3"], 2, "invalid value for '--tokens'"),
    ],
)
def test_what_cannot_be_probed_is_refused(arguments, code, message, folder, capsys):
    assert cli.run(["eval", "degeneration", folder, *arguments, "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}")


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("tasks") / "ends.jsonl"
    rows = [{"query": f"the end of {at}", "choices": ["the thing", "sands"], "gold": at % 2} for at in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_tasks_of_every_kind(folder, questions, tmp_path, capsys):
    last, written = tmp_path / "last.jsonl", tmp_path / "written.jsonl"
    last.write_text('{"context": "the end of the", "continuation": "thing"}\n' * 2)
    written.write_text('{"context": "x", "question": "y", "answers": ["z"]}\n' * 2)
    items = tmp_path / "items.jsonl"
    arguments = ["eval", "tasks", folder, questions, str(last), str(written), "--limit", "3", "--save-items", str(items)]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["task"], one["kind"], one["items"]) for one in found["tasks"]] == [
        ("ends", "multiple choice", 3),
        ("last", "last word", 2),
        ("written", "answer", 2),
    ]
    assert set(found["tasks"][0]["figures"]) == {"accuracy", "accuracy_by_length"}
    assert set(found["tasks"][2]["figures"]) == {"exact_match", "f1"}
    saved = [json.loads(line) for line in items.read_text().splitlines()]
    assert len(saved) == 7 and saved[0]["task"] == "ends" and len(saved[0]["likelihoods"]) == 2
    assert cli.run(arguments[:4]) == 0
    shown = capsys.readouterr().out
    assert "accuracy" in shown and "ends" in shown
    before = Path(questions).read_bytes()
    assert cli.run([*arguments[:4], "--save-items", questions]) == 10
    assert "is not replaced" in capsys.readouterr().err and Path(questions).read_bytes() == before


def test_examples_change_what_is_asked_and_fields_may_be_renamed(folder, questions, tmp_path, capsys):
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(Path(questions).read_text().replace('"query"', '"sentence"'))
    values = []
    for arguments in ([questions], [questions, "--shots", "2"], [str(renamed), "--shots", "2", "--field", "query=sentence"]):
        items = tmp_path / f"items-{len(values)}"
        assert cli.run(["eval", "tasks", folder, *arguments, "--save-items", str(items), "--json"]) == 0
        capsys.readouterr()
        values.append([json.loads(line)["likelihoods"] for line in items.read_text().splitlines()])
    assert len(values[0]) == 6 and len(values[1]) == 4 and values[1] == values[2] and values[0][2:] != values[1]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.jsonl"], 13, "`absent.jsonl` cannot be read: No such file"),
        (["QUESTIONS", "--field", "query=gold"], 13, "`ends` has the fields `query`, `choices`, which make no task"),
        (["QUESTIONS", "--field", "query"], 2, "`--field query` renames nothing"),
        (["QUESTIONS", "--metric", "absent"], 2, "there is no metric `absent`"),
        (["QUESTIONS", "--source", "en"], 2, "a translation needs `--source` and `--target`"),
        (["QUESTIONS", "--shots", "6"], 13, "`ends` has 6 items, 6 of them as examples leave none"),
    ],
)
def test_tasks_that_cannot_be_asked_are_refused(arguments, code, message, folder, questions, capsys):
    arguments = [questions if one == "QUESTIONS" else one for one in arguments]
    assert cli.run(["eval", "tasks", folder, *arguments, "--json"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}")


def test_a_question_too_long_to_answer_is_refused_before_the_weights_are_read(tmp_path, capsys):
    model = tiny.write_model(tmp_path / "model", max_position_embeddings=64)
    tiny.write_tensors(model, {})
    written = tmp_path / "written.jsonl"
    row = {"context": "x", "question": "y", "answers": ["z"]}
    written.write_text("".join(json.dumps({**row, "context": context}) + "\n" for context in ("x", "the end " * 40)))
    assert cli.run(["eval", "tasks", str(model), str(written), "--json"]) == 16
    assert "context" in capsys.readouterr().err


def test_cache_formats_are_candidates_too(folder, text, tmp_path, capsys):
    windows = ["--text", text, "--length", "32"]
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "fp16,q4_0", "--json"]) == 0
    fine, coarse = json.loads(capsys.readouterr().out)["candidates"]
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "fp16,q4_0", "--gate", "kl_mean<1e-9"]) == 3
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    table = [words for words in lines if words and words[0] in ("fp16", "q4_0")]
    assert [words[:2] for words in table] == [["fp16", f"{fine['kl_mean']:.6f}"], ["q4_0", f"{coarse['kl_mean']:.6f}"]]
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "fp16,int3"]) == 2
    captured = capsys.readouterr()
    assert "there is no cache format `int3`" in captured.err and not captured.out
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "int8,int8"]) == 2
    captured = capsys.readouterr()
    assert "names the cache format `int8` twice" in captured.err and "--kv int8" in captured.err and not captured.out
    assert fine["candidate"].endswith("cache fp16") and 0 <= fine["kl_mean"] < coarse["kl_mean"]
    assert cli.run(["eval", "compare", folder, folder, *windows, "--kv", "q4_0", "--gate", "kl_mean<1e-9"]) == 3
    assert "cache q4_0" in capsys.readouterr().out
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "int3"]) == 2
    assert "there is no cache format `int3`" in capsys.readouterr().err
    assert cli.run(["eval", "compare", folder, *windows, "--kv", "fp16", "--kv-resident", "256"]) == 16
    assert "stay resident" in capsys.readouterr().err
