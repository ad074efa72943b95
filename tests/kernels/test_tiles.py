"""Tiles: each code is where the drawing says, and every weight comes back bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels import random_weights, tiles
from quantkit.kernels.protocol import WIDTHS
from quantkit.kernels.reference import ReferenceBackend

REFERENCE = ReferenceBackend()


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_code_is_where_the_drawing_says(bits) -> None:
    codes = random_weights.codes(64, 128, bits)
    words = tiles.tile(codes, bits).view(2, 2, 64 * bits) & 0xFFFFFFFF
    generator = torch.Generator().manual_seed(bits)
    for _ in range(200):
        row, column = (int(torch.randint(0, size, (), generator=generator)) for size in (64, 128))
        run, strip = row // 32, column // 64
        t, s, h, i = row % 32 // 8, row % 8 // 4, row % 4 // 2, row % 2
        f, v, g = column % 64 // 16, column % 16 // 8, column % 8
        lane, position = 4 * g + t, 4 * s + 2 * h + v
        code, low, start = 0, 0, 0
        for width in tiles.PLANES[bits]:
            places = 16 // width
            word = (position // places * 32 + lane) * 4 + f if width > 1 else lane * 2 + f // 2
            place = position % places if width > 1 else f % 2 * 8 + position
            part = int(words[strip, run, start + word]) >> width * place + 16 * i & (1 << width) - 1
            code, low, start = code | part << low, low + width, start + 64 * width
        assert code == codes[row, column]


@pytest.mark.parametrize("bits", WIDTHS)
def test_untile_is_the_inverse(bits) -> None:
    codes = random_weights.codes(96, 192, bits)
    assert torch.equal(tiles.untile(tiles.tile(codes, bits), bits), codes)


@settings(max_examples=30, deadline=None)
@given(
    bits=st.sampled_from(WIDTHS),
    units=st.integers(1, 6),
    out=st.integers(1, 140),
    group_size=st.sampled_from([8, 16, 32, 48, 64, 1000]),
    act_order=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_gptq_comes_back(bits, units, out, group_size, act_order, dtype) -> None:
    weight = random_weights.gptq(32 * units, out, bits, group_size, act_order=act_order, dtype=dtype, seed=out)
    made = tiles.gptq_tiles(REFERENCE.unpack(weight.words, bits), weight)
    codes, group = tiles.gptq_codes(made)
    assert torch.equal(REFERENCE.pack(codes, bits), weight.words)
    assert torch.equal(group, weight.group)
    assert torch.equal(tiles.untile_columns(made.scales)[:, :out].to(made.scale_dtype), weight.scales)
    assert torch.equal(tiles.untile_columns(made.zeros)[:, :out], weight.zeros)


@pytest.mark.parametrize("groups", [((4, 64), (4, 32)), ((8, 32), (5, 64), (3, 32), (2, 32), (2, 16)), ((6, 48),)], ids=str)
@pytest.mark.parametrize("in_order", [False, True])
def test_exl2_comes_back(groups, in_order) -> None:
    weight = random_weights.exl2(groups, 72, in_order=in_order)
    codes, row = [], 0
    for bits, rows in groups:
        codes.append(REFERENCE.unpack(weight.words[row : row + rows * bits // 32], bits))
        row += rows * bits // 32
    scale_codes = REFERENCE.unpack(weight.scale_codes.t().contiguous(), 4).t()
    back, back_scales, order = tiles.exl2_codes(tiles.exl2_tiles(codes, scale_codes, weight))
    assert all(torch.equal(a, b) for a, b in zip(back, codes, strict=True))
    assert torch.equal(back_scales, scale_codes)
    assert torch.equal(order, weight.order)


def test_memory_is_that_of_the_file() -> None:
    weight = random_weights.gptq(256, 128, 4, 128)
    made = tiles.gptq_tiles(REFERENCE.unpack(weight.words, 4), weight)
    assert made.size_bytes == weight.words.nbytes + weight.scales.nbytes + weight.zeros.nbytes + 4 * 256 // 32
