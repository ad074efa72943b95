"""`quantkit convert ROUTE IN OUT`: one function for each route, named in ROUTES."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quantkit.checkpoint import gguf_model, gguf_tokenizer, model_card
from quantkit.checkpoint.gguf import open_gguf
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.errors import UsageError
from quantkit.progress import Progress, Tqdm
from quantkit.settings import ConvertSettings


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was converted, and what the conversion cost.

    types           how many tensors each type of the source had
    rounding_error  largest over all tensors of (largest rounding error of a weight) / (largest weight)
    worst_tensor    where that was; None when nothing was rounded
    """

    route: str
    source: str
    out: str
    architecture: str
    tokenizer: str
    tensors: int
    parameters: int
    types: dict[str, int]
    rounding_error: float
    worst_tensor: str | None
    seconds: float

    def rows(self) -> list[list[str]]:
        return [
            ["written", self.out],
            ["architecture", self.architecture],
            ["tokenizer", self.tokenizer],
            ["parameters", f"{self.parameters:,} in {self.tensors} tensors"],
            ["from", ", ".join(f"{count} {name}" for name, count in self.types.items())],
            ["to", "float16"],
            ["largest rounding error", f"{self.rounding_error:.2g} of a tensor's largest weight"],
            ["seconds", f"{self.seconds:.1f}"],
        ]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(
    route: str, source: str | Path, out: str | Path, *, overwrite: bool = False, progress: Progress | None = None
) -> ConvertReport:
    """Convert `source` to the folder `out` by a route of the command line; see `run`.

    report = quantkit.convert("gguf-to-hf", "llama.gguf", "models/llama")
    """
    return run(ConvertSettings(route, Path(source), Path(out), overwrite), progress or Tqdm())


def run(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Convert `settings.source` to the folder `settings.out`. Raises CheckpointError; then nothing is left behind."""
    if settings.route not in ROUTES:
        raise UsageError(f"there is no route `{settings.route}`", hint=f"routes: {', '.join(ROUTES)}")
    return ROUTES[settings.route](settings, progress)


def gguf_to_hf(settings: ConvertSettings, progress: Progress) -> ConvertReport:
    """Dequantize a GGUF file tensor by tensor into a Hugging Face folder of float16 weights."""
    start = time.monotonic()
    with open_gguf(settings.source) as file:
        model = gguf_model.describe(file)
        config = model.config
        tokenizer = gguf_tokenizer.rebuild(file.metadata, config["vocab_size"], config["max_position_embeddings"])
        errors: dict[str, float] = {}
        with (
            CheckpointWriter(settings.out, source=settings.source, overwrite=settings.overwrite) as writer,
            progress.task(settings.route, len(model.placements)) as task,
        ):
            for placement in model.placements:
                weight, errors[placement.target] = file.half(placement.source)
                if placement.permuted_heads:
                    weight = gguf_model.unpermute(weight, placement.permuted_heads)
                writer.add(placement.target, weight)
                task.advance(note=placement.target)
            documents = {
                "tokenizer.json": tokenizer.tokenizer,
                "tokenizer_config.json": tokenizer.tokenizer_config,
                "generation_config.json": tokenizer.generation_config,
            }
            with TemporaryDirectory() as folder:
                card = Path(folder) / "README.md"
                card.write_text(model_card.from_gguf(file.metadata, settings.source.name), encoding="utf-8")
                writer.finish({**config, **tokenizer.config_ids}, [card], documents)
        types = Counter(file.tensors[placement.source].type_name for placement in model.placements)
    worst = max(errors, key=lambda name: errors[name])
    return ConvertReport(
        route=settings.route,
        source=str(settings.source),
        out=str(settings.out),
        architecture=model.architecture,
        tokenizer=f"{tokenizer.kind}, {len(tokenizer.tokenizer['model']['vocab'])} tokens",
        tensors=len(model.placements),
        parameters=sum(placement.count for placement in model.placements),
        types=dict(types.most_common()),
        rounding_error=errors[worst],
        worst_tensor=worst if errors[worst] else None,
        seconds=time.monotonic() - start,
    )


ROUTES: dict[str, Callable[[ConvertSettings, Progress], ConvertReport]] = {"gguf-to-hf": gguf_to_hf}
