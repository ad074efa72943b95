"""What each rung of the quality ladder is worth, alone and together, and how other tools' results compare.

    python docs/bench/quality.py tokens MODEL TEXT OUT.json          the calibration rows, for other tools
    python docs/bench/quality.py ladder MODEL TEXT EVALUATION        one line for each rung (`make bench-quality`)
    python docs/bench/quality.py compare MODEL EVALUATION FOLDER…    one line for each quantized folder

All of it calibrates with 32 rows of 512 tokens drawn from TEXT with seed 0; `--slice 1` takes the next 32 rows of the
same draw, none of which is among the first. A line has the mean KL from the unquantized model with its 95 % interval,
and the perplexity, over the first windows of 512 tokens of EVALUATION. Rungs run in one process of as many threads as
OMP_NUM_THREADS says, and cost what the processor spent on them; a gradient pass, made once, counts wherever it is used.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from quantkit.calibration import sensitivity, text
from quantkit.calibration.sensitivity import Sensitivity, TokenWeights
from quantkit.calibration.stream import ActivationStream
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.quantization.block import round_block, solve_block
from quantkit.commands.quantization.passage import HeldPassage
from quantkit.evaluators import divergence
from quantkit.formats import gptq_grid
from quantkit.formats.codec import Grid
from quantkit.formats.dense import DenseTensor
from quantkit.formats.gptq import GptqCodec
from quantkit.models import catalog
from quantkit.models.architecture import Architecture
from quantkit.models.block import Block, load_block
from quantkit.models.config import ModelConfig
from quantkit.models.rope import Rotary
from quantkit.models.transformer import Model, load_embedding, load_head
from quantkit.progress import Silent
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer

ROWS, LENGTH = 32, 512
BATCH_ROWS = 4


@dataclass(frozen=True)
class Plain(GptqCodec):
    """Grids that clip nothing, whatever the solver knows of the rows."""

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        return super().fit(rows, bits, None)


@dataclass(frozen=True)
class Unweighted(GptqCodec):
    """Searched grids for which all rows weigh the same."""

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        return super().fit(rows, bits, torch.ones(len(rows)))


@dataclass(frozen=True)
class OneSign(GptqCodec):
    """Searched grids whose scale is positive, so that the end with one code more is always the negative one."""

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        with _patched(gptq_grid, "_symmetric", lambda *given: tuple(part[:1] for part in symmetric(*given))):
            return super().fit(rows, bits, importance)


symmetric = gptq_grid._symmetric


@contextmanager
def _patched(module: object, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@dataclass(frozen=True)
class Rung:
    """
    tokens   which of them a Hessian listens to, `all`, `norm` or `gradient`; None is no Hessian
    outputs  make up for each other, as the covariance of their gradients says
    """

    name: str
    codec: type[GptqCodec]
    tokens: str | None
    outputs: bool = False


LADDER = (
    Rung("nearest", Plain, None),
    Rung("0: error feedback", Plain, "all"),
    Rung("0 + unweighted search", Unweighted, "all"),
    Rung("0 + 1: weighted search", OneSign, "all"),
    Rung("0 + 1 + 2: signed scale", GptqCodec, "all"),
    Rung("0 + 3: token norms alone", Plain, "norm"),
    Rung("0 + 4: gradients alone", Plain, "gradient"),
    Rung("0 + 1 + 2 + 3: `fast`", GptqCodec, "norm"),
    Rung("0 + 1 + 2 + 4: gradients", GptqCodec, "gradient"),
    Rung("0 + 1 + 2 + 4 + outputs: `default` before tuning", GptqCodec, "gradient", outputs=True),
)


@dataclass(frozen=True, eq=False)
class Bench:
    """One model and its calibration rows."""

    checkpoint: Checkpoint
    config: ModelConfig
    architecture: Architecture
    rows: Tensor
    dtype: torch.dtype

    @classmethod
    def open(cls, model: Path, source: str, part: int, dtype: torch.dtype) -> "Bench":
        checkpoint = open_checkpoint(model)
        config = ModelConfig.read(checkpoint.config)
        return cls(checkpoint, config, catalog.find(checkpoint.config), rows_of(model, source, part), dtype)

    @property
    def place(self) -> tuple[Checkpoint, ModelConfig, Architecture]:
        return self.checkpoint, self.config, self.architecture

    def gradients(self) -> Sensitivity:
        options = {"seed": 0, "dtype": self.dtype, "device": "cpu", "folder": None, "progress": Silent()}
        return sensitivity.measure(*self.place, self.rows[: 8192 // LENGTH], **options)

    def all_tokens(self) -> Sensitivity:
        """As if every token mattered as much as any other."""
        stages = (
            stage.name
            for index in range(self.config.num_layers)
            for stage in load_block(*self.place, index, self.dtype).stages()
        )
        equal = TokenWeights(torch.ones(self.rows.numel()), torch.arange(self.rows.numel()))
        return Sensitivity(self.rows.numel(), {}, dict.fromkeys(stages, equal))

    @torch.inference_mode()
    def quantize(self, codec: GptqCodec, found: Sensitivity | None, *, calibrates: bool) -> Model:
        """Block after block, each rounded and then run, as `quantkit quantize` does it."""
        rotary = Rotary.at(self.config.ropes, torch.arange(LENGTH)[None])
        embedding = load_embedding(*self.place, self.dtype)
        stream = ActivationStream.start(embedding, self.rows, batch_rows=BATCH_ROWS)
        blocks = []
        for index in range(self.config.num_layers):
            block = load_block(*self.place, index, self.dtype)
            codecs = dict.fromkeys(block.linears, codec)
            passage = HeldPassage(stream, rotary)
            solved = solve_block(block, passage, codecs, found) if calibrates else round_block(block, codecs)
            rounded = {one.result.name: one.stored.dequantize().T.contiguous() for one in solved}
            if calibrates:
                stream = passage.leave(block, f"block {index}")
            blocks.append(load_block(*self.place, index, torch.float32))
            _replace(blocks[-1], rounded)
        ends = load_embedding(*self.place, torch.float32), tuple(blocks), load_head(*self.place, torch.float32)
        return Model(self.config, self.architecture, torch.float32, torch.device("cpu"), *ends)

    def reference(self) -> Model:
        return Model.stream(*self.place, torch.float32)


def _replace(block: Block, rounded: dict[str, Tensor]) -> None:
    for name, weight in rounded.items():
        block.linears[name].replace(DenseTensor(weight, block.linears[name].stored.bias))


def rows_of(model: Path, source: str, part: int = 0, rows: int = ROWS) -> Tensor:
    return text.token_rows(source, Tokenizer.open(model), (part + 1) * rows, LENGTH, 0)[part * rows :]


def windows_of(model: Path, source: Path, count: int) -> Tensor:
    ids = Tokenizer.open(model).encode(text.read_text(source))
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


def timed(work: Callable[[], object]) -> tuple[object, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def line(name: str, found: divergence.Divergence, *more: str) -> str:
    low, high = found.kl_ci95
    cells = name, f"{found.kl_mean:.4f}", f"{low:.4f} – {high:.4f}", f"{found.candidate.perplexity:.3f}", *more
    return "| " + " | ".join(cells) + " |"


def ladder(asked: argparse.Namespace) -> None:
    bench = Bench.open(asked.model, asked.text, asked.slice, getattr(torch, asked.dtype))
    windows = windows_of(asked.model, asked.evaluation, asked.windows)
    print("| rung | KL | 95 % | perplexity | CPU s |\n| --- | --- | --- | --- | --- |", flush=True)
    equal = bench.all_tokens()
    gradients, spent_on_gradients = timed(bench.gradients)
    for rung in LADDER:
        if asked.only and not any(rung.name.startswith(name) for name in asked.only):
            continue
        codec = rung.codec(bits=asked.bits, group_size=asked.group_size)
        found = {"all": equal, "gradient": gradients}.get(rung.tokens)
        found = found if found is None or rung.outputs else replace(found, covariances={})
        model, spent = timed(lambda: bench.quantize(codec, found, calibrates=rung.tokens is not None))  # noqa: B023
        spent += spent_on_gradients if rung.tokens == "gradient" else 0
        damage = divergence.compare(bench.reference(), model, windows)
        print(line(rung.name, damage, f"{spent:.0f}"), flush=True)


def tokens(asked: argparse.Namespace) -> None:
    asked.out.write_text(json.dumps(rows_of(asked.model, asked.text, asked.slice, asked.rows).tolist()))


class Remembering(Model):
    """A model that runs each batch of windows once."""

    seen: ClassVar[dict[bytes, Tensor]] = {}

    def hidden(self, ids: Tensor, *rest: object, **more: object) -> Tensor:
        key = ids.numpy().tobytes()
        if key not in self.seen:
            self.seen[key] = super().hidden(ids, *rest, **more)
        return self.seen[key]


def compare(asked: argparse.Namespace) -> None:
    checkpoint = open_checkpoint(asked.model)
    place = checkpoint, ModelConfig.read(checkpoint.config), catalog.find(checkpoint.config)
    reference = Remembering.stream(*place, torch.float32)
    windows = windows_of(asked.model, asked.evaluation, asked.windows)
    print("| folder | KL | 95 % | perplexity | CPU s of quantizing | peak MiB |\n| --- | --- | --- | --- | --- | --- |")
    for folder in asked.folders:
        found = divergence.compare(reference, load(folder, "cpu", torch.float32), windows)
        costs = sorted(folder.glob("*cost.json"))  # of other tools
        cost = json.loads(costs[0].read_text()) if costs else {}
        spent = f"{cost['cpu_seconds']:.0f}" if cost else ""
        print(line(folder.name, found, spent, f"{cost.get('peak_memory_bytes', 0) / 2**20:.0f}"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, places in (
        ("tokens", tokens, ("text", "out")),
        ("ladder", ladder, ("text", "evaluation")),
        ("compare", compare, ("evaluation",)),
    ):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("model", type=Path)
        for place in places:
            command.add_argument(place, type=str if place == "text" else Path)
        if run is compare:
            command.add_argument("folders", nargs="+", type=Path)
        else:
            command.add_argument("--slice", type=int, default=0)
        if run is tokens:
            command.add_argument("--rows", type=int, default=ROWS)
        if run is ladder:
            command.add_argument("--only", action="append", help="rungs whose name begins so")
            command.add_argument("--bits", type=int, default=4)
            command.add_argument("--group-size", type=int, default=64)
            command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
        if run is not tokens:
            command.add_argument("--windows", type=int, default=10)
    asked = parser.parse_args()
    asked.run(asked)


if __name__ == "__main__":
    main()
