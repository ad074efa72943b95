"""The `.cu` files of this package, and what each says of itself in its opening comment.

A file opens with its contract and formula, then one line for each of

    Reference: the method of ReferenceBackend that defines the result
    Traffic:   bytes, or operations, that no implementation can avoid
    Needs:     sm_75, DTYPE=MmaBF16 sm_80      least architecture, of all variants and of some
    Below:     what is done instead on older architectures, where that is another thing
    Budget:    96 registers, 18432 bytes shared, 256 threads      of the costliest variant; no kernel may spill
    Variants:  BITS=2,3,4,5,6,8 SCALE=F16,F32      the macros it is compiled with: every combination
    Contains:  LDG.128 HMMA      machine instructions that must be there from sm_80 on: wide loads, tensor cores

Tests hold each file to these lines; `variants` is also what a self-test on a card goes through.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product

Defines = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class Source:
    """One `.cu` file. `entries` are its kernels, `needs` the least architecture by condition (`""`: all variants)."""

    name: str
    text: str
    entries: tuple[str, ...]
    reference: str
    traffic: str
    needs: dict[str, int]
    registers: int
    shared_bytes: int
    threads: int
    variants: tuple[dict[str, str], ...]
    contains: tuple[str, ...]

    def least_architecture(self, defines: Defines) -> int:
        """As 75 or 80: the highest of the conditions that `defines` meets."""
        chosen = {f"{key}={value}" for key, value in defines.items()} | {""}
        return max(architecture for condition, architecture in self.needs.items() if condition in chosen)


@cache
def source(name: str) -> Source:
    """The file `cuda/{name}.cu`."""
    text = (files("quantkit.kernels") / "cuda" / f"{name}.cu").read_text(encoding="utf-8")
    head = {key: value.strip() for key, value in re.findall(r"^// (\w+): +(.*)$", text, re.MULTILINE)}
    budget = [int(number) for number in re.findall(r"\d+", head["Budget"])]
    needs = dict(re.findall(r"(?:(\w+=\w+) )?sm_(\d+)", head["Needs"]))
    macros = [(key, values.split(",")) for key, values in re.findall(r"(\w+)=(\S+)", head.get("Variants", ""))]
    return Source(
        name=name,
        text=text,
        entries=tuple(re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(', text)),
        reference=head["Reference"],
        traffic=head["Traffic"],
        needs={condition: int(architecture) for condition, architecture in needs.items()},
        registers=budget[0],
        shared_bytes=budget[1],
        threads=budget[2],
        variants=tuple(
            dict(zip([key for key, _ in macros], values, strict=True)) for values in product(*(v for _, v in macros))
        ),
        contains=tuple(head.get("Contains", "").split()),
    )


@cache
def names() -> tuple[str, ...]:
    """Every `.cu` file, without its ending."""
    found = (entry.name for entry in (files("quantkit.kernels") / "cuda").iterdir())
    return tuple(sorted(name.removesuffix(".cu") for name in found if name.endswith(".cu")))


@cache
def headers() -> dict[str, str]:
    """The `.cuh` files by name: what a `.cu` file may include."""
    folder = files("quantkit.kernels") / "cuda"
    found = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".cuh")), key=lambda entry: entry.name)
    return {entry.name: entry.read_text(encoding="utf-8") for entry in found}
