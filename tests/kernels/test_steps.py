"""The definitions of a decode step's operations, against torch's own and against what models compute."""

import pytest
import torch
import torch.nn.functional as F

from quantkit.kernels.steps import GROUP, PAGE, Pages, ReferenceSteps, turn, write
from quantkit.models.attention import attend
from quantkit.models.norm import Norm
from quantkit.models.rope import Rope, Rotary
from quantkit.models.rotation import hadamard

STEPS = ReferenceSteps()
CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rms_norm_is_the_models_and_adds_the_update_first() -> None:
    hidden, update, weight = random(3, 50), random(3, 50, seed=1).bfloat16(), random(50, seed=2)
    stream = hidden.clone()
    y = STEPS.rms_norm(stream, update, weight, 1e-6, torch.bfloat16)
    assert torch.equal(stream, hidden + update.float())
    torch.testing.assert_close(y.float(), Norm(weight, 1e-6)(stream), rtol=8e-3, atol=1e-6)


def test_silu_mul() -> None:
    gate, up = random(4, 30).half(), random(4, 30, seed=1).half()
    torch.testing.assert_close(STEPS.silu_mul(gate, up).float(), F.silu(gate.float()) * up.float(), rtol=1e-3, atol=1e-6)


def test_rope_append_is_the_models_rotation() -> None:
    rope, positions = Rope(10000.0, 32), torch.tensor([[5, 0, 900]])
    q, k, v = random(3, 4, 64).half(), random(3, 2, 64, seed=1).half(), random(3, 2, 64, seed=2).half()
    rotary = Rotary.at((rope,), positions)
    cos, sin = (table[0] for table in rotary.tables[rope])
    keys, values = (Pages.empty(1, 2, 64, 16, torch.float16, CPU) for _ in range(2))
    slots = torch.tensor([9, 0, 255])
    turned = STEPS.rope_append(q, k, v, cos, sin, slots, keys, values)
    expected_q, expected_k = (rotary.turn(rope, heads.transpose(0, 1)[None])[0].transpose(0, 1).half() for heads in (q, k))
    assert torch.equal(turned, expected_q)
    assert torch.equal(STEPS.kv_read(keys, slots, torch.float16), expected_k)
    assert torch.equal(STEPS.kv_read(values, slots, torch.float16), v)


@pytest.mark.parametrize("bits", [9, 8, 4])
def test_quantized_pages_are_within_half_a_step(bits) -> None:
    heads = random(40, 2, 64) * torch.logspace(-6, 4, 40)[:, None, None]
    heads[7] = 0
    pages, slots = Pages.empty(1, 2, 64, bits, torch.float16, CPU), torch.arange(40) * 6
    write(pages, heads, slots)
    read = STEPS.kv_read(pages, slots, torch.float32)
    groups = heads.unflatten(-1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True) / ((2**bits - 1) / 2)
    error = (read.unflatten(-1, (-1, GROUP)) - groups).abs()
    assert bool((error <= step * 0.502 + 2**-24 * 2**bits).all()), "half a step, and the rounding of its scale to float16"
    assert not read[7].any()


@pytest.mark.parametrize(("width", "block"), [(64, 64), (96, 32), (6, 2)])
def test_turning_is_a_product_with_hadamards_matrix(width, block) -> None:
    heads = random(3, 2, width)
    expected = (heads.double().unflatten(-1, (-1, block)) @ hadamard(block)).flatten(-2)
    torch.testing.assert_close(turn(heads, block).double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(turn(turn(heads, block), block), heads, rtol=0, atol=1e-6)


def test_attention_over_turned_pages_is_that_over_the_others() -> None:
    q, k, v = random(1, 4, 32), random(9, 2, 32, seed=1), random(9, 2, 32, seed=2)
    cos, sin, slots = torch.ones(9, 16), torch.zeros(9, 16), torch.arange(9)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9])
    found = []
    for block in (1, 32):
        keys, values = (Pages.empty(1, 2, 32, 16, torch.float32, CPU, block) for _ in range(2))
        turned = STEPS.rope_append(q.expand(9, -1, -1), k, v, cos, sin, slots, keys, values)[:1]
        found.append(STEPS.attend(turned, keys, values, table, lengths, 0.3))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_four_bit_codes_by_hand() -> None:
    """max 7.5 gives scale 1: codes 0 … 15 stand for -7.5 … 7.5, the even element in the low half of a byte."""
    pages = Pages.empty(1, 1, 32, 4, torch.float16, CPU)
    row = torch.zeros(32)
    row[:4] = torch.tensor([7.5, -7.5, 0.4, -0.6])
    write(pages, row.view(1, 1, 32), torch.tensor([3]))
    assert pages.scales[0, 0, 3].tolist() == [1.0]
    assert pages.codes[0, 0, 3, :3].tolist() == [0x0F, 0x78, 0x88]


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (20, 0.0), (0, 5.0), (300, 5.0)])
def test_attend_is_the_models_over_pages_in_any_order(window, cap) -> None:
    heads, kv_heads, dim, lengths = 6, 2, 32, (1, 290)
    q = random(2, heads, dim)
    table = torch.tensor([[3, 0], [2, 1]], dtype=torch.int32)
    keys, values = (Pages.empty(4, kv_heads, dim, 16, torch.float32, CPU) for _ in range(2))
    expected = []
    for sequence, length in enumerate(lengths):
        k, v = random(length, kv_heads, dim, seed=1), random(length, kv_heads, dim, seed=2)
        positions = torch.arange(length)
        slots = table[sequence].long()[positions // PAGE] * PAGE + positions % PAGE
        write(keys, k, slots)
        write(values, v, slots)
        past = (k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        one = attend(q[sequence, None, :, None], *past, scale=0.3, window=window or None, cap=cap or None)
        expected.append(one[0, :, 0])
    found = STEPS.attend(q, keys, values, table, torch.tensor(lengths), 0.3, window=window, cap=cap)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_argmax_takes_the_lowest_of_equals() -> None:
    assert STEPS.argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, float("nan"), 9.0]])).tolist() == [1, 1]
