"""Inputs that are damaged on purpose, and what a command makes of each: the cases of `tests/commands/test_damaged_input.py`.

`python tests/damaged.py > docs/results/damaged-input.md` runs all of them and writes the table.

A case is a sound input, one change to it, and the command that reads it. In the command `M` is the model, `W` the folder
around it. `says` is what its error must name: file, tensor, key.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import tiny
import tiny_gguf
import tiny_gptq
import torch
from safetensors.torch import load_file, save_file

from quantkit import cli

Damage = Callable[[Path], None]
"""A change to the model at this path, which lies in a folder of its own."""

CHAT = ["generate", "M", "--chat", "hi", "--max-new-tokens", "1"]
CHECK = ["check", "M"]
QUANTIZE = ["quantize", "M", "-o", "W/out", "--effort", "nearest", "--no-eval"]
CALIBRATED = [*QUANTIZE[:4], "--effort", "fast", "--samples", "2", "--length", "16", "--no-eval"]
EXL2 = ["quantize", "M", "-o", "W/out", "--format", "exl2", "--no-eval", "--samples", "2", "--length", "16"]
LIMIT_BYTES = 250 << 20
LIMIT_SECONDS = 0.5


@dataclass(frozen=True)
class Case:
    """`command` is run on `model` after `damage`; it must say all of `says`. `fault`: the row of a list of field faults."""

    name: str
    model: str
    damage: Damage
    command: list[str]
    says: tuple[str, ...]
    fault: str = ""


@dataclass(frozen=True)
class Seen:
    code: int
    error: str
    hint: str
    stderr: str
    written: list[str]
    cpu_seconds: float
    memory_bytes: int


# Sound models


def write_models(folder: Path) -> None:
    """One of each kind, in a folder of its own."""
    tiny.write_model(folder / "shards" / "m", dtype="bfloat16", shards=3)
    tiny.write_model(folder / "dense" / "m", dtype="bfloat16")
    tiny_gptq.write_model(folder / "gptq" / "m")
    tiny_gptq.write_model(folder / "scattered" / "m", act_order=True)
    tiny_gptq.write_awq(folder / "awq" / "m")
    (folder / "gguf").mkdir()
    tiny_gguf.write_model(folder / "gguf" / "m")
    convert = ["convert", "gptq-to-exl2", str(folder / "gptq" / "m"), str(folder / "exl2" / "m"), "--bpw", "5"]
    _quiet([*convert, "--data-free", "--no-eval"])
    adapted = tiny.write_model(folder / "adapter" / "m", dtype="bfloat16")
    write_adapter(adapted.parent / "adapter")
    pickled = tiny.write_model(folder / "pickle" / "m", dtype="bfloat16")
    tensors = load_file(pickled / "model.safetensors")
    (pickled / "model.safetensors").unlink()
    torch.save(tensors, pickled / "pytorch_model.bin")
    measured = tiny.write_model(folder / "measured" / "m", dtype="bfloat16")
    texts = ["--samples", "2", "--length", "16"]
    _quiet(["measure", str(measured), "-o", str(measured.parent / "m.json"), *texts])
    _quiet(["plan", str(measured.parent / "m.json"), "--bpw", "5", "-o", str(measured.parent / "p.json")])


def write_adapter(path: Path) -> None:
    path.mkdir()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(4, 64), f"{module}.lora_B.weight": torch.ones(64, 4)}
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))


def _quiet(arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as words:
        code = cli.run(arguments)
    assert code == 0, words.getvalue()


# Running one


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError("it takes too long")


signal.signal(signal.SIGALRM, _give_up)


def lay_out(case: Case, models: Path, work: Path) -> list[str]:
    """The damaged input below `work`; returns the arguments of the command."""
    shutil.copytree(models / case.model, work, symlinks=True)
    case.damage(work / "m")
    return [argument.replace("W/", f"{work}/") if argument != "M" else str(work / "m") for argument in case.command]


def see(case: Case, models: Path, work: Path) -> Seen:
    """Run in this process."""
    arguments = lay_out(case, models, work)
    before = listing(work)
    out, words = io.StringIO(), io.StringIO()
    resident, start = _reset_peak(), time.process_time()
    signal.alarm(20)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(words), mock.patch.dict(os.environ):
        code = cli.run(arguments)
    signal.alarm(0)
    seconds, peak = time.process_time() - start, _status("VmHWM")
    stderr = words.getvalue() + (out.getvalue() if case.command[0] == "check" else "")
    error = re.search(r"^error: (.*)$", stderr, re.MULTILINE)
    hint = re.search(r"^hint: (.*)$", stderr, re.MULTILINE)
    return Seen(
        code,
        error[1] if error else "",
        hint[1] if hint else "",
        stderr,
        sorted(set(listing(work)) ^ set(before)),
        seconds,
        peak - resident,
    )


def listing(folder: Path) -> list[str]:
    """Every file with its content's place on the disk and time, so that a change shows."""
    found = []
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place) / name
            status = path.lstat()
            found.append(f"{path.relative_to(folder)} {status.st_size if path.is_file() else 0} {status.st_ino}")
    return found


