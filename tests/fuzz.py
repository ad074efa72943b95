"""Readers under a coverage-guided fuzzer: `python tests/fuzz.py READER SECONDS FOLDER` (needs `pip install atheris`).

FOLDER receives what the fuzzer finds worth keeping; it starts from tests/data/fuzz/READER. It stops at whatever is no error
of the tree, takes longer than a minute, or more than two gigabytes. `READERS` also serves tests that need no fuzzer.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from quantkit.checkpoint import folder, header
from quantkit.checkpoint.gguf import open_gguf
from quantkit.checkpoint.gguf_model import describe
from quantkit.errors import QuantkitError
from quantkit.formats import exl2, gptq
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.formats.gptq_inference import infer
from quantkit.models import catalog
from quantkit.models.config import ModelConfig
from quantkit.runtime.chat import ChatTemplate

SEEDS = Path(__file__).parent / "data" / "fuzz"
PLACE = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp")
MOST_PARAMETERS_LISTED = 200


class Choices:
    """Bytes, taken from the front, as decisions; zeros when there are none left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def number(self, most: int) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value % (most + 1)

    def content(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken.ljust(size, b"\0")


def read_safetensors(data: bytes) -> None:
    file = _file(data)
    found = header.read_header(file)
    for entry in found.entries.values():
        assert entry.start + entry.size_bytes <= len(data)


def read_config(data: bytes) -> None:
    config = folder.read_json(_file(data))
    with contextlib.suppress(QuantkitError):
        said = config.get("quantization_config")
        read = GptqConfig.read(said if isinstance(said, dict) else config)
        read.for_module("model.layers.0.self_attn.q_proj")
    family = catalog.find(config)
    numbers = ModelConfig.read(config)
    if numbers.num_layers * (1 if numbers.experts is None else numbers.experts.count) <= MOST_PARAMETERS_LISTED:
        assert family.tensors(numbers)


def read_gguf(data: bytes) -> None:
    file = _file(data)
    with open_gguf(file) as opened:
        assert all(tensor.offset + tensor.size_bytes <= len(data) for tensor in opened.tensors.values())
        for name in list(opened.tensors)[:4]:
            opened.single(name)
        describe(opened)


def read_gptq(data: bytes) -> None:
    choices = Choices(data)
    settings = GptqSettings(
        (2, 3, 4, 8)[choices.number(3)],
        (-1, 1, 32, 64, 1 << 40)[choices.number(4)],
        bool(choices.number(1)),
        bool(choices.number(1)),
        ("gptq", "gptq_v2")[choices.number(1)],
        bool(choices.number(1)),
    )
    told = bool(choices.number(3))
    tensors = _tensors(choices, ("qweight", "qzeros", "scales", "g_idx", "bias"), settings.bits)
    stored = gptq.decode("a.b", tensors, settings if told else infer("a.b", tensors))
    _use(stored)


def read_exl2(data: bytes) -> None:
    choices = Choices(data)
    tensors = _tensors(choices, ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm", "bias"), 4)
    _use(exl2.decode("a.b", tensors, None if choices.number(1) else choices.number(64)))


def read_template(data: bytes) -> None:
    template = ChatTemplate(data.decode("utf-8", "replace"), Path("f"), {"bos_token": "<s>", "eos_token": "</s>"})
    template.render([{"role": "user", "content": "hello <b>"}, {"role": "assistant", "content": ""}])


READERS: dict[str, Callable[[bytes], None]] = {
    "safetensors": read_safetensors,
    "config": read_config,
    "gguf": read_gguf,
    "gptq": read_gptq,
    "exl2": read_exl2,
    "template": read_template,
}


def attempt(reader: str, data: bytes) -> bool:
    """Whether it was read. Anything but an error of the tree, with a hint, passes through."""
    try:
        READERS[reader](data)
        return True
    except QuantkitError as error:
        assert error.message and error.hint, repr(error)
        return False


def _use(stored: gptq.GptqTensor | exl2.Exl2Tensor) -> None:
    """What the kernels make of it: an index out of range would be one here."""
    weight = stored.dequantize()
    assert weight.shape == (stored.in_features, stored.out_features)
    if weight.numel():
        stored.matmul(torch.ones(2, stored.in_features))


def _tensors(choices: Choices, suffixes: tuple[str, ...], bits: int) -> dict[str, Tensor]:
    """Mostly of a form that goes together, so that the values are looked at too."""
    sound = bool(choices.number(7))
    rows, columns = 32 * (1 + choices.number(3)), 32 * (1 + choices.number(1))
    groups = (1, 2, rows // 32, rows // 16)[choices.number(3)]
    forms: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "qweight": (torch.int32, (rows * bits // 32, columns)),
        "qzeros": (torch.int32, (groups, columns * bits // 32)),
        "scales": (torch.float16, (groups, columns)),
        "g_idx": (torch.int32, (rows,)),
        "q_weight": (torch.int32, (rows * bits // 32, columns)),
        "q_scale": (torch.int32, (groups, columns // 8)),
        "q_scale_max": (torch.float16, (groups,)),
        "q_groups": (torch.int16, (2 * groups,)),
        "q_invperm": (torch.int32, (rows,)),
        "bias": (torch.float16, (columns,)),
    }
    dtypes = (torch.int32, torch.float16, torch.int16, torch.float32, torch.uint8, torch.int64)
    found: dict[str, Tensor] = {}
    for suffix in suffixes:
        dtype, shape = forms[suffix]
        if not sound:
            left_out = choices.number(15) == 0
            dtype = dtype if choices.number(3) else dtypes[choices.number(5)]
            shape = shape if choices.number(3) else tuple(choices.number(40) for _ in range(choices.number(3)))
            if left_out:
                continue
        elif suffix == "bias" and choices.number(1):
            continue
        if suffix == "q_invperm" and choices.number(3):
            found[suffix] = torch.arange(shape[0] if shape else 1, dtype=torch.int32)
            continue
        if suffix == "q_groups" and choices.number(3):
            starts = range(0, rows * bits // 32, max(1, rows * bits // 32 // groups))
            found[suffix] = torch.tensor([part for start in starts for part in (bits, start)], dtype=torch.int16)
            continue
        size = torch.Size(shape).numel() * dtype.itemsize
        found[suffix] = torch.frombuffer(bytearray(choices.content(size) or b"\0" * 8), dtype=torch.uint8)[:size].clone()
        found[suffix] = found[suffix].view(dtype).reshape(shape)
    return found


def _file(data: bytes) -> Path:
    place = PLACE / f"quantkit-fuzz-{os.getpid()}"
    place.write_bytes(data)
    return place


def main() -> None:
    import atheris

    reader, seconds, kept = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    kept.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)

    def one(data: bytes) -> None:
        attempt(reader, data)

    for seed in sorted((SEEDS / reader).iterdir()):
        attempt(reader, seed.read_bytes())  # imports and compiles what the first use does
    with contextlib.suppress(AttributeError):
        atheris.enabled_hooks.add("str")
    _instrument(atheris)
    limits = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=8192", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={kept}/crash-", str(kept), str(SEEDS / reader)], one)
    atheris.Fuzz()


def _instrument(atheris: object) -> None:
    """Only this project's own readers report their coverage."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("quantkit.checkpoint", "quantkit.formats", "quantkit.models", "quantkit.runtime.chat")):
            for value in list(vars(module).values()):
                if getattr(value, "__module__", "") != name:
                    continue
                if callable(value) and hasattr(value, "__code__"):
                    atheris.instrument_func(value)  # type: ignore[attr-defined]
                elif isinstance(value, type):
                    for method in vars(value).values():
                        if hasattr(method, "__code__"):
                            with contextlib.suppress(Exception):
                                atheris.instrument_func(method)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
