import json
import re
from pathlib import Path

import pytest
import tiny
from tiny_lora import write_adapter

from quantkit import cli
from quantkit.commands import generate
from quantkit.commands.generation import queue
from quantkit.errors import CheckpointError, RequestError, UsageError
from quantkit.progress import Silent
from quantkit.runtime.capacity import CachePlan
from quantkit.settings import GenerateSettings

LINES = [
    {"prompt": "the end"},
    {"id": "a", "prompt": "and then there was a man in the sand " * 20, "max_new_tokens": 7},
    {"chat": "Hi", "temperature": 1.5, "seed": 3, "top_k": 40},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "?"}]},
    {"prompt": "the end", "repetition_penalty": 50, "ban": "e", "stop": ["zzz", "qqq"], "ignore_eos": True},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


def write_lines(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n\n")
    return path


def serve(folder, file, on_answer=lambda line: None, **settings):
    settings = {"max_new_tokens": 12, "ignore_eos": True, **settings}
    return queue.run(GenerateSettings(str(folder), prompts_file=file, **settings), Silent(), on_answer)


def alone(folder, **settings):
    settings = {"max_new_tokens": 12, "ignore_eos": True, **settings}
    return generate.run(GenerateSettings(str(folder), **settings), Silent()).completion


@pytest.mark.parametrize("settings", [{}, {"batch": 1}, {"batch": 2, "token_budget": 9, "cache_tokens": 1024}, {"draft": "ngram"}])
def test_every_line_gets_the_answer_that_it_gets_alone(settings, folder, tmp_path):
    finished = []
    report = serve(folder, write_lines(tmp_path / "f.jsonl", LINES), finished.append, **settings)
    expected = [
        alone(folder, prompt="the end"),
        alone(folder, prompt=LINES[1]["prompt"], max_new_tokens=7),
        alone(folder, chat="Hi", temperature=1.5, seed=3, top_k=40),
        None,
        alone(folder, prompt="the end", repetition_penalty=50.0, banned=("e",)),
    ]
    for (_, served), completion in zip(report.answers, expected, strict=True):
        if completion is not None and "draft" not in settings:
            assert served.completion.token_ids == completion.token_ids
        if completion is not None and "draft" in settings:
            assert served.completion.token_ids == completion.token_ids or served.completion.tally.guessed
    assert [name for name, _ in report.answers] == [1, "a", 3, 4, 5]
    assert sorted(map(str, (line["id"] for line in finished))) == ["1", "3", "4", "5", "a"]
    found = json.loads(json.dumps(report.as_json()))
    assert {line["id"]: line["text"] for line in found["answers"]} == {line["id"]: line["text"] for line in finished}
    assert found["new_tokens"] == 12 * 4 + 7 and found["tokens_per_second"] > 0 and found["passes"] > 0
    assert dict(report.rows())["requests"].startswith("5, ")


def test_few_pages_and_optimism(folder, tmp_path):
    lines = [{"prompt": "a" * 250, "max_new_tokens": 20, "id": index} for index in range(3)]
    report = serve(folder, write_lines(tmp_path / "f.jsonl", lines), cache_tokens=5 * 256, optimistic=True)
    assert report.preemptions > 0
    assert len({served.completion.token_ids for _, served in report.answers}) == 1
    assert f"{report.preemptions} requests read again" in dict(report.rows())["passes"]


def test_a_common_beginning_is_read_once(folder, tmp_path):
    lines = [{"prompt": "a" * 300 + f" {index}"} for index in range(4)]
    file = write_lines(tmp_path / "f.jsonl", lines)
    shared, apart = serve(folder, file), serve(folder, file, share_prefixes=False)
    assert shared.shared_tokens == shared.as_json()["shared_tokens"] == 3 * 256 and apart.shared_tokens == 0
    assert "768 of them shared" in dict(shared.rows())["requests"]
    assert [done.completion.token_ids for _, done in shared.answers] == [done.completion.token_ids for _, done in apart.answers]


def test_the_cache_is_sized_from_the_requests_and_the_free_memory(folder, tmp_path, monkeypatch):
    """Four requests of two pages; a page takes 2 layers × 2 heads × 256 positions × 2 × 16 float32."""
    page = 2 * 2 * 256 * 2 * 16 * 4
    file = write_lines(tmp_path / "f.jsonl", [{"prompt": "a" * 300 + f" {index}"} for index in range(4)])
    assert serve(folder, file).cache.cache_bytes == 8 * page
    assert serve(folder, file, share_prefixes=False, batch=2).cache.cache_bytes == 4 * page
    monkeypatch.setattr(queue, "free_bytes", lambda device: 10 * page)
    report = serve(folder, file, cache_fraction=0.5)
    assert report.cache.cache_bytes == 5 * page and len(report.answers) == 4
    with pytest.raises(RequestError, match=r"line 1 of .* need 512 positions of cache, 0\.1 .* has room for 256"):
        serve(folder, file, cache_fraction=0.1)
    with pytest.raises(UsageError, match=r"`--cache-fraction` is 1\.5"):
        serve(folder, file, cache_fraction=1.5)


def test_a_line_beyond_the_free_memory_is_named_before_any_of_it_is_taken(folder, tmp_path, monkeypatch):
    """The default fraction of what the machine has: the pool would be most of its memory."""

    def refuse(*args, **options):
        raise AssertionError("a pool was made")

    monkeypatch.setattr(CachePlan, "pool", refuse)
    lines = [{"prompt": "a"}, {"prompt": "a", "id": "long", "max_new_tokens": 10**12}]
    with pytest.raises(RequestError, match=r"line 2 of .*: 1 prompt tokens and 1000000000000 new ones") as caught:
        serve(folder, write_lines(tmp_path / "f.jsonl", lines), allow_beyond_context=True)
    assert "max_new_tokens" in caught.value.hint
    monkeypatch.setattr(queue, "free_bytes", lambda device: 0)
    with pytest.raises(RequestError, match=r"line 1 of .* has room for 0"):
        serve(folder, write_lines(tmp_path / "f.jsonl", lines[:1]))


def test_the_caches_of_a_draft_model_are_taken_off_the_free_memory(folder, tmp_path, monkeypatch):
    """A draft like the model: of twelve pages two for each of three requests, and as many for their drafts."""
    page = 2 * 2 * 256 * 2 * 16 * 4
    file = write_lines(tmp_path / "f.jsonl", [{"prompt": "a" * 300 + f" {index}"} for index in range(4)])
    monkeypatch.setattr(queue, "free_bytes", lambda device: 20 * page)
    assert serve(folder, file, draft=str(folder), cache_fraction=1.0).cache.cache_bytes == 8 * page
    report = serve(folder, file, draft=str(folder), cache_fraction=0.6)
    assert report.cache.cache_bytes == 6 * page and len(report.answers) == 4
    report = serve(folder, file, draft=str(folder), cache_fraction=0.2)
    assert report.cache.cache_bytes == 2 * page and len(report.answers) == 4


def test_adapters_of_lines(folder, tmp_path):
    write_adapter(tmp_path / "a", {f"model.layers.{layer}.mlp.up_proj": (128, 64, 8) for layer in range(2)})
    lora = f"{tmp_path / 'a'}:2"
    lines = [{"prompt": "the end"}, {"prompt": "the end", "lora": lora}, {"prompt": "the end", "lora": []}]
    file = write_lines(tmp_path / "f.jsonl", lines)
    plain, adapted, none = (served.completion.token_ids for _, served in serve(folder, file).answers)
    assert plain == none != adapted == alone(folder, prompt="the end", loras=(lora,)).token_ids
    first, second, third = (served.completion.token_ids for _, served in serve(folder, file, loras=(lora,)).answers)
    assert first == second == adapted and third == plain
    with pytest.raises(UsageError, match=r"line 2 of .*: `lora` of one line beside `--merge-lora`"):
        serve(folder, file, loras=(lora,), merge_lora=True)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("{", RequestError, "no JSON: "),
        ("[]", RequestError, "no JSON object"),
        ("[" * 100_000, RequestError, "no JSON: it is nested too deeply"),
        ('{"prompt": "a", "id": NaN}', RequestError, "no JSON: NaN is no number of JSON"),
        ('{"prompt": "a", "id": 1e999}', RequestError, "no JSON: 1e999 is too large a number"),
        ({"prompt": "a", "id": [1]}, RequestError, "`id` is an object or a list, expected a text or a number"),
        ({"prompt": "a", "temperature": int("1" * 401)}, RequestError, r"`temperature` is a number beyond 2\^63"),
        ({"prompt": "a", "max_new_tokens": -int("1" * 401)}, RequestError, r"`max_new_tokens` is a number beyond 2\^63"),
        ({}, RequestError, "no prompt given, expected one of prompt, chat, messages"),
        ({"prompt": "a", "chat": "b"}, RequestError, "prompt and chat given"),
        ({"prompt": 3}, RequestError, "`prompt` is 3, expected a text"),
        ({"messages": "a"}, RequestError, "`messages` is no list"),
        ({"prompt": "a", "temprature": 1}, RequestError, "unknown key `temprature`"),
        ({"prompt": "a", "temperature": "hot"}, RequestError, "`temperature` is 'hot', expected a number"),
        ({"prompt": "a", "max_new_tokens": 1.5}, RequestError, r"`max_new_tokens` is 1\.5, expected a whole number"),
        ({"prompt": "a", "ignore_eos": 1}, RequestError, "`ignore_eos` is 1, expected true or false"),
        ({"prompt": "a", "seed": -1}, UsageError, "`--seed` is -1"),
        ({"prompt": "a", "top_p": 2}, UsageError, "`--top-p` is 2"),
        ({"prompt": "a", "stop": [1]}, RequestError, r"`stop` is \[1\], expected a text"),
        ({"prompt": "a", "max_new_tokens": 2000}, RequestError, "1 prompt tokens and 2000 new ones need 2001 positions, the model's context has 1024"),
        ({"prompt": ""}, RequestError, "the prompt is empty"),
        ({"prompt": "a", "lora": "nowhere"}, CheckpointError, "`nowhere` has no `adapter_config"),
    ],
)
def test_lines_that_cannot_be_served_are_named_before_any_weight_is_read(line, error, message, tmp_path):
    folder = tiny.write_model(tmp_path / "model", max_position_embeddings=1024)
    tiny.write_tensors(folder, {})
    with pytest.raises(error, match=rf"line 2 of `.*f\.jsonl`: {message}"):
        serve(folder, write_lines(tmp_path / "f.jsonl", [{"prompt": "a"}, line]))