def _reset_peak() -> int:
    """Lets the peak of this process begin anew. Returns what it takes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# Changes


def cut(file: str, size: int) -> Damage:
    def damage(model: Path) -> None:
        place = model / file if file else model
        content = place.read_bytes()
        place.write_bytes(content[: size if size >= 0 else len(content) + size])

    return damage


def flip(file: str, byte: int, bit: int) -> Damage:
    def damage(model: Path) -> None:
        place = model / file if file else model
        content = bytearray(place.read_bytes())
        content[byte] ^= 1 << bit
        place.write_bytes(content)

    return damage


def write(file: str, content: bytes | str) -> Damage:
    def damage(model: Path) -> None:
        place = model / file if file else model
        place.unlink(missing_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    return damage


def remove(*files: str) -> Damage:
    def damage(model: Path) -> None:
        for file in files:
            (model / file).unlink()

    return damage


def link(file: str, target: str) -> Damage:
    def damage(model: Path) -> None:
        (model / file).unlink(missing_ok=True)
        (model / file).symlink_to(target)

    return damage


def edit(file: str, **changes: Any) -> Damage:
    """Keys of a JSON object; `tiny.ABSENT` takes one away, and `a__b` is `b` in the object `a`."""

    def damage(model: Path) -> None:
        table = json.loads((model / file).read_text())
        for key, value in changes.items():
            inner, _, last = key.rpartition("__")
            place = table[inner] if inner else table
            if value is tiny.ABSENT:
                place.pop(last)
            else:
                place[last] = value
        (model / file).write_text(json.dumps(table))

    return damage


def header(change: Callable[[dict[str, Any]], Any], file: str = "model.safetensors") -> Damage:
    """The header of a safetensors file, its data left alone."""

    def damage(model: Path) -> None:
        content = (model / file).read_bytes()
        size = int.from_bytes(content[:8], "little")
        table = json.loads(content[8 : 8 + size])
        raw = json.dumps(change(table) or table).encode()
        (model / file).write_bytes(len(raw).to_bytes(8, "little") + raw + content[8 + size :])

    return damage


def entry(tensor: str, **changes: Any) -> Damage:
    return header(lambda table: table[tensor].update(changes))


def tensors(change: Callable[[dict[str, Any]], None], file: str = "model.safetensors") -> Damage:
    """Tensors, written anew as a sound file."""

    def damage(model: Path) -> None:
        found = {name: tensor.clone() for name, tensor in load_file(model / file).items()}
        change(found)
        save_file(found, model / file, metadata={"format": "pt"})

    return damage


def place(tensor: str, value: float) -> Damage:
    """One number of a tensor."""

    def change(found: dict[str, Any]) -> None:
        found[tensor].view(-1)[3] = value

    return tensors(change)


def become(tensor: str, make: Callable[[Any], Any], file: str = "model.safetensors") -> Damage:
    return tensors(lambda found: found.update({tensor: make(found[tensor]).contiguous()}), file)


def rename(tensor: str, name: str) -> Damage:
    return tensors(lambda found: found.update({name: found.pop(tensor)}))


def drop(tensor: str) -> Damage:
    return tensors(lambda found: found.pop(tensor))


def index(**weight_map: str) -> Damage:
    """Places in the index: `tensor` → file, dots written as `__`."""

    def damage(model: Path) -> None:
        file = model / "model.safetensors.index.json"
        said = json.loads(file.read_text())
        said["weight_map"].update({name.replace("__", "."): place for name, place in weight_map.items()})
        file.write_text(json.dumps(said))

    return damage


def both(*changes: Damage) -> Damage:
    def damage(model: Path) -> None:
        for change in changes:
            change(model)

    return damage


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 123456789\n"
FIRST, Q, UP = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
FILE = "model.safetensors"
DEEP = "[" * 200_000


def header_end(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


# The cases


def cases(models: Path) -> list[Case]:
    """All of them; `models` is where the sound ones are, since boundaries are those of files."""
    groups = (files, headers, indexes, configs, dense_tensors, gptq_models, exl2_models, awq_models, gguf_files)
    found = [case for group in groups for case in group(models)]
    found += [case for group in (templates, tokenizers, adapters, pickles, measurements, texts, ids) for case in group()]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "names are not unique"
    return found


def files(models: Path) -> Iterator[Case]:
    """Weight files that are something else, or end early: at every boundary of the format and of a tensor."""
    dense = models / "dense" / "m" / FILE
    end, size = header_end(dense), dense.stat().st_size
    boundaries = {"nothing": 0, "in the length": 5, "after the length": 8, "in the header": 8 + (end - 8) // 2}
    boundaries |= {"one byte before the header's end": end - 1, "after the header": end}
    entries = json.loads(dense.read_bytes()[8:end])
    entries.pop("__metadata__")
    stops = sorted(said["data_offsets"][1] for said in entries.values())
    boundaries |= {f"after tensor {number}": end + stop for number, stop in enumerate(stops[:-1], 1)}
    boundaries |= {"in the last tensor": size - 7, "one byte before the end": size - 1}
    for what, length in boundaries.items():
        yield Case(f"safetensors cut {what}", "dense", cut(FILE, length), CHAT, (FILE,))
    more = write(FILE, dense.read_bytes() + b"\0" * 40)
    yield Case("safetensors with bytes after its end", "dense", more, CHAT, (FILE, "40 bytes after"))
    yield Case("weights are an LFS pointer", "dense", write(FILE, LFS), CHAT, (FILE, "git-LFS"), "B001")
    yield Case("a shard is an LFS pointer", "shards", write("model-00002-of-00003.safetensors", LFS), CHAT, ("model-00002", "git-LFS"), "B001")
    junk = random.Random(1).randbytes(4000)
    yield Case("weights are noise", "dense", write(FILE, junk), CHAT, (FILE,), "B001")
    yield Case("an absurd header length", "dense", write(FILE, b"\xff" * 7 + b"\x7f" + b"{" + junk), CHAT, (FILE,), "B001")
    yield Case("weights are a zip archive", "dense", write(FILE, b"PK\x03\x04" + junk), CHAT, (FILE, "zip"))
    yield Case("weights are a pickle", "dense", write(FILE, b"\x80\x02" + junk), CHAT, (FILE, "pickle"))
    yield Case("weights are a GGUF file", "dense", write(FILE, b"GGUF" + junk), CHAT, (FILE, "GGUF"))
    yield Case("weights are a web page", "dense", write(FILE, "<!DOCTYPE html>" + "x" * 500), CHAT, (FILE, "web page"))
    yield Case("weights are zeros", "dense", write(FILE, bytes(5000)), CHAT, (FILE,))
    yield Case("weights are gone", "dense", remove(FILE), CHAT, ("holds no safetensors",))
    yield Case("weights are a dangling link", "dense", link(FILE, "../blobs/1234"), CHAT, (FILE, "../blobs/1234"), "B009")
    two = both(*(link(f"model-0000{n}-of-00003.safetensors", f"../blobs/{n}") for n in (1, 3)))
    yield Case("two shards are dangling links", "shards", two, CHAT, ("../blobs/1", "../blobs/3"), "B009")

    def pipe(model: Path) -> None:
        (model / FILE).unlink()
        os.mkfifo(model / FILE)

    yield Case("weights are a pipe", "dense", pipe, CHAT, (FILE, "not a regular file"))
    yield Case("a shard is missing", "shards", remove("model-00002-of-00003.safetensors"), CHAT, ("model-00002",))
    no_index = remove("model-00003-of-00003.safetensors", "model.safetensors.index.json")
    yield Case("a shard is missing, and there is no index", "shards", no_index, CHAT, ("model-00003", "missing"))


def headers(models: Path) -> Iterator[Case]:
    """Headers that contradict themselves, the file, or the format."""
    dense = models / "dense" / "m" / FILE
    for bit in (0, 3, 7, 12, 20, 29, 38, 47, 55, 63):
        yield Case(f"header length, bit {bit} flipped", "dense", flip(FILE, bit // 8, bit % 8), CHAT, (FILE,))
    raw = dense.read_bytes()
    name = json.dumps(f"{Q}.weight").encode()
    start = raw.index(name)
    marks = {"quote": 0, "name": 9, "dtype key": raw.index(b"dtype", start) - start, "dtype": raw.index(b"BF16", start) - start}
    marks |= {"shape": raw.index(b"[64", start) - start + 1, "offsets key": raw.index(b"data_off", start) - start}
    marks |= {"offset": raw.index(b"offsets", start) - start + 10, "bracket": raw.index(b"[", start) - start}
    for what, offset in marks.items():
        for bit in (0, 2, 5):
            yield Case(f"header, {what}, bit {bit} flipped", "dense", flip(FILE, start + offset, bit), CHAT, (FILE if what != "name" else "q_proj",))
    weight = f"{Q}.weight"
    yield Case("an unknown dtype", "dense", entry(weight, dtype="F12"), CHAT, (FILE, weight, "F12"))
    yield Case("a dtype that is a list", "dense", entry(weight, dtype=["BF16"]), CHAT, (FILE, weight))
    yield Case("a shape of too many weights", "dense", entry(weight, shape=[64, 65]), CHAT, (FILE, weight))
    yield Case("a shape of 2^62 weights", "dense", entry(weight, shape=[1 << 31, 1 << 31]), CHAT, (FILE, weight))
    yield Case("a shape that overflows to the right size", "dense", entry(weight, shape=[1 << 62, 4, 4096]), CHAT, (FILE, weight))
    yield Case("a shape with a negative size", "dense", entry(weight, shape=[-64, -64]), CHAT, (FILE, weight))
    yield Case("a shape of fractions", "dense", entry(weight, shape=[64.0, 64]), CHAT, (FILE, weight))
    yield Case("a shape of 10,000 dimensions", "dense", entry(weight, shape=[1] * 10_000), CHAT, (FILE, weight))
    yield Case("a shape that is no list", "dense", entry(weight, shape=4096), CHAT, (FILE, weight))
    yield Case("offsets the wrong way round", "dense", entry(weight, data_offsets=[8192, 0]), CHAT, (FILE, weight))
    yield Case("offsets beyond the file", "dense", entry(weight, data_offsets=[1 << 40, (1 << 40) + 8192]), CHAT, (FILE, "hole"))
    yield Case("offsets beyond 64 bits", "dense", entry(weight, data_offsets=[1 << 70, (1 << 70) + 8192]), CHAT, (FILE, weight))
    yield Case("three offsets", "dense", entry(weight, data_offsets=[0, 1, 2]), CHAT, (FILE, weight))
    yield Case("no offsets", "dense", header(lambda table: table[weight].pop("data_offsets") and None), CHAT, (FILE, weight))
    yield Case("two tensors over the same bytes", "dense", header(_overlap), CHAT, (FILE, "overlaps"))
    yield Case("a hole between tensors", "dense", header(lambda table: table.pop(weight) and None), CHAT, (FILE, "hole"))
    twice = f'{{"{weight}": {{}}, "{weight}": {{}}}}'.encode()
    yield Case("a tensor named twice", "dense", write(FILE, len(twice).to_bytes(8, "little") + twice), CHAT, (FILE, weight, "twice"))
    yield Case("metadata that is a number", "dense", header(lambda table: {**table, "__metadata__": 3}), CHAT, (FILE, "__metadata__"))
    half = b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'
    yield Case("half a surrogate in a name", "dense", write(FILE, len(half).to_bytes(8, "little") + half), CHAT, (FILE, "Unicode"))
    latin = b'{"\xe9": 1}'
    yield Case("a header that is not UTF-8", "dense", write(FILE, len(latin).to_bytes(8, "little") + latin), CHAT, (FILE, "JSON"))
    deep = b'{"a":' + DEEP.encode()
    yield Case("a header of brackets", "dense", write(FILE, len(deep).to_bytes(8, "little") + deep), CHAT, (FILE, "brackets"))
    wide = b"{" + b" " * (17 << 20)
    yield Case("a header of 17 MiB", "dense", write(FILE, len(wide).to_bytes(8, "little") + wide), CHAT, (FILE, "header of"))
    digits = b'{"a": {"dtype": "U8", "shape": [' + b"9" * 10_000 + b'], "data_offsets": [0, 0]}}'
    yield Case("a number of 10,000 digits", "dense", write(FILE, len(digits).to_bytes(8, "little") + digits), CHAT, (FILE,))


def _overlap(table: dict[str, Any]) -> None:
    """The second tensor takes the place of the first one of its size."""
    same = [name for name, said in table.items() if name != "__metadata__" and said["shape"] == [64, 64]]
    table[same[1]]["data_offsets"] = table[same[0]]["data_offsets"]


def indexes(_: Path) -> Iterator[Case]:
    """Indexes that lie, or lead out of the folder."""
    file, name = "model.safetensors.index.json", FIRST.replace(".", "__")
    hostile = {
        "up": "../m/model-00001-of-00003.safetensors",
        "far up": "../../../../etc/passwd.safetensors",
        "absolute": "/etc/hostname.safetensors",
        "backslashes": "..\\model.safetensors",
        "a zero byte": "a\0.safetensors",
        "nothing": "",
        "the folder itself": ".",
    }
    for what, shard in hostile.items():
        yield Case(f"the index leads out: {what}", "shards", index(**{name: shard}), CHAT, (file,))

    def folder_out(model: Path) -> None:
        (model.parent / "secret").mkdir()
        shutil.copy(model / "model-00001-of-00003.safetensors", model.parent / "secret" / "a.safetensors")
        (model / "sub").symlink_to("../secret")
        index(**{name: "sub/a.safetensors"})(model)

    yield Case("the index leads out: a linked folder", "shards", folder_out, CHAT, (file, "leaves its folder"))

    def move_out(name: str) -> Damage:
        def damage(model: Path) -> None:
            (model / name).rename(model.parent / "elsewhere")
            (model / name).symlink_to("../elsewhere")

        return damage

    out = "out of `"
    yield Case("a shard is a link that leads out", "shards", move_out("model-00002-of-00003.safetensors"), CHAT, ("00002-of", "elsewhere", out))
    yield Case("the index is a link that leads out", "shards", move_out(file), CHAT, (file, "elsewhere", out))
    for each in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        yield Case(f"{each} is a link that leads out", "dense", move_out(each), CHAT, (each, "elsewhere", out))
    yield Case("a template is a link that leads out", "dense", link("chat_template.jinja", "/proc/self/environ"), CHAT, ("chat_template.jinja", "/environ", out))
    yield Case("a licence is a link that leads out", "dense", link("LICENSE", "/etc/hostname"), QUANTIZE, ("LICENSE", "/etc/hostname", out))
    yield Case("links that lead out, to check", "dense", move_out("tokenizer.json"), CHECK, ("tokenizer.json", "elsewhere", out))
    yield Case("the index names a pickle", "shards", index(**{name: "weights.bin"}), CHAT, (file, "weights.bin"))
    yield Case("the index names an absent file", "shards", index(**{name: "model-9.safetensors"}), CHAT, (file, "model-9.safetensors"))
    yield Case("the index has a tensor in another shard", "shards", index(**{name: "model-00003-of-00003.safetensors"}), CHAT, (file, FIRST))
    yield Case("the index has a tensor that is nowhere", "shards", index(spare="model-00003-of-00003.safetensors"), CHAT, (file, "spare"))
    yield Case("an index without a map", "shards", edit(file, weight_map=tiny.ABSENT), CHAT, (file, "weight_map"))
    yield Case("an empty index", "shards", edit(file, weight_map={}), CHAT, (file, "names no tensors"))
    yield Case("an index of numbers", "shards", edit(file, weight_map={FIRST: 1}), CHAT, (file,))
    yield Case("an index that is a list", "shards", write(file, "[]"), CHAT, (file,))
    yield Case("an index that ends early", "shards", cut(file, 300), CHAT, (file,))
    yield Case("an index of 17 MiB", "shards", write(file, " " * (17 << 20)), CHAT, (file, "at most"))
    yield Case("an index that is an LFS pointer", "shards", write(file, LFS), CHAT, (file, "git-LFS"))

    def second_home(model: Path) -> None:
        one = load_file(model / "model-00001-of-00003.safetensors")
        two = load_file(model / "model-00002-of-00003.safetensors")
        save_file({**two, FIRST: one[FIRST]}, model / "model-00002-of-00003.safetensors")

    yield Case("a tensor in two shards", "shards", second_home, CHAT, (FIRST, "is in both"))


def configs(_: Path) -> Iterator[Case]:
    """config.json: not JSON, keys missing, values that no model has, or that contradict the tensors."""
    file = "config.json"
    yield Case("no config", "dense", remove(file), CHAT, (file, "missing"))
    yield Case("an empty config", "dense", write(file, ""), CHAT, (file,))
    yield Case("a config that ends early", "dense", cut(file, 200), CHAT, (file,))
    yield Case("a config that is an LFS pointer", "dense", write(file, LFS), CHAT, (file, "git-LFS"))
    yield Case("a config of brackets", "dense", write(file, DEEP), CHAT, (file,))
    yield Case("a config of 5 MiB", "dense", write(file, " " * (5 << 20)), CHAT, (file, "at most"))
    yield Case("a config that is a list", "dense", write(file, "[1, 2]"), CHAT, (file, "no object"))
    yield Case("a key twice", "dense", write(file, '{"hidden_size": 64, "hidden_size": 32}'), CHAT, (file, "hidden_size", "twice"))
    wrong: dict[str, dict[str, Any]] = {
        "no architecture": {"architectures": tiny.ABSENT, "model_type": tiny.ABSENT},
        "an unknown architecture": {"architectures": ["FooForCausalLM"]},
        "architectures that is a number": {"architectures": 7},
        "two families": {"model_type": "qwen2"},
        "no hidden_size": {"hidden_size": tiny.ABSENT},
        "no vocab_size": {"vocab_size": tiny.ABSENT},
        "no rms_norm_eps": {"rms_norm_eps": tiny.ABSENT},
        "hidden_size as text": {"hidden_size": "64"},
        "hidden_size negative": {"hidden_size": -64},
        "hidden_size nothing": {"hidden_size": 0},
        "hidden_size a fraction": {"hidden_size": 64.5},
        "hidden_size 2^60": {"hidden_size": 1 << 60},
        "heads that do not divide": {"num_attention_heads": 5},
        "key heads that do not divide": {"num_key_value_heads": 3},
        "10^9 layers": {"num_hidden_layers": 10**9},
        "a layer more than there is": {"num_hidden_layers": 3},
        "a layer fewer than there are": {"num_hidden_layers": 1},
        "an unknown activation": {"hidden_act": "swoosh"},
        "NaN for a number": {"rms_norm_eps": float("nan")},
        "infinity for a number": {"rope_theta": float("inf")},
        "an unknown rope": {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
        "a rope without its factor": {"rope_scaling": {"rope_type": "linear"}},
        "a rope that is text": {"rope_scaling": "yarn"},
        "a window that is not honoured": {"sliding_window": 128},
        "a cap that is not honoured": {"attn_logit_softcapping": 30.0},
        "remote code for the family": {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        "10^12 positions": {"max_position_embeddings": 10**12, "vocab_size": 319},
    }
    for what, changes in wrong.items():
        fault = "B100" if "rope" in what else "B013" if "layer" in what else ""
        yield Case(f"config: {what}", "dense", edit(file, **changes), CHAT, ("config.json",) if "layer" not in what else ("layers",), fault)
    for what, changes in {
        "another width of the MLP": {"intermediate_size": 192},
        "another vocabulary": {"vocab_size": 400},
        "biases that are not there": {"attention_bias": True},
        "tied, and two weights": {"tie_word_embeddings": True},
    }.items():
        fault = "B015" if "MLP" in what else "B006" if "tied" in what else ""
        yield Case(f"config: {what}", "dense", edit(file, **changes), CHAT, (".weight" if "bias" not in what else ".bias",), fault)
    experts = {"num_local_experts": 10**9, "num_experts_per_tok": 2}
    mixture = edit(file, architectures=["MixtralForCausalLM"], model_type="mixtral", sliding_window=None, **experts)
    yield Case("config: 10^9 experts", "dense", mixture, CHAT, (file, "num_experts"))


def dense_tensors(_: Path) -> Iterator[Case]:
    """Tensors that are missing, too many, or of another shape, dtype or content."""
    weight, norm, head = f"{Q}.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"
    for name in (FIRST, weight, norm, "model.norm.weight", head):
        yield Case(f"no `{name}`", "dense", drop(name), CHAT, (name.removesuffix(".weight"),), "B006" if name == head else "B013")
    yield Case("a tensor renamed", "dense", rename(weight, "model.layers.0.self_attn.wq.weight"), CHAT, ("q_proj",), "B013")
    yield Case("a tensor of no part", "dense", tensors(lambda t: t.update({"model.layers.0.extra": torch.ones(3)})), CHAT, ("extra",), "B013")
    yield Case("one more block", "dense", tensors(lambda t: t.update({weight.replace(".0.", ".7."): torch.ones(3)})), CHAT, ("layers.7",), "B013")
    yield Case("a weight transposed", "dense", become(f"{UP}.weight", lambda t: t.T), CHAT, (f"{UP}.weight", FILE))
    yield Case("a weight a row short", "dense", become(weight, lambda t: t[:-1]), CHAT, (weight, FILE), "B015")
    yield Case("a weight of one dimension", "dense", become(weight, lambda t: t.flatten()), CHAT, (weight, FILE))
    yield Case("a weight without rows", "dense", become(weight, lambda t: t[:0]), CHAT, (weight, FILE))
    yield Case("a norm of two dimensions", "dense", become(norm, lambda t: t[None]), CHAT, (norm, FILE))
    for dtype in (torch.int32, torch.uint8, torch.int64, torch.bool):
        what = str(dtype).removeprefix("torch.")
        yield Case(f"a weight of {what}", "dense", become(weight, lambda t, dtype=dtype: t.to(dtype)), CHAT, (weight, FILE, what))
    yield Case("a weight of float8", "dense", become(weight, lambda t: t.to(torch.float8_e4m3fn)), CHAT, (weight, FILE, "F8_E4M3"))
    for what, value in (("NaN", float("nan")), ("infinity", float("inf")), ("-infinity", float("-inf"))):
        for name in (FIRST, weight, norm):
            yield Case(f"{what} in `{name}`, to be quantized", "dense", place(name, value), QUANTIZE, (name, FILE), "B022")
    for name in (weight, norm, head):
        yield Case(f"NaN in `{name}`, to be read", "dense", place(name, float("nan")), CHAT, ("not finite", "head" if name == head else "block"), "B103")
        yield Case(f"NaN in `{name}`, checked", "dense", place(name, float("nan")), CHECK, (name, FILE, "NaN"), "B103")
    quantized = edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    yield Case("dense weights that are called GPTQ", "dense", quantized, CHECK, ("quantization_config",), "B012")


def gptq_models(_: Path) -> Iterator[Case]:
    """GPTQ: tensors and settings that do not go together."""
    words, zeros, scales, groups = (f"{Q}.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx"))
    for name in (words, zeros, scales):
        yield Case(f"GPTQ: no `{name}`", "gptq", drop(name), CHAT, (name if name != words else Q,))
    for name, dtype in ((words, torch.int64), (words, torch.float32), (zeros, torch.int16), (scales, torch.int32), (groups, torch.float32)):
        change = become(name, lambda t, dtype=dtype: t.to(dtype))
        yield Case(f"GPTQ: `{name}` as {str(dtype)[6:]}", "gptq", change, CHAT, (name,))
    for name in (words, zeros, scales):
        yield Case(f"GPTQ: `{name}` a row short", "gptq", become(name, lambda t: t[:-1]), CHAT, (Q,))
        yield Case(f"GPTQ: `{name}` a column short", "gptq", become(name, lambda t: t[:, :-1]), CHAT, (Q,))
        yield Case(f"GPTQ: `{name}` of no rows", "gptq", become(name, lambda t: t[:0]), CHAT, (Q,))
    yield Case("GPTQ: a group that is not there", "gptq", become(groups, lambda t: t + 5), CHAT, (groups, "names group"))
    yield Case("GPTQ: a group of minus 2^31", "gptq", become(groups, lambda t: t * 0 - 2**31), CHAT, (groups,))
    yield Case("GPTQ: too few group numbers", "gptq", become(groups, lambda t: t[:-1]), CHAT, (groups,))
    yield Case("GPTQ: act-order without its groups", "scattered", drop(groups), CHAT, (groups, "desc_act"))
    yield Case("GPTQ: NaN among the scales", "gptq", place(scales, float("nan")), CHECK, (scales, "NaN"))
    yield Case("GPTQ: NaN among the scales, converted", "gptq", place(scales, float("nan")), ["convert", "gptq-to-hf", "M", "W/out"], (Q,))
    yield Case("GPTQ: NaN among the scales, to EXL2", "gptq", place(scales, float("nan")), ["convert", "gptq-to-exl2", "M", "W/out", "--bpw", "5", "--data-free", "--no-eval"], (Q,))
    settings: dict[str, dict[str, Any]] = {
        "no width": {"bits": tiny.ABSENT},
        "5 bits": {"bits": 5},
        "width as text": {"bits": "4"},
        "width true": {"bits": True},
        "another width": {"bits": 8},
        "another group size": {"group_size": 64},
        "group size nothing": {"group_size": 0},
        "group size minus 2": {"group_size": -2},
        "group size 2^62": {"group_size": 1 << 62},
        "an unknown method": {"quant_method": "hqq"},
        "an unknown format": {"checkpoint_format": "gptq_v9", "format": "gptq_v9"},
        "Marlin tiles": {"checkpoint_format": "marlin", "format": "marlin"},
        "sym as text": {"sym": "yes"},
        "a rule that is no pattern": {"dynamic": {"(": {"bits": 8}}},
        "rules that are a list": {"dynamic": [1]},
        "a rule that says a linear is dense": {"dynamic": {f"-:{Q}": {}}},
        "a rule of another width": {"dynamic": {f"+:{Q}": {"bits": 8}}},
        "words of 64 bits": {"pack_dtype": "int64"},
    }
    for what, changes in settings.items():
        damage = edit("config.json", **{f"quantization_config__{key}": value for key, value in changes.items()})
        yield Case(f"GPTQ settings: {what}", "gptq", damage, CHAT, ("config.json",) if "another" not in what else (Q,), "B012")
    said = edit("config.json", quantization_config="gptq")
    yield Case("GPTQ settings: text", "gptq", said, CHAT, ("config.json", "quantization_config"))
    second = write("quantize_config.json", '{"bits": 8, "group_size": 32}')
    yield Case("GPTQ settings in two places that differ", "gptq", second, CHAT, ("quantize_config.json", "bits"), "B012")
    backtrack = edit("config.json", quantization_config__dynamic={"(a*)*(a*)*(a*)*b" + "c" * 20: {"bits": 8}, "(([a-z._0-9])*)*$!": {"bits": 8}})
    yield Case("GPTQ settings: a pattern that takes forever", "gptq", backtrack, CHAT, ("dynamic",))
    both_forms = tensors(lambda t: t.update({f"{Q}.weight": torch.ones(64, 64, dtype=torch.float16)}))
    yield Case("GPTQ: a linear in two forms", "gptq", both_forms, CHECK, (Q, "both"))
    yield Case("GPTQ: a linear in two forms, converted", "gptq", both_forms, ["convert", "gptq-to-hf", "M", "W/out"], (Q,))
    relabelled = edit("config.json", quantization_config__checkpoint_format="gptq_v2", quantization_config__format="gptq_v2")
    yield Case("GPTQ: zero points under the other convention", "gptq", relabelled, CHECK, ("gives zero point 7", "gptq_v2"), "B028")
    yield Case("GPTQ: quantized once more", "gptq", lambda model: None, QUANTIZE, ("already quantized",))


def exl2_models(_: Path) -> Iterator[Case]:
    """EXL2: widths, starts, orders and scales that no writer makes."""
    suffixes = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm")
    words, scale, most, groups, order = (f"{Q}.{suffix}" for suffix in suffixes)
    file = "model.safetensors"
    for name in (scale, most, groups, order):
        yield Case(f"EXL2: no `{name}`", "exl2", drop(name), CHAT, (name,))
    for name, dtype in ((words, torch.int64), (scale, torch.int16), (most, torch.float32), (groups, torch.int32), (order, torch.int64)):
        change = become(name, lambda t, dtype=dtype: t.to(dtype), file)
        yield Case(f"EXL2: `{name}` as {str(dtype)[6:]}", "exl2", change, CHAT, (name,))
    for name in (words, scale, most, groups, order):
        yield Case(f"EXL2: `{name}` a row short", "exl2", become(name, lambda t: t[:-1], file), CHAT, (Q,))
    edits: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "a width of 7": (groups, lambda t: _set(t, 0, 7)),
        "a width of 0": (groups, lambda t: _set(t, 0, 0)),
        "a width of 65535": (groups, lambda t: _set(t, 0, -1)),
        "a first start of 1": (groups, lambda t: _set(t, 1, 1)),
        "groups that are nothing": (groups, lambda t: t[:0]),
        "groups in a matrix": (groups, lambda t: t[None]),
        "a row twice in the order": (order, lambda t: _set(t, 0, int(t[1]))),
        "a row of minus 1": (order, lambda t: _set(t, 0, -1)),
        "a row of 2^31 - 1": (order, lambda t: _set(t, 0, 2**31 - 1)),
        "NaN among the multipliers": (most, lambda t: _set(t, 0, float("nan"))),
        "infinity among the multipliers": (most, lambda t: _set(t, 0, float("inf"))),
        "words of 31 columns": (words, lambda t: t[:, :31]),
        "words of one dimension": (words, lambda t: t.flatten()),
        "64 columns too many": (words, lambda t: torch.cat([t, t], 1)),
    }
    for what, (name, change) in edits.items():
        yield Case(f"EXL2: {what}", "exl2", become(name, change, file), CHAT, (Q,))
    two = tensors(lambda t: t.update({f"{Q}.weight": torch.ones(64, 64, dtype=torch.float16)}))
    yield Case("EXL2: a linear in two forms", "exl2", two, CHECK, (Q, "both"))
    yield Case("EXL2: a linear in two forms, converted", "exl2", two, ["convert", "exl2-to-hf", "M", "W/out"], (Q,))


def _set(tensor: Any, where: int, value: Any) -> Any:
    tensor.view(-1)[where] = value
    return tensor


def awq_models(_: Path) -> Iterator[Case]:
    """AWQ, which is converted only."""
    convert = ["convert", "awq-to-gptq", "M", "W/out"]
    for suffix in ("qzeros", "scales"):
        yield Case(f"AWQ: no `{Q}.{suffix}`", "awq", drop(f"{Q}.{suffix}"), convert, (Q,))
    yield Case("AWQ: words of 64 bits", "awq", become(f"{Q}.qweight", lambda t: t.to(torch.int64)), convert, (f"{Q}.qweight",))
    yield Case("AWQ: a column short", "awq", become(f"{Q}.qweight", lambda t: t[:, :-1]), convert, (Q,))
    yield Case("AWQ: NaN among the scales", "awq", place(f"{Q}.scales", float("nan")), convert, (Q,))
    for key, value in (("version", "gemv"), ("bits", 8), ("group_size", 0)):
        yield Case(f"AWQ settings: {key} {value}", "awq", edit("config.json", **{f"quantization_config__{key}": value}), convert, (key,))
    yield Case("AWQ: run as it is", "awq", lambda model: None, CHAT, ("awq",))


def gguf_files(models: Path) -> Iterator[Case]:
    """GGUF: cut at every boundary, counts and lengths of any size, strings that are none."""
    convert = ["convert", "gguf-to-hf", "M", "W/out"]
    file = models / "gguf" / "m"
    reader, raw = gguf.GGUFReader(file), file.read_bytes()
    starts = sorted(field.offset for name, field in reader.fields.items() if not name.startswith("GGUF."))
    records = [tensor.field.offset for tensor in reader.tensors]
    boundaries = {"nothing": 0, "in the magic": 3, "after the magic": 4, "after the version": 8, "after the tensor count": 16, "after the counts": 24}
    boundaries |= {f"before metadata {number}": start for number, start in enumerate(starts[1::4], 1)}
    boundaries |= {"in a metadata key": starts[3] + 11, "in the tokens": starts[-6] + 300, "before the tensors": records[0]}
    boundaries |= {"in a tensor's name": records[1] + 12, "in a tensor's dimensions": records[2] - 20, "before the last tensor": records[-1]}
    boundaries |= {"before the data": reader.data_offset, "in the last tensor": len(raw) - 70}
    for what, size in boundaries.items():
        yield Case(f"GGUF cut {what}", "gguf", cut("", size), convert, ("m`",))

    def patch(where: int, form: str, value: int) -> Damage:
        def damage(model: Path) -> None:
            content = bytearray(model.read_bytes())
            struct.pack_into(form, content, where, value)
            model.write_bytes(content)

        return damage

    first, record = starts[0], records[0]
    name_length = struct.unpack_from("<Q", raw, record)[0]
    rank = record + 8 + name_length
    numbers = {
        "version 1": (4, "<I", 1),
        "version 2^31": (4, "<I", 1 << 31),
        "big-endian": (4, ">I", 3),
        "2^60 tensors": (8, "<Q", 1 << 60),
        "2^64 - 1 tensors": (8, "<Q", (1 << 64) - 1),
        "one tensor more": (8, "<Q", len(records) + 1),
        "2^60 metadata entries": (16, "<Q", 1 << 60),
        "one entry more": (16, "<Q", len(starts) + 1),
        "a key of 2^62 bytes": (first, "<Q", 1 << 62),
        "a name of 2^40 bytes": (record, "<Q", 1 << 40),
        "rank 0": (rank, "<I", 0),
        "rank 2^31": (rank, "<I", 1 << 31),
        "a dimension of 0": (rank + 4, "<Q", 0),
        "a dimension of 2^63": (rank + 4, "<Q", 1 << 63),
        "a type that is unknown": (rank + 4 + 16, "<I", 999),
        "data at 2^50": (rank + 4 + 16 + 4, "<Q", 1 << 50),
    }
    for what, change in numbers.items():
        yield Case(f"GGUF: {what}", "gguf", patch(*change), convert, ("m`",))
    tokens = raw.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    yield Case("GGUF: 2^56 tokens", "gguf", patch(tokens + 8, "<Q", 1 << 56), convert, ("tokenizer.ggml.tokens",))
    yield Case("GGUF: tokens of an unknown type", "gguf", patch(tokens + 4, "<I", 77), convert, ("tokenizer.ggml.tokens",))
    yield Case("GGUF: lists in lists", "gguf", patch(tokens + 4, "<I", 9), convert, ("tokenizer.ggml.tokens",))
    yield Case("GGUF: a key that is not UTF-8", "gguf", patch(first + 8, "<B", 0xFF), convert, ("m`",))
    yield Case("GGUF: an LFS pointer", "gguf", write("", LFS), convert, ("m`", "git-LFS"), "B001")
    wrong: dict[str, dict[str, Any]] = {
        "llama.block_count": {"llama.block_count": None},
        "llama.embedding_length": {"llama.embedding_length": None},
        "llama.attention.head_count": {"llama.attention.head_count": 0},
        "tokenizer.ggml.tokens": {"tokenizer.ggml.tokens": None},
        "tokenizer.ggml.model": {"tokenizer.ggml.model": "magic"},
        "split.count": {"split.count": 3},
        "general.alignment": {"general.alignment": 7},
        "llama.rope.freq_base": {"llama.rope.freq_base": "fast"},
    }
    for key, values in wrong.items():

        def written(model: Path, values: dict[str, Any] = values) -> None:
            tiny_gguf.write_model(model, values=values)

        said = "parts" if key == "split.count" else key.rpartition(".")[2]
        yield Case(f"GGUF: `{key}` amiss", "gguf", written, convert, (said,))
    yield Case("GGUF: no `output_norm.weight`", "gguf", lambda model: tiny_gguf.write_model(model, drop="output_norm.weight") and None, convert, ("output_norm",))

    def holds(value: float) -> Damage:
        def damage(model: Path) -> None:
            content = bytearray(raw)
            norm = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_norm.weight")
            struct.pack_into("<f", content, norm.data_offset, value)
            model.write_bytes(content)

        return damage

    yield Case("GGUF: NaN in a norm", "gguf", holds(float("nan")), convert, ("blk.0.attn_norm.weight", "finite"))
    yield Case("GGUF: a weight beyond float16", "gguf", holds(1e30), convert, ("blk.0.attn_norm.weight", "float16"))


def templates() -> Iterator[Case]:
    """Chat templates: code that came with somebody else's weights."""
    file = "chat_template.jinja"
    hostile = {
        "does not end": "{% for m in messages %}",
        "reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "reaches for globals": "{{ cycler.__init__.__globals__.os.system('touch W') }}",
        "reaches for globals through a filter": "{{ raise_exception.__globals__.os.getcwd() }}",
        "imports": "{% import 'os' as os %}{{ os.getcwd() }}",
        "includes a file": "{% include '/etc/passwd' %}",
        "extends a file": "{% extends '/etc/passwd' %}",
        "counts without end": "{% for i in range(10**12) %}{% endfor %}",
        "counts far in loops": "{% for i in range(999999) %}{% for j in range(999999) %}{% endfor %}{% endfor %}",
        "multiplies text": "{{ 'a' * 2000000000 }}",
        "multiplies lists": "{{ ([0] * 2000000000) | length }}",
        "raises to powers": "{{ 9 ** 9 ** 9 }}",
        "pads text": "{{ 'a' | center(2000000000) }}",
        "formats wide": "{{ '%2000000000d' | format(1) }}",
        "formats wide by %": "{{ '%2000000000d' % 1 }}",
        "formats wide by a method": "{{ '{:2000000000d}'.format(1) }}",
        "pads by a method": "{{ 'a'.ljust(2000000000) }}",
        "fills with zeros": "{{ '1'.zfill(2000000000) }}",
        "indents deep": "{{ 'a\\nb' | indent(2000000000) }}",
        "doubles text": "{% set ns = namespace(a='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
        "joins itself": "{% set ns = namespace(a='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
        "replaces by much": "{{ ('a' * 8000000).replace('a', 'b' * 8000000) }}",
        "makes words": "{{ lipsum(n=1000000) }}",
        "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "changes the messages": "{{ messages.append(1) }}",
        "prints what is not there": "{{ nothing.at.all }}",
        "divides by nothing": "{{ 1 // 0 }}",
        "refuses": "{{ raise_exception('no system role') }}",
    }
    for what, source in hostile.items():
        yield Case(f"template: {what}", "dense", write(file, source), CHAT, (file,))
    yield Case("template: too long", "dense", write(file, "x" * (1 << 20)), CHAT, (file, "characters"))
    yield Case("template: not UTF-8", "dense", write(file, b"\xff\xfe{{"), CHAT, (file, "UTF-8"))
    yield Case("template: a number", "dense", edit("tokenizer_config.json", chat_template=5), CHAT, ("tokenizer_config.json",))
    yield Case("template: an LFS pointer", "dense", write("chat_template.json", LFS), CHAT, ("chat_template.json",))
    yield Case("template: none", "dense", edit("tokenizer_config.json", chat_template=tiny.ABSENT), CHAT, ("no chat template",))


