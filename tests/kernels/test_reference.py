"""The definition of each operation, held to bytes worked out by hand."""

import pytest
import torch
from torch import Tensor

from quantkit import kernels
from quantkit.kernels.protocol import Exl2Weight, GptqWeight
from quantkit.kernels.reference import exl2_scales

reference = kernels.backend("cpu", "reference")


def _column(*words: int) -> Tensor:
    """Unsigned words as one int32 column."""
    return torch.tensor([[word - (word >> 31 << 32)] for word in words], dtype=torch.int32)


# One column of 32 codes that are all 2^(bits-1): the symmetric zero point as every GPTQ v2 file shows it.
MIDDLES = {
    2: (0xAAAAAAAA, 0xAAAAAAAA),
    3: (0x24924924, 0x49249249, 0x92492492),
    4: (0x88888888,) * 4,
    8: (0x80808080,) * 8,
}


@pytest.mark.parametrize("bits", MIDDLES)
def test_the_middle_code_everywhere(bits: int) -> None:
    codes = torch.full((32, 1), 1 << bits - 1, dtype=torch.uint8)
    assert torch.equal(reference.pack(codes, bits), _column(*MIDDLES[bits]))


def test_four_bits_fill_words_from_the_lowest_nibble() -> None:
    codes = torch.arange(8, dtype=torch.uint8)[:, None]
    assert torch.equal(reference.pack(codes, 4), _column(0x76543210))


def test_three_bit_codes_10_and_21_straddle_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.uint8)
    codes[10] = 0b101  # low bits 01 end word 0, high bit 1 begins word 1
    codes[21] = 0b110  # low bit 0 ends word 1, high bits 11 begin word 2
    assert torch.equal(reference.pack(codes, 3), _column(0b01 << 30, 0b1 | 0 << 31, 0b11))


def test_five_bit_codes_6_12_19_and_25_straddle_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.uint8)
    codes[[6, 12, 19, 25]] = 0b10111
    expected = (0b11 << 30, 0b101 | 0b0111 << 28, 0b1 | 0b1 << 31, 0b1011 | 0b111 << 29, 0b10)
    assert torch.equal(reference.pack(codes, 5), _column(*expected))


def test_six_bit_codes_5_and_10_straddle_words() -> None:
    codes = torch.zeros(16, 1, dtype=torch.uint8)
    codes[[5, 10]] = 0b101101
    assert torch.equal(reference.pack(codes, 6), _column(0b01 << 30, 0b1011 | 0b1101 << 28, 0b10))


def test_gptq_weight_by_hand() -> None:
    """One column, 8 rows at 4 bits: codes 0 … 7, rows alternately in group 0 (scale 0.5, zero 3) and 1 (-2, 5)."""
    weight = GptqWeight(
        words=_column(0x76543210),
        scales=torch.tensor([[0.5], [-2.0]], dtype=torch.float16),
        zeros=torch.tensor([[3], [5]], dtype=torch.uint8),
        group=torch.tensor([0, 1] * 4),
        bits=4,
    )
    assert reference.gptq_dequantize(weight).flatten().tolist() == [-1.5, 8, -0.5, 4, 0.5, 0, 1.5, -4]


def test_gptq_weight_is_rounded_once() -> None:
    """3 · 0.1 in float16: fp16(0.1) is 0.0999756, three times that 0.2999268, and the nearest float16 is 0.2998047."""
    weight = GptqWeight(
        words=_column(0x00000003),
        scales=torch.tensor([[0.1]], dtype=torch.float16),
        zeros=torch.zeros(1, 1, dtype=torch.uint8),
        group=torch.zeros(8, dtype=torch.int64),
        bits=4,
    )
    assert float(reference.gptq_dequantize(weight)[0]) == 0.2998046875


def test_exl2_scales_by_hand() -> None:
    """Scale code c of a group maximum 1 is ((c + 1)/16)²; column 0 is in the lowest nibble."""
    scales = exl2_scales(torch.tensor([[0x76543210]], dtype=torch.int32), torch.ones(1, dtype=torch.float16))
    assert scales.flatten().tolist() == [((c + 1) / 16) ** 2 for c in range(8)]


def test_exl2_scale_unit_is_rounded_before_it_is_used() -> None:
    """4e-5/256 is between the subnormals 2·2^-24 and 3·2^-24: the unit becomes 3·2^-24, and every scale follows it."""
    scales = exl2_scales(torch.tensor([[0x0000000F]], dtype=torch.int32), torch.tensor([4e-5], dtype=torch.float16))
    assert float(scales[0, 0]) == 256 * 3 * 2**-24


def test_exl2_weight_by_hand() -> None:
    """Stored rows 0 … 15 at 2 bits, all code 3, hold the features in reverse; row 15, feature 0, has code 0."""
    weight = Exl2Weight(
        words=_column(0x3FFFFFFF).repeat(1, 8),
        scale_codes=torch.tensor([[-1]], dtype=torch.int32),
        scale_max=torch.tensor([0.25], dtype=torch.float16),
        groups=((2, 16),),
        order=torch.arange(15, -1, -1),
    )
    found = reference.exl2_dequantize(weight)
    assert found[0].tolist() == [-0.5] * 8
    assert bool((found[1:] == 0.25).all())
