"""`quantkit convert gguf-to-hf`: a GGUF file, dequantized tensor by tensor into a folder of float16 weights."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quantkit.checkpoint import gguf_model, gguf_tokenizer, model_card
from quantkit.checkpoint.gguf import open_gguf
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.progress import Progress
from quantkit.settings import ConvertSettings


@dataclass(frozen=True, slots=True)
class GgufImport:
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

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        return [(f"quantkit convert {self.route}", ["", "found"], self.rows())]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gguf_to_hf(settings: ConvertSettings, progress: Progress) -> GgufImport:
    """Convert the file `settings.source`. Raises CheckpointError; then nothing is left behind."""
    start = time.monotonic()
    receipt = Receipt()
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
                receipt.add(placement.target, weight)
                task.advance(note=placement.target)
            documents = {
                "tokenizer.json": tokenizer.tokenizer,
                "tokenizer_config.json": tokenizer.tokenizer_config,
                "generation_config.json": tokenizer.generation_config,
            }
            with TemporaryDirectory() as folder:
                card = Path(folder) / "README.md"
                card.write_text(model_card.from_gguf(file.metadata, settings.source.name), encoding="utf-8")
                writer.finish(
                    {**config, **tokenizer.config_ids},
                    [card],
                    documents,
                    check=lambda written: receipt.check(open_checkpoint(written), progress),
                )
        types = Counter(file.tensors[placement.source].type_name for placement in model.placements)
    worst = max(errors, key=lambda name: errors[name])
    return GgufImport(
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