def tokenizers() -> Iterator[Case]:
    """Tokenizers that cannot be read, or belong to another model."""
    file = "tokenizer.json"
    yield Case("no tokenizer", "dense", remove(file), CHAT, (file,))
    yield Case("a tokenizer that ends early", "dense", cut(file, 1000), CHAT, (file,))
    yield Case("a tokenizer that is an LFS pointer", "dense", write(file, LFS), CHAT, (file, "git-LFS"))
    yield Case("a tokenizer of another kind", "dense", edit(file, model={"type": "Crystal"}), CHAT, (file,))
    yield Case("a tokenizer without words", "dense", write(file, '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "a"}}'), CHAT, (file,))
    yield Case("settings of a tokenizer that end early", "dense", cut("tokenizer_config.json", 50), CHAT, ("tokenizer_config.json",))
    yield Case("settings of a tokenizer in brackets", "dense", write("tokenizer_config.json", DEEP), CHAT, ("tokenizer_config.json",))
    yield Case("an end of text that is an object", "dense", edit("generation_config.json", eos_token_id={"a": 1}), CHAT, ("eos_token_id",), "B016")
    yield Case("an end of text beyond the vocabulary", "dense", edit("generation_config.json", eos_token_id=10**6), CHECK, ("stop token", "1000000"), "B003")
    more = edit("config.json", vocab_size=200)
    smaller = both(more, become(FIRST, lambda t: t[:200]), become("lm_head.weight", lambda t: t[:200]))
    yield Case("a tokenizer of a larger vocabulary", "dense", smaller, CALIBRATED, ("tokenizer",), "B004")

    def sentencepiece(model: Path) -> None:
        (model / file).unlink()
        (model / "tokenizer.model").write_bytes(b"\n\x0b\n\x05<unk>")

    yield Case("sentencepiece alone", "dense", sentencepiece, CHAT, ("tokenizer.json",), "B003")