def test_only_a_line_feed_ends_a_line(folder, tmp_path):
    """Other separators may stand raw in a JSON text."""
    file, text = tmp_path / "f.jsonl", "a\u2028b\u2029c\u0085d"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False), json.dumps({"prompt": "e"})]
    file.write_bytes("\r\n".join(lines).encode())
    report = serve(folder, file)
    assert [name for name, _ in report.answers] == [1, 2]
    assert report.answers[0][1].completion.token_ids == alone(folder, prompt=text).token_ids


def test_a_byte_order_mark_is_no_part_of_a_file(folder, tmp_path):
    file, prompt = tmp_path / "f.jsonl", tmp_path / "p.txt"
    file.write_text(json.dumps({"prompt": "the end"}), encoding="utf-8-sig")
    prompt.write_text("the end", encoding="utf-8-sig")
    expected = alone(folder, prompt="the end").token_ids
    assert serve(folder, file).answers[0][1].completion.token_ids == expected
    assert alone(folder, prompt_file=prompt).token_ids == expected


def test_files_without_requests_and_prompts_beside_them(folder, tmp_path):
    with pytest.raises(RequestError, match="has no requests"):
        serve(folder, write_lines(tmp_path / "f.jsonl", []))
    with pytest.raises(RequestError, match="cannot be read: No such file"):
        serve(folder, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="`--chat` beside `--prompts-file`"):
        serve(folder, write_lines(tmp_path / "g.jsonl", LINES), chat="Hi")
    with pytest.raises(RequestError, match="the cache has 256"):
        serve(folder, write_lines(tmp_path / "g.jsonl", LINES), cache_tokens=256)


