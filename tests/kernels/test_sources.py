"""What the `.cu` files say of themselves."""

import pytest

from quantkit.kernels.reference import ReferenceBackend
from quantkit.kernels.sources import headers, names, source
from quantkit.kernels.steps import ReferenceSteps


@pytest.mark.parametrize("name", names())
def test_the_opening_comment_is_complete(name) -> None:
    kernel = source(name)
    assert name in kernel.entries
    assert kernel.text.startswith(f"// {name}: ")
    assert kernel.needs[""] in (75, 80)
    assert 0 < kernel.registers <= 255
    assert 0 <= kernel.shared_bytes <= 96 * 1024
    assert kernel.threads % 32 == 0
    assert "// Traffic: " in kernel.text
    owner, method = kernel.reference.split(".")
    owners = {"ReferenceBackend": ReferenceBackend, "ReferenceSteps": ReferenceSteps}
    assert callable(getattr(owners[owner], method))


def test_variants_are_all_combinations() -> None:
    variants = source("gptq_dequantize").variants
    assert len(variants) == 6 * 2 * 3
    assert {"BITS": "3", "COLUMNS": "4", "SCALE": "BF16"} in variants
    assert source("exl2_dequantize").variants == ({},)


def test_inline_assembly_lives_in_one_header() -> None:
    with_assembly = {name for name, text in headers().items() if "asm" in text}
    with_assembly |= {name for name in names() if "asm" in source(name).text}
    assert with_assembly == {"intrin.cuh"}