def adapters() -> Iterator[Case]:
    merge = ["convert", "merge-lora", "M", "W/out", "--adapter", "W/adapter"]
    file = "../adapter/adapter_model.safetensors"
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    yield Case("adapter: no weights", "adapter", remove(file), merge, ("adapter_model.safetensors",))
    yield Case("adapter: cut", "adapter", cut(file, -9), merge, ("adapter_model.safetensors",))
    yield Case("adapter: an LFS pointer", "adapter", write(file, LFS), merge, ("adapter_model.safetensors",))
    yield Case("adapter: half of a pair", "adapter", tensors(lambda t: t.pop(f"{module}.lora_B.weight"), file), merge, ("q_proj",))
    yield Case("adapter: of another shape", "adapter", become(f"{module}.lora_A.weight", lambda t: t[:, :-1], file), merge, ("q_proj",))
    yield Case("adapter: of another rank", "adapter", become(f"{module}.lora_A.weight", lambda t: t[:-1], file), merge, ("q_proj",))
    yield Case("adapter: NaN", "adapter", become(f"{module}.lora_A.weight", lambda t: t * float("nan"), file), merge, ("q_proj",))
    yield Case("adapter: settings that end early", "adapter", cut("../adapter/adapter_config.json", 9), merge, ("adapter_config.json",))

    def lead_out(model: Path) -> None:
        (model / file).rename(model.parent / "elsewhere")
        (model / file).symlink_to("../elsewhere")

    yield Case("adapter: a link that leads out", "adapter", lead_out, merge, ("adapter_model.safetensors", "elsewhere", "out of `"))
    yield Case("adapter: DoRA", "adapter", edit("../adapter/adapter_config.json", use_dora=True), merge, ("use_dora",))
    yield Case("adapter: alpha is text", "adapter", edit("../adapter/adapter_config.json", lora_alpha="many"), merge, ("lora_alpha",))


