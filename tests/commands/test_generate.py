import json
from pathlib import Path

import pytest
import tiny
import torch
from tiny_lora import write_adapter

from quantkit.commands.generate import run
from quantkit.commands.generation.setup import idle_options
from quantkit.errors import BackendError, CheckpointError, RequestError, UsageError
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import GenerateSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=256)


class Said(Silent):
    def __init__(self):
        self.lines = []

    def say(self, line):
        self.lines.append(line)


def answer(folder, said=None, on_text=lambda text: True, **settings):
    settings = {"prompt": "the end", "max_new_tokens": 12, "ignore_eos": True, **settings}
    return run(GenerateSettings(str(folder), **settings), said or Silent(), on_text)


def test_report_has_text_ids_and_cost(folder):
    pieces = []
    report = answer(folder, on_text=lambda text: pieces.append(text) or True)
    found = json.loads(json.dumps(report.as_json()))
    assert found["text"] == "".join(pieces) == Tokenizer.open(folder).decode(found["token_ids"])
    assert len(found["token_ids"]) == 12 and found["finish_reason"] == "length"
    assert found["prompt_tokens"] == len(Tokenizer.open(folder).encode("the end"))
    assert found["prefill_tokens_per_second"] > 0 < found["decode_tokens_per_second"]
    assert found["load_seconds"] > 0
    assert (found["dtype"], found["device"], found["backend"]) == ("fp32", "cpu", report.placement.backend)
    assert dict(report.rows())["ended by"] == "length"


