"""Fan: the linears of one stage at work. They read one input, and their outputs are handed on by role."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.models.architecture import LinearSpec, Stage
from quantkit.models.linear import Linear
from quantkit.models.source import Device, Source, read_linear


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """What went through the linears of one stage.

    inputs   [m, in], in the dtype of the linears
    outputs  [..., out] of each linear, m rows, in the order of the stage; under autograd they are nodes of its graph;
             none where the linears did not run
    tokens   int64 [m]: which tokens of the block's input these are; None for all of them, in order
    """

    stage: Stage
    inputs: Tensor
    outputs: tuple[Tensor, ...]
    tokens: Tensor | None = None


Observe = Callable[[Activations], None]


@dataclass(frozen=True, slots=True)
class Fan:
    """`widths` are the columns of each role, in order; a fused linear is split by them."""

    stage: Stage
    linears: tuple[Linear, ...]
    widths: tuple[int, ...]

    @classmethod
    def read(
        cls, source: Source, specs: Sequence[LinearSpec], dtype: torch.dtype, device: Device
    ) -> "Fan":
        stage = Stage(specs[0].stage, tuple(spec.name for spec in specs))
        linears = tuple(read_linear(source, spec, dtype, device) for spec in specs)
        return cls(stage, linears, tuple(width for spec in specs for width in spec.widths))

    def __call__(self, x: Tensor, observe: Observe | None = None) -> tuple[Tensor, ...]:
        """`[..., in]` → one `[..., width]` for each role. `observe` sees what went through the linears."""
        x = x.to(self.linears[0].dtype)
        outputs = tuple(linear(x) for linear in self.linears)
        if observe is not None:
            observe(Activations(self.stage, x.reshape(-1, x.shape[-1]), outputs))
        return outputs if len(outputs) == len(self.widths) else outputs[0].split(self.widths, dim=-1)

    def show(self, x: Tensor, observe: Observe) -> None:
        """Lets `observe` see what the linears would read."""
        x = x.to(self.linears[0].dtype)
        observe(Activations(self.stage, x.reshape(-1, x.shape[-1]), ()))