def pickles() -> Iterator[Case]:
    convert = ["convert", "pickle-to-safetensors", "M", "W/out"]
    file = "pytorch_model.bin"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch planted",)

    def evil(model: Path) -> None:
        torch.save({FIRST: Evil()}, model / file)

    yield Case("pickle: code", "pickle", evil, convert, (file,))
    yield Case("pickle: cut", "pickle", cut(file, -900), convert, (file,))
    yield Case("pickle: noise", "pickle", write(file, b"\x80\x04" + random.Random(2).randbytes(300)), convert, (file,))
    yield Case("pickle: an LFS pointer", "pickle", write(file, LFS), convert, (file,))
    yield Case("pickle: a number", "pickle", lambda model: torch.save(3, model / file), convert, (file,))
    yield Case("pickle: read as a model", "pickle", lambda model: None, CHAT, (file, "pickled"))


def measurements() -> Iterator[Case]:
    """Files that this program wrote, and somebody changed."""
    measured, planned = [*EXL2, "--bpw", "5", "--measurement", "W/m.json"], [*EXL2, "--plan", "W/p.json"]
    for name, command in (("m.json", measured), ("p.json", planned)):
        yield Case(f"{name} cut", "measured", cut(f"../{name}", 400), command, (name,))
        yield Case(f"{name} a list", "measured", write(f"../{name}", "[]"), command, (name,))
        yield Case(f"{name} of another kind", "measured", edit(f"../{name}", kind="shopping list"), command, (name,))
        yield Case(f"{name} of a later version", "measured", edit(f"../{name}", version=99), command, (name,))
        yield Case(f"{name} gone", "measured", remove(f"../{name}"), command, (name,))
        yield Case(f"{name} of another model", "measured", edit(f"../{name}", model="0" * 64), command, ("model",))
    yield Case("m.json without linears", "measured", edit("../m.json", linears=[]), measured, ("m.json",))
    yield Case("m.json, linears that are text", "measured", edit("../m.json", linears="all"), measured, ("m.json",))
    yield Case("p.json, mixes that are text", "measured", edit("../p.json", linears="all"), planned, ("p.json",))


