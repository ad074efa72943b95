import json

import pytest
import tiny
from tiny_lora import write_adapter

from quantkit import cli
from quantkit.runtime.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny.write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256))


def test_json_is_one_object_and_nothing_else_is_on_stdout(folder, capsys):
    assert cli.run(["generate", folder, "--prompt", "the end", "--max-new-tokens", "8", "--ignore-eos", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["token_ids"]) == 8 and found["finish_reason"] == "length"
    assert {
        "text",
        "token_ids",
        "log_probabilities",
        "finish_reason",
        "stop",
        "draft",
        "prompt_tokens",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "load_seconds",
        "dtype",
        "device",
        "backend",
    } <= found.keys()


def test_people_see_the_text_alone_on_stdout(folder, capsys):
    arguments = ["generate", folder, "--chat", "Hi", "--max-new-tokens", "9", "--ignore-eos"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr()
    assert cli.run([*arguments, "--json"]) == 0
    assert shown.out == json.loads(capsys.readouterr().out)["text"] + "\n"
    assert "ended by length" in shown.err


def test_every_option_reaches_the_request(folder, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text("the end")
    common = ["--prompt-file", str(file), "--max-new-tokens", "12", "--ignore-eos", "--device", "cpu", "--json"]

    def ids(*options):
        assert cli.run(["generate", folder, *common, *options]) == 0
        return json.loads(capsys.readouterr().out)["token_ids"]

    greedy = ids()
    wild = ids("--temperature", "5", "--seed", "7")
    assert wild != greedy and wild != ids("--temperature", "5", "--seed", "8")
    for narrow in (["--top-k", "1"], ["--top-p", "0"], ["--min-p", "1"]):
        assert ids("--temperature", "5", "--seed", "7", *narrow) == greedy
    penalised = ids("--repetition-penalty", "100")
    assert len(set(penalised)) == len(penalised)
    assert ids("--dtype", "fp32") == greedy
    for penalty in ("--frequency-penalty", "--presence-penalty"):
        penalised = ids(penalty, "100")
        assert len(set(penalised)) == len(penalised)
    assert ids("--temperature", "5", "--seed", "7", "--typical-p", "0") != wild
    assert ids("--stop-token", str(greedy[4])) == greedy[: greedy.index(greedy[4]) + 1]
    assert ids("--draft", "ngram") == ids("--draft", folder, "--draft-tokens", "2") == greedy
    write_adapter(tmp_path / "a", {"model.layers.0.mlp.up_proj": (128, 64, 8)})
    adapted = ids("--lora", f"{tmp_path / 'a'}:-2")
    assert greedy != adapted == ids("--lora", f"{tmp_path / 'a'}:-2", "--merge-lora")
    assert adapted != ids("--lora", f"{tmp_path / 'a'}:-2", "--lora", str(tmp_path / "a"))
    text = Tokenizer.open(folder).decode(greedy)
    assert ids("--stop", "\n\n\n", "--stop", text[5]) != greedy != ids("--ban", text[5])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no prompt given"),
        (["--prompt", "a", "--chat", "b"], 2, "--prompt and --chat given"),
        (["--prompt", "a", "--max-new-tokens", "0"], 2, "invalid value for '--max-new-tokens'"),
        (["--prompt", "a", "--draft-tokens", "0"], 2, "invalid value for '--draft-tokens'"),
        (["--prompt", "a", "--top-p", "2"], 2, "`--top-p` is 2.0"),
        (["--prompt", "a", "--max-new-tokens", "256"], 16, "1 prompt tokens and 256 new ones need 257 positions"),
        (["--prompt", ""], 16, "the prompt is empty"),
        (["--prompt", "a", "--device", "tpu"], 15, "unknown device `tpu`"),
        (["--prompt-file", "nowhere.txt"], 16, "`nowhere.txt` cannot be read"),
    ],
)
@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_errors_are_two_lines_on_stderr_and_nothing_on_stdout(arguments, code, message, json_option, folder, capsys):
    assert cli.run(["generate", folder, *arguments, *json_option]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {message}") and captured.err.splitlines()[1].startswith("hint: ")


def test_a_model_without_tokenizer(tmp_path, capsys):
    folder = tiny.write_model(tmp_path / "model", tokenizer=False)
    assert cli.run(["generate", str(folder), "--prompt", "a"]) == 10
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: `{folder}` has no `tokenizer.json`\nhint: copy ")


def test_stop_token_is_not_part_of_the_text(tmp_path, capsys):
    folder = tiny.write_model(tmp_path / "model")
    arguments = ["generate", str(folder), "--prompt", "the end", "--max-new-tokens", "12", "--json"]
    cli.run([*arguments, "--ignore-eos"])
    free = json.loads(capsys.readouterr().out)["token_ids"]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[5]]}))
    cli.run(arguments)
    found = json.loads(capsys.readouterr().out)
    assert found["finish_reason"] == "stop" and found["token_ids"] == free[: free.index(free[5]) + 1]
    assert found["text"] == Tokenizer.open(folder).decode(found["token_ids"][:-1])
