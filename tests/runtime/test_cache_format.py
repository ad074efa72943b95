from dataclasses import replace
from itertools import product

import pytest
import tiny
import torch

from quantkit.errors import RequestError, UsageError
from quantkit.kernels.steps import decode, encode, row_width
from quantkit.memory import KV_FORMATS
from quantkit.models.config import ModelConfig
from quantkit.runtime.cache_format import CacheFormat, cache_format
from quantkit.runtime.page_pool import PagePool

WIDTHS = [8, 16, 32, 48, 64, 80, 96, 128]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "head_dim"), product(KV_FORMATS, WIDTHS))
def test_what_is_stored_comes_back_within_its_step(name, head_dim):
    form = cache_format(name, head_dim, torch.float32)
    heads = random(2, 9, head_dim)
    for side in (form.keys, form.values):
        turned = side.turn(heads)
        read = side.decode(side.encode(turned), torch.float32)
        step = 2 * turned.abs().max() / (2**side.bits - 1) if side.bits < 16 else 2**-10 * turned.abs().max()
        assert float((read - turned).abs().max()) <= 0.51 * step


@pytest.mark.parametrize("head_dim", WIDTHS)
def test_a_rotation_is_its_own_inverse_and_keeps_products(head_dim):
    side = cache_format("q4_0", head_dim, torch.float32).keys
    assert side.rotated
    q, k = random(3, head_dim), random(4, head_dim)
    torch.testing.assert_close(side.turn(side.turn(q)), q)
    torch.testing.assert_close(side.turn(q) @ side.turn(k).T, q @ k.T)


def test_an_outlier_is_spread_over_the_row():
    heads = random(1, 1, 64)
    heads[..., 3] = 100
    side = cache_format("q4_0", 64, torch.float32).keys
    plain = side.decode(side.encode(heads), torch.float32)
    turned = side.turn(side.decode(side.encode(side.turn(heads)), torch.float32))
    assert float((turned - heads).norm()) < 0.5 * float((plain - heads).norm())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_without_a_name_numbers_stay_as_they_are(dtype, name):
    form = cache_format(None, 64, dtype)
    heads = random(2, 3, 64).to(dtype)
    assert form.name == name and form.row_bytes == 2 * 64 * dtype.itemsize
    assert torch.equal(form.keys.decode(form.keys.encode(form.keys.turn(heads)), dtype), heads)


@pytest.mark.parametrize(("name", "head_dim", "tokens"), product(KV_FORMATS, [16, 32, 48, 64, 128], [1, 256, 1000]))
def test_bytes_are_those_that_the_memory_model_says(name, head_dim, tokens):
    config = ModelConfig.read(tiny.make_config("Qwen3ForCausalLM", head_dim=head_dim))
    pool = PagePool(config, -(-tokens // 256), cache_format(name, head_dim, torch.float32))
    assert pool.use.cache_bytes == KV_FORMATS[name].cache_bytes(config, tokens)
    stores = [side for rows in (pool._device._keys, pool._device._values) for layer in rows for side in layer]
    assert sum(side.nbytes for side in stores if side is not None) == pool.use.cache_bytes


def test_bytes_of_a_small_head_by_hand() -> None:
    """64 numbers: 64 or 32 bytes of codes, eight of ninth bits in the keys of int8, two scales of two bytes."""
    rows = {name: cache_format(name, 64, torch.float32).row_bytes for name in KV_FORMATS}
    assert rows == {"fp16": 256, "int8": 144, "k8v4": 104, "q4_0": 72}


def test_k8v4_is_eight_bit_keys_and_four_bit_values():
    """Keys are those of int8 without their ninth bit, which its values would drown."""
    forms: dict[str, CacheFormat] = {name: cache_format(name, 64, torch.float32) for name in KV_FORMATS}
    assert forms["k8v4"].keys == forms["int8"].values and forms["k8v4"].values == forms["q4_0"].values
    assert forms["int8"].keys == replace(forms["k8v4"].keys, bits=9)


@pytest.mark.parametrize("head_dim", [1, 7, 8, 9, 33, 64, 72, 80])
def test_a_ninth_bit_halves_the_step(head_dim):
    """Every code that there is comes back as it was, also in rows that fill no whole byte of ninth bits."""
    half, rows = 255.5, -(-512 // max(1, head_dim - 1))
    codes = torch.arange(rows * (head_dim - 1) if head_dim > 1 else 1).remainder(512).view(rows if head_dim > 1 else 1, -1)
    heads = torch.cat([torch.full((len(codes), 1), half), codes[:, : head_dim - 1] - half], dim=1)
    stored, scales = encode(heads, 9)
    assert stored.shape[1] == row_width(head_dim, 9) == head_dim + -(-head_dim // 8)
    assert scales[:, 0].eq(1).all()
    read = decode(stored, scales, 9, torch.float32)
    assert read.shape == heads.shape and torch.equal(read[:, :32], heads[:, :32])
    noise = random(40, head_dim)
    errors = [float((decode(*encode(noise, bits), bits, torch.float32) - noise).square().mean()) for bits in (8, 9)]
    assert head_dim == 1 or errors[1] < 0.35 * errors[0]


def test_what_is_no_number_stays_none():
    heads = random(1, 3, 64)
    heads[0, 1, 5] = float("nan")
    for name in KV_FORMATS:
        side = cache_format(name, 64, torch.float32).values
        read = side.decode(side.encode(side.turn(heads)), torch.float32)
        assert read[0, 1].isnan().any() and read[0, [0, 2]].isfinite().all()


def test_refusals():
    with pytest.raises(UsageError, match="no cache format `fp8`"):
        cache_format("fp8", 64, torch.float32)
    with pytest.raises(RequestError, match="heads of 33 are odd"):
        cache_format("k8v4", 33, torch.float32)
    assert cache_format("int8", 33, torch.float32).keys.rotated is False
