"""AdapterSet: LoRA adapters that go with a request, several at once with weights, applied while the model runs.

    adapters = AdapterSet.of([(open_adapter(folder), 1.0), (open_adapter(other), -0.5)])
    model = adapters.applied(model)         # shares every weight with the model it is made of

The weights stay as they are, quantized or not: each adapted linear adds `x · A · B` to what it computes. To have
adapters merged into dense weights instead, give them to `load`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quantkit.checkpoint.adapter import Adapter
from quantkit.checkpoint.merged import require_fit
from quantkit.errors import CheckpointError
from quantkit.models.architecture import HEAD, Architecture
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.models.low_rank import LowRank
from quantkit.models.transformer import Model


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """`key` tells sets with another effect apart, and is "" where there is none. Make it with `of`."""

    parts: tuple[tuple[Adapter, float], ...] = ()
    key: str = ""

    @classmethod
    def of(cls, parts: Sequence[tuple[Adapter, float]]) -> "AdapterSet":
        """Reads every adapter once, for the key."""
        if not parts:
            return cls()
        told = "\n".join(f"{adapter.digest} {weight!r}" for adapter, weight in parts)
        return cls(tuple(parts), hashlib.sha256(told.encode()).hexdigest())

    def check(self, config: ModelConfig, architecture: Architecture, model: Path) -> None:
        """Needs no weights. Raises CheckpointError, naming adapter and tensor, for what does not fit the model, or
        cannot be applied while it runs."""
        shapes: Mapping[str, tuple[int, ...]] = {
            f"{HEAD}.weight": (config.vocab_size, config.hidden_size),
            **architecture.tensors(config),
        }
        linears = {f"{spec.name}.weight" for spec in architecture.linears(config) if spec.quantizable}
        for adapter, weight in self.parts:
            require_fit(adapter, weight, shapes, model)
            for name in adapter.targets:
                if name not in {*linears, f"{HEAD}.weight"} or name in adapter.replacements:
                    what = "replaces" if name in adapter.replacements else "adapts"
                    raise CheckpointError(
                        f"`{adapter.path}` {what} `{name}`, which cannot be done while the model runs",
                        hint="merge it when the model is loaded: `--merge-lora`",
                    )

    def applied(self, model: Model) -> Model:
        """The same model with these adapters; the model itself where there are none. `check` comes first."""
        if not self.parts:
            return model
        blocks = tuple(block.with_linears(self._adapted) for block in model.blocks)
        return replace(model, blocks=blocks, head=replace(model.head, linear=self._adapted(model.head.linear)))

    def _adapted(self, linear: Linear) -> Linear:
        name = f"{linear.name}.weight"
        found = [(adapter.factors(name), weight) for adapter, weight in self.parts if name in adapter.deltas]
        if not found:
            return linear
        return linear.adapted(LowRank.joined([LowRank(down, weight * up) for (down, up), weight in found]))
