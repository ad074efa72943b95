"""`quantkit doctor --kernels`: compile every CUDA kernel for this machine's card, and hold each to the reference."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit import kernels
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.self_test import Outcome, self_test


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What each case found, on which card."""

    card: str
    outcomes: tuple[Outcome, ...]

    @property
    def healthy(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes)

    def rows(self) -> list[list[str]]:
        """Kernel, cases, largest error, result: for the console."""
        rows = []
        for kernel in dict.fromkeys(outcome.kernel for outcome in self.outcomes):
            own = [outcome for outcome in self.outcomes if outcome.kernel == kernel]
            failed = [outcome.case for outcome in own if not outcome.passed]
            worst = max(outcome.error for outcome in own)
            rows.append([kernel, str(len(own)), f"{worst:.1e}", f"wrong: {'; '.join(failed)}" if failed else "right"])
        return rows

    def as_json(self) -> dict[str, Any]:
        outcomes = [{**asdict(outcome), "passed": outcome.passed} for outcome in self.outcomes]
        return {"card": self.card, "healthy": self.healthy, "outcomes": outcomes}


def run() -> KernelReport:
    """Raises BackendError where there is no usable card, or a kernel does not compile or launch."""
    backend = kernels.backend("cuda", "cuda")
    assert isinstance(backend, CudaBackend)
    device = backend.device()
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "simulated"
    return KernelReport(card, tuple(self_test(backend, device)))
