"""Every kernel compiles for each architecture that it claims, within the budget that its opening comment states."""

import cuda_facts
import pytest

from quantkit.kernels import nvrtc
from quantkit.kernels.sources import names, source

pytestmark = pytest.mark.skipif(not nvrtc.find_libraries(), reason="NVRTC is not installed")
ARCHITECTURES = (75, 80, 86, 89, 90, 120)


def check(name: str, variant: dict[str, str], architecture: int) -> None:
    kernel = source(name)
    found = cuda_facts.facts(kernel, variant, architecture)
    assert set(found) == set(kernel.entries)
    for entry, facts in found.items():
        where = f"{entry} {variant} sm_{architecture}"
        assert facts.spilled_bytes == 0, f"{where} spills"
        assert facts.registers <= kernel.registers, f"{where} takes {facts.registers} registers"
        assert facts.shared_bytes <= kernel.shared_bytes, f"{where} takes {facts.shared_bytes} bytes of shared memory"
        assert facts.occupancy(architecture, kernel.threads) > 0, f"{where} cannot be launched"
        if architecture >= 80 and cuda_facts.disassembler():
            assert facts.mix, f"{where} was not disassembled"
            missing = [instruction for instruction in kernel.contains if not facts.count(instruction)]
            assert not missing, f"{where} has no {missing}: {facts.mix}"


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_first_and_the_last_variant(name, architecture) -> None:
    for variant in {str(v): v for v in (source(name).variants[0], source(name).variants[-1])}.values():
        check(name, variant, architecture)


@pytest.mark.proof
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_variant(name, architecture) -> None:
    for variant in source(name).variants:
        if architecture >= source(name).least_architecture(variant):
            check(name, variant, architecture)