def texts() -> Iterator[Case]:
    """Calibration texts."""
    contents: dict[str, bytes] = {
        "t.txt": b"\xff\xfe\x00 not text",
        "short.txt": b"too short",
        "empty.txt": b"",
        "t.jsonl": b'{"text": "a"}\n{"text": ',
        "other.jsonl": b'{"words": "a"}\n',
        "deep.jsonl": b"[" * 100_000,
        "t.parquet": b"PAR1 no",
    }
    for name, content in contents.items():
        command = [*CALIBRATED, "--calibration", f"W/{name}"]
        yield Case(f"text: {name}", "dense", write(f"../{name}", content), command, (name,))
    yield Case("text: gone", "dense", lambda model: None, [*CALIBRATED, "--calibration", "W/none.txt"], ("none.txt",))


def ids() -> Iterator[Case]:
    """What is given in place of a folder."""
    for what, path in {"a file": "W/m/config.json", "nothing": "W/none", "leading out": "../../x/../y"}.items():
        yield Case(f"model: {what}", "dense", lambda model: None, ["generate", path, "--prompt", "a"], ("none" if what == "nothing" else path.rpartition("/")[2],))
    yield Case("model: an id, offline", "dense", lambda model: None, ["generate", "some/model", "--prompt", "a", "--offline"], ("some/model",))


