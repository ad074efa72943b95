"""Where a model runs and in which arithmetic: words of the command line made into a device, a dtype and a backend."""

from dataclasses import dataclass

import torch

from quantkit import kernels
from quantkit.errors import UsageError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Placement:
    """`device` may be several, `cuda:0,cuda:1`; see `spread`. `backend` computes the quantized linears, for the reason
    given; `dtype` is that of all other multiplications."""

    device: str
    dtype: torch.dtype
    backend: str
    reason: str

    @classmethod
    def choose(cls, device: str = "auto", dtype: str = "auto") -> "Placement":
        """`auto` is the best device there is, and float32 on a CPU, float16 on a GPU.

        Raises UsageError for an unknown dtype, BackendError for a device that cannot be used.
        """
        if dtype != "auto" and dtype not in DTYPES:
            raise UsageError(f"unknown dtype `{dtype}`", hint=f"--dtype auto, {', '.join(DTYPES)}")
        first = device.split(",")[0]
        chosen = kernels.backend(first)
        if device == "auto":
            device = "cuda" if chosen.name == "cuda" else "cpu"
        usual = torch.float32 if "cpu" in (first.split(":")[0], device) else torch.float16
        return cls(device, DTYPES.get(dtype, usual), chosen.name, chosen.reason)

    @property
    def dtype_name(self) -> str:
        """`fp32`, `bf16` or `fp16`."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


def has_native_bf16() -> bool:
    """Whether this processor has instructions that multiply bfloat16."""
    checks = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(check is not None and check() for check in checks)
