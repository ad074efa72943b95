"""What a conversion did: the result against its reference on held-back text, and each linear against its source."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quantkit.calibration import text as calibration_text
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.conversion.report import AddedDamage, LinearError
from quantkit.errors import CalibrationError
from quantkit.evaluators import divergence
from quantkit.formats.codec import StoredTensor
from quantkit.models.contents import check_contents
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.tokenizer import Tokenizer

WINDOWS, LENGTH = 8, 512


@dataclass(frozen=True, slots=True, eq=False)
class Yardstick:
    """Text that no calibration sees and the model that a result must stay close to.

    name     of the reference, for people
    windows  int64 [windows, length]
    kl_input, perplexity_input  of the model that is converted; the reference's own where it is that
    """

    name: str
    reference: Checkpoint
    windows: Tensor
    kl_input: float | None
    perplexity_input: float | None

    @classmethod
    def of(cls, reference: Checkpoint, converted: Checkpoint, progress: Progress) -> "Yardstick":
        """Raises CheckpointError for a model without a tokenizer, before any work."""
        tokenizer = Tokenizer.open(converted.path)
        length = min(LENGTH, converted.model_config.max_positions)
        if length < 2:
            raise CalibrationError(f"a model of {length} position predicts nothing", hint="use `--no-eval`")
        windows = calibration_text.held_back(tokenizer, length, WINDOWS)
        if reference.path == converted.path:
            return cls("the input", reference, windows, None, None)
        found = divergence.compare(_model(reference), _model(converted), windows, progress)
        return cls("the unquantized model", reference, windows, found.kl_mean, found.candidate.perplexity)

    def judge(self, out: Path, progress: Progress) -> AddedDamage:
        """A model folder against the reference; both run block by block."""
        found = divergence.compare(_model(self.reference), _model(open_checkpoint(out)), self.windows, progress)
        own = found.reference.perplexity
        return AddedDamage(
            reference=self.name,
            windows=len(self.windows),
            tokens=found.reference.tokens,
            perplexity_reference=own,
            perplexity_input=own if self.perplexity_input is None else self.perplexity_input,
            perplexity_result=found.candidate.perplexity,
            kl_mean=found.kl_mean,
            kl_ci95=found.kl_ci95,
            kl_input=self.kl_input or 0.0,
            top1_agreement=found.top1_agreement,
        )


def weight_errors(
    source: Checkpoint, result: Checkpoint, names: Sequence[str], progress: Progress
) -> tuple[LinearError, ...]:
    """‖W' - W‖ / ‖W‖ of each linear, worst first; one linear of each in memory."""
    found = []
    with progress.task("weight errors", total=len(names)) as task:
        for name in names:
            found.append(LinearError(name, _relative(result.linear(name), source.linear(name))))
            task.advance(note=name)
    return tuple(sorted(found, key=lambda linear: (-linear.error, linear.name)))


def _relative(result: StoredTensor, source: StoredTensor) -> float:
    after, before = (stored.dequantize().to(torch.float32) for stored in (result, source))
    missed, whole = 0.0, 0.0
    for new, old in _pieces(after, before):
        missed += float((new - old).double().square().sum())
        whole += float(old.double().square().sum())
    return (missed / whole) ** 0.5 if whole else 0.0


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    yield from zip(*(tensor.split(1024) for tensor in tensors), strict=True)


def _model(checkpoint: Checkpoint) -> Model:
    config, architecture = checkpoint.model_config, checkpoint.architecture
    check_contents(checkpoint, config, architecture)
    return Model.stream(checkpoint, config, architecture, torch.float32, "cpu")