# The table


def main() -> None:
    print(HEAD)
    slow = 0
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        write_models(models)
        warm_up(models)
        found = cases(models)
        for number, case in enumerate(found):
            work = Path(folder) / f"w{number}"
            seen = see(case, models, work)
            good = seen.code not in (0, 1) and all(said in seen.stderr for said in case.says) and not seen.written
            slow += not good or seen.cpu_seconds > LIMIT_SECONDS or seen.memory_bytes > LIMIT_BYTES
            told = seen.error.replace(f"{work}/", "").replace("|", "\\|")
            if case.command[0] == "check":
                told = "; ".join(line.strip() for line in seen.stderr.splitlines() if any(said in line for said in case.says))
                told = told.replace(f"{work}/", "").replace("|", "\\|")
            told = told if len(told) <= 260 else told[:257] + "…"
            print(f"| {case.name} | {case.fault} | {seen.code} | {told} | {1000 * seen.cpu_seconds:.0f} | {seen.memory_bytes / 2**20:.0f} |")
            if not good:
                print(f"NOT GOOD {case.name}: {seen}", file=sys.stderr)
            shutil.rmtree(work)
        print(f"\n{len(found)} inputs, {slow} of them beyond a limit.")
    sys.exit(slow > 0)


def warm_up(models: Path) -> None:
    """Every sound model once: what is imported and compiled at first use is no cost of a damaged one."""
    for model in ("shards", "dense", "gptq", "scattered", "exl2"):
        _quiet([str(models / model / "m") if argument == "M" else argument for argument in CHAT])
        _quiet(["check", str(models / model / "m")])
    _quiet(["convert", "gguf-to-hf", str(models / "gguf" / "m"), str(models / "x")])


HEAD = """# Damaged inputs

Each row is a sound input (tiny models of one or two blocks), one change to it, and a command that reads it. Each ends with an error of the tree,
names file and tensor or key, writes nothing, and takes less than 0.5 s and 250 MiB above what the process had before. `row` is that of the list of
faults seen in the field; `check` tells every fault, of which the ones that matter are shown.

    python tests/damaged.py > docs/results/damaged-input.md

| input | row | exit | what is said | ms of processor | MiB |
| --- | --- | --- | --- | --- | --- |"""

if __name__ == "__main__":
    main()