def test_jsonl_or_one_object_on_stdout(folder, tmp_path, capsys):
    file = write_lines(tmp_path / "f.jsonl", LINES)
    arguments = ["generate", str(folder), "--prompts-file", str(file), "--max-new-tokens", "9", "--ignore-eos"]
    assert cli.run(arguments) == 0
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert len(lines) == 5 and "requests 5, " in shown.err
    assert cli.run([*arguments, "--json", "--batch", "2", "--token-budget", "30", "--latency-ms", "1000", "--optimistic", "--no-share-prefixes", "--cache-fraction", "0.5"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {str(line["id"]): line["text"] for line in lines} == {str(line["id"]): line["text"] for line in found["answers"]}
    assert cli.run([*arguments, "--cache-tokens", "256"]) == 16
    assert "the cache has 256" in capsys.readouterr().err


def test_the_lines_of_the_guide_are_served(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "ADAPTER", {"model.layers.0.mlp.up_proj": (128, 64, 8)})
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "generate.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)
    report = serve(folder, write_lines(tmp_path / "f.jsonl", lines.splitlines()))
    assert [name for name, _ in report.answers] == ["a", 2, 3]
    assert len(report.answers[0][1].completion.token_ids) == 50
    for key in queue.FIELDS:
        assert f"`{key}`" in guide or f'"{key}"' in guide
