"""How much outputs and tokens matter to each linear: squares of the gradients that one backward pass finds.

An error e at the outputs of a linear moves the loss by about ½ Σ_t (g_tᵀ e_t)², g_t the gradient of token t there.
Where the errors of different outputs and tokens are taken as independent, what is left of g is a square for each output
and one for each token. A rounded weight errs in proportion to its input, so the inputs weigh in both.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.calibration.gradients import StageGradients, run_backward
from quantkit.errors import CalibrationError
from quantkit.models.architecture import Architecture, Stage, block_of
from quantkit.models.config import ModelConfig
from quantkit.models.source import Device, Source
from quantkit.progress import Progress

GRADIENT_SHARE = 0.25
Covariances = Mapping[str, tuple[Tensor, ...]]
"""By linear: Σ_t |x_t|² g_t g_tᵀ / tokens, of which only chunks of neighbouring outputs are kept, as `chunk_sizes` cuts
them: bfloat16 [c, c] each."""
CHUNK_OUTPUTS = 512
"""Outputs of a linear that know of each other: a covariance of all would be larger than many a weight."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """How often each token that reached a stage should count in its Hessian, on the average of its energy once.

    For one linear that is |g_t|², scaled so that Σ weight · |x|² = Σ |x|² over the inputs x (GuidedQuant, arXiv
    2505.07004, with one group); for linears that share their input it is the mean of theirs.

    weights  float32 [k]
    tokens   int64 [k]: where these tokens are in the text, row after row
    """

    weights: Tensor
    tokens: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """What a backward pass over `tokens` tokens has found. What no token reached is not in it.

    outputs      by linear: Σ_t g_tn² |x_t|² / tokens of each output n, float64 [out]
    stages       by stage
    covariances  of the gradients at the outputs, in memory or read when they are asked for
    """

    tokens: int
    outputs: Mapping[str, Tensor]
    stages: Mapping[str, TokenWeights]
    covariances: Covariances = field(default_factory=dict)

    def counts(self, stage: str, total: int, share: float = GRADIENT_SHARE) -> Tensor | None:
        """How often each token should count, of a text of `total` tokens that begins with those measured.

        This makes the Hessian `(1 - s) H + s H'`: H of all tokens; H' of those measured, weighted by their gradients,
        its mean diagonal that of H. float32 [total]; None where no token reached the stage.
        """
        if stage not in self.stages:
            return None
        found = self.stages[stage]
        counts = torch.full((total,), 1 - share)
        counts[found.tokens] += share * total / self.tokens * found.weights
        return counts


def chunk_sizes(outputs: int) -> list[int]:
    """As few chunks as CHUNK_OUTPUTS allows, of equal size but for one output more in the first ones."""
    count = -(-outputs // CHUNK_OUTPUTS)
    return [outputs // count + (number < outputs % count) for number in range(count)]


def measure(
    source: Source,
    config: ModelConfig,
    architecture: Architecture,
    rows: Tensor,
    *,
    seed: int,
    dtype: torch.dtype,
    device: Device,
    folder: Path | None,
    progress: Progress,
    keep: Callable[[Covariances], None] | None = None,
    batch_tokens: int | None = None,
    logits_at_once: int | None = None,
) -> Sensitivity:
    """Run a text `rows`, int64 `[rows, length]`, forward and back; for the rest see `gradients.run_backward`.

    keep  is given the covariances of each block when the pass leaves it, the last block first; they take 1 KiB for each
          output of the model, and are not in the result then

    Raises CalibrationError where states or gradients are not finite.
    """
    stages: dict[str, _Squares] = {}
    covariances: dict[str, tuple[Tensor, ...]] = {}

    def leave_block() -> None:
        left = {name: own for squares in stages.values() for name, own in squares.take_covariances(rows.numel())}
        (keep or covariances.update)(left)

    def watch(found: StageGradients) -> None:
        if found.stage.name not in stages:
            if stages and block_of(next(reversed(stages))) != block_of(found.stage.name):
                leave_block()
            stages[found.stage.name] = _Squares(found.stage, rows.shape[1])
        stages[found.stage.name].add(found)

    run_backward(
        source,
        config,
        architecture,
        rows,
        watch,
        seed=seed,
        dtype=dtype,
        device=device,
        folder=folder,
        progress=progress,
        batch_tokens=batch_tokens,
        logits_at_once=logits_at_once,
    )
    leave_block()
    return Sensitivity(
        tokens=rows.numel(),
        outputs={name: sums / rows.numel() for squares in stages.values() for name, sums in squares.outputs.items()},
        stages={name: squares.token_weights() for name, squares in stages.items()},
        covariances=covariances,
    )


class _Squares:
    """Of one stage, batch after batch. Sums are taken row by row of the text, so that they are the same however rows
    are batched."""

    def __init__(self, stage: Stage, length: int) -> None:
        self._length = length
        self.outputs: dict[str, Tensor] = {}
        self._sums: dict[str, list[Tensor]] = {}
        self._linears: dict[str, list[Tensor]] = {name: [] for name in stage.linears}
        self._energies: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def add(self, found: StageGradients) -> None:
        energies = found.inputs.square().sum(1)
        counts = torch.unique_consecutive(found.tokens // self._length, return_counts=True)[1].tolist()
        for (name, squares), gradients in zip(self._linears.items(), found.outputs, strict=True):
            for energy, part in zip(energies.split(counts), gradients.split(counts), strict=True):
                own = part.to(torch.float32).square()
                sums = (energy @ own).double().cpu()
                if not bool(torch.isfinite(sums).all()):
                    raise CalibrationError(f"the gradients at `{name}` are not finite", hint="use `--dtype fp32`")
                self.outputs[name] = self.outputs.get(name, 0) + sums
                squares.append(own.sum(1).cpu())
                self._add_covariance(name, part, energy.sqrt())
        self._energies.append(energies.cpu())
        self._tokens.append(found.tokens)

    def take_covariances(self, tokens: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Nothing more is to come: hands them over and forgets them."""
        for name in list(self._sums):
            chunks = ((chunk.triu() + chunk.triu(1).T) / tokens for chunk in self._sums.pop(name))
            yield name, tuple(chunk.bfloat16().cpu() for chunk in chunks)

    def _add_covariance(self, name: str, rows: Tensor, factors: Tensor) -> None:
        """Of the sums, the chunks on the diagonal, and of those what is on and above it."""
        parts = rows.split(chunk_sizes(rows.shape[1]), dim=1)
        if name not in self._sums:
            self._sums[name] = [factors.new_zeros(part.shape[1], part.shape[1]) for part in parts]
        for chunk, part in zip(self._sums[name], parts, strict=True):
            backend = kernels.backend("cpu", None if part.device.type == "cpu" else "reference")
            backend.add_gram(chunk, part, factors)

    def token_weights(self) -> TokenWeights:
        energies = torch.cat(self._energies).double()
        weights = torch.stack([_scaled(torch.cat(squares).double(), energies) for squares in self._linears.values()])
        return TokenWeights(weights.mean(0).float(), torch.cat(self._tokens))


def _scaled(squares: Tensor, energies: Tensor) -> Tensor:
    """Squares to weights that leave the sum of energies as it is; ones where no gradient says anything."""
    weighted = (squares * energies).sum()
    return squares * (energies.sum() / weighted) if float(weighted) > 0 else torch.ones_like(squares)