def test_prompt_file_is_the_prompt(folder, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("the end", encoding="utf-8")
    assert answer(folder, prompt=None, prompt_file=file).completion.token_ids == answer(folder).completion.token_ids


def test_chat_goes_through_the_template(folder):
    report = answer(folder, prompt=None, chat="Hi")
    assert report.completion.prompt_tokens == len(Tokenizer.open(folder).chat([{"role": "user", "content": "Hi"}]))


def test_prompt_gets_the_bos_that_the_tokenizer_asks_for(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    plain = answer(folder).completion.prompt_tokens
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    assert answer(folder).completion.prompt_tokens == plain + 1
    assert answer(folder, prompt="").completion.prompt_tokens == 1


def test_stops_at_an_end_of_text_token_unless_told_otherwise(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    free = answer(folder).completion.token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": free[3]}))
    stopped = answer(folder, ignore_eos=False).completion
    assert stopped.token_ids == free[: free.index(free[3]) + 1] and stopped.finish_reason == "stop"
    assert answer(folder).completion.token_ids == free


def test_a_model_without_end_of_text_token_is_said(tmp_path):
    folder = tiny.write_model(tmp_path / "model", eos_token_id=tiny.ABSENT)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    said = Said()
    assert answer(folder, said, ignore_eos=False).completion.finish_reason == "length"
    assert "names no end-of-text token" in said.lines[0]


def test_sampling_settings_reach_the_sampler(folder):
    greedy = answer(folder).completion.token_ids
    assert answer(folder, temperature=5.0, top_k=1, seed=3).completion.token_ids == greedy
    drawn = answer(folder, temperature=5.0, seed=3).completion.token_ids
    assert drawn != greedy and drawn == answer(folder, temperature=5.0, seed=3).completion.token_ids
    assert answer(folder, temperature=5.0, seed=3, min_p=1.0).completion.token_ids == greedy
    assert answer(folder, temperature=5.0, seed=3, top_p=0.0).completion.token_ids == greedy
    penalised = answer(folder, repetition_penalty=100.0).completion.token_ids
    assert len(set(penalised)) == len(penalised)


def test_penalties_and_typical_sampling_reach_the_sampler(folder):
    greedy = answer(folder).completion.token_ids
    for settings in ({"frequency_penalty": 100.0}, {"presence_penalty": 100.0}):
        penalised = answer(folder, **settings).completion.token_ids
        assert len(set(penalised)) == len(penalised)
    drawn = answer(folder, temperature=5.0, seed=3).completion.token_ids
    assert answer(folder, temperature=5.0, seed=3, typical_p=0.05).completion.token_ids not in (drawn, greedy)


def test_stop_strings_stop_tokens_and_banned_strings(folder):
    tokenizer = Tokenizer.open(folder)
    free = answer(folder).completion
    stop = free.text[4:7]
    stopped = answer(folder, stops=(stop,))
    assert stopped.completion.text == free.text[: free.text.find(stop)]
    assert stopped.as_json()["stop"] == stop and dict(stopped.rows())["ended by"] == f"stop, at `{stop}`"
    index = free.token_ids[3]
    for token in (str(index), tokenizer.token(index)):
        if tokenizer.id_of(token) == index:
            found = answer(folder, stop_tokens=(token,)).completion
            assert found.token_ids == free.token_ids[: free.token_ids.index(index) + 1]
    around = answer(folder, banned=(stop,)).completion
    assert stop not in around.text and around.text != free.text
    with pytest.raises(RequestError, match="has no token `no such token`"):
        answer(folder, stop_tokens=("no such token",))
    with pytest.raises(RequestError, match="`--ban` is an empty string"):
        answer(folder, banned=("",))


def test_a_special_token_spelled_as_stop_string_is_a_stop_token(tmp_path):
    """Special tokens add no text, so that as a text it would never come."""
    folder = tiny.write_model(tmp_path / "model")
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 0, torch.float32)
    tensors["lm_head.weight"][4] = 10 * tensors["lm_head.weight"][4]  # <|im_end|> comes sooner or later
    tiny.write_tensors(folder, tensors)
    free = answer(folder, max_new_tokens=40).completion
    assert 4 in free.token_ids
    stopped = answer(folder, max_new_tokens=40, stops=("<|im_end|>",)).completion
    assert stopped.finish_reason == "stop" and stopped.token_ids == free.token_ids[: free.token_ids.index(4) + 1]


def test_whoever_gets_the_text_can_end_it(folder):
    pieces = []
    report = answer(folder, on_text=lambda text: bool(pieces.append(text)) or len(pieces) < 3)
    assert report.completion.finish_reason == "callback" and len(report.completion.token_ids) == len(pieces) == 3


def test_adapters_on_the_fly_and_merged(folder, tmp_path):
    modules = {f"model.layers.{layer}.mlp.up_proj": (128, 64, 8) for layer in range(2)}
    write_adapter(tmp_path / "a", modules)
    write_adapter(tmp_path / "b:2", modules, seed=1)
    plain = answer(folder).completion.token_ids
    for loras in ((f"{tmp_path}/a:-0.5",), (f"{tmp_path}/a", f"{tmp_path}/b:2", f"{tmp_path}/b:2:0.25")):
        found = answer(folder, loras=loras).completion.token_ids
        assert found == answer(folder, loras=loras, merge_lora=True).completion.token_ids != plain
    with pytest.raises(UsageError, match=r"`half` in `.*` is no weight"):
        answer(folder, loras=(f"{tmp_path}/a:half",))
    with pytest.raises(CheckpointError, match=r"has no `adapter_config\.json`"):
        answer(folder, loras=(str(folder),))
    with pytest.raises(UsageError, match="`--merge-lora` without `--lora`"):
        answer(folder, merge_lora=True)


def test_drafts_change_the_passes_and_not_the_text(folder, tmp_path):
    plain = answer(folder, max_new_tokens=30)
    assert plain.as_json()["draft"] is None
    for draft in (str(folder), "ngram"):
        report = answer(folder, max_new_tokens=30, draft=draft, draft_tokens=3)
        assert report.completion.token_ids == plain.completion.token_ids
        told = json.loads(json.dumps(report.as_json()))["draft"]
        assert told["passes"] + told["passes_saved"] == 30 and told["accepted_tokens"] <= told["guessed_tokens"]
        assert f"{told['passes']} passes of the model for 30 tokens" in dict(report.rows())["draft"]
    assert answer(folder, max_new_tokens=30, draft=str(folder), draft_tokens=4).completion.tally.passes == 6
    tiny.write_model(tmp_path / "draft")
    text = (tmp_path / "draft" / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "draft" / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|end|>"), encoding="utf-8")
    with pytest.raises(RequestError, match="cannot draft for"):
        answer(folder, draft=str(tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="nowhere"):
        answer(folder, draft=str(tmp_path / "nowhere"))


def test_low_precision_is_reported(folder):
    assert answer(folder, dtype="bf16").as_json()["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"prompt": None}, UsageError, "no prompt given"),
        ({"chat": "Hi"}, UsageError, "--prompt and --chat given"),
        ({"prompt": ""}, RequestError, "the prompt is empty"),
        ({"prompt": "a\ud83d"}, RequestError, "not valid Unicode"),
        ({"max_new_tokens": 254}, RequestError, "the model's context has 256"),
        ({"temperature": -1.0}, UsageError, "`--temperature` is -1.0"),
        ({"dtype": "fp8"}, UsageError, "unknown dtype `fp8`"),
        ({"loras": ("nowhere",)}, CheckpointError, "`nowhere` has no `adapter_config"),
        ({"device": "tpu"}, BackendError, "unknown device `tpu`"),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_weights_are_read(settings, error, message, tmp_path):
    folder = tiny.write_model(tmp_path / "model", max_position_embeddings=256)
    tiny.write_tensors(folder, {})
    with pytest.raises(error, match=message):
        answer(folder, **settings)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens"):
        answer(folder)


def test_prompt_files_that_cannot_be_read(folder, tmp_path):
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        answer(folder, prompt=None, prompt_file=tmp_path / "absent")
    (tmp_path / "latin").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(RequestError, match="is not UTF-8 text: byte 3") as caught:
        answer(folder, prompt=None, prompt_file=tmp_path / "latin")
    assert caught.value.hint == f"iconv -t UTF-8 -o prompt.txt {tmp_path / 'latin'}"


def test_chat_without_a_template_and_a_model_without_tokenizer(tmp_path):
    folder = tiny.write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RequestError, match="has no chat template"):
        answer(folder, prompt=None, chat="Hi")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no `tokenizer\.json`"):
        answer(folder)
    assert load(folder).config.vocab_size == 320, "loading needs no tokenizer"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 5, "seed": 3}, ["`--top-k`, `--seed`: no effect, without `--temperature` the likeliest token is taken"]),
        ({"top_k": 5, "temperature": 0.5}, []),
        ({"top_k": 5, "prompts_file": Path("f")}, []),
        ({"draft_tokens": 2}, ["`--draft-tokens`: no effect, without `--draft` nothing is guessed"]),
        ({"kv_sink": 4}, ["`--kv-sink`: no effect, without `--kv-window` every position is seen"]),
        ({"kv_sink": 4, "kv_window": 300}, []),
        ({"batch": 3, "optimistic": True}, ["`--batch`, `--optimistic`: no effect, without `--prompts-file` there is one request"]),
        ({}, []),
    ],
)
def test_options_that_change_nothing_are_named(options, told) -> None:
    assert idle_options(GenerateSettings("m", **options)) == told


def test_and_are_said(folder) -> None:
    said = Said()
    run(GenerateSettings(str(folder), "the", max_new_tokens=1, top_k=3), said)
    assert "`--top-k`: no effect, without `--temperature` the likeliest token is taken" in said.lines
