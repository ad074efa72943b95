"""Slices of stored weights against the same slices of what they dequantize to: exactly equal, and in the same form."""

import pytest
import tiny_exl2
import torch
from tiny_gptq import random_linear

from quantkit.errors import FormatError
from quantkit.formats import exl2, gptq
from quantkit.formats.codec import Group, Layout
from quantkit.formats.dense import DenseTensor
from quantkit.formats.gptq_config import GptqSettings
from quantkit.formats.joined import JoinedTensor

LAYOUT = Layout((Group(6, 32), Group(4, 96), Group(4, 64), Group(2, 64)))


def _gptq(*, bits=4, group_size=64, act_order=False, rows=256, columns=192, seed=0):
    settings = GptqSettings(bits, group_size, False, act_order, "gptq_v2")
    generator = torch.Generator().manual_seed(seed)
    tensors = random_linear(rows, columns, settings, 0, generator)
    tensors["bias"] = torch.randn(columns, generator=generator).to(torch.float16)
    return gptq.decode("it", tensors, settings)


def _exl2(*, layout=LAYOUT, columns=96, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tiny_exl2.random_linear(layout, columns, generator, bias=True)


def _dense():
    generator = torch.Generator().manual_seed(3)
    return DenseTensor(torch.randn(96, 256, generator=generator), torch.randn(96, generator=generator))


WHOLE = {
    "dense": _dense,
    "gptq": _gptq,
    "gptq 3 bits": lambda: _gptq(bits=3),
    "gptq 8 bits, one group": lambda: _gptq(bits=8, group_size=-1),
    "gptq act-order": lambda: _gptq(act_order=True),
    "gptq short last group": lambda: _gptq(group_size=96),
    "exl2": _exl2,
    "exl2, odd columns": lambda: _exl2(columns=90),
    "joined": lambda: JoinedTensor({"a": _gptq(columns=64), "b": _exl2(columns=40), "c": _dense()}),
}


@pytest.mark.parametrize("repacked", [False, True])
@pytest.mark.parametrize("kind", WHOLE)
def test_outputs_are_those_columns(kind, repacked) -> None:
    whole = WHOLE[kind]()
    if repacked:
        whole.repack()
    columns = torch.arange(32, 168) if kind == "joined" else torch.arange(24, 88)
    if kind in ("gptq", "exl2", "exl2, odd columns", "dense"):
        columns = columns[torch.randperm(len(columns), generator=torch.Generator().manual_seed(1))]
    part = whole.outputs(columns)
    assert type(part) is type(whole)
    assert (part.in_features, part.out_features) == (whole.in_features, len(columns))
    torch.testing.assert_close(part.dequantize(), whole.dequantize()[:, columns], rtol=0, atol=0)
    torch.testing.assert_close(part.bias, whole.bias[columns], rtol=0, atol=0)
    x = torch.randn(5, whole.in_features, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(part.matmul(x), whole.matmul(x)[:, columns], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind != "joined"])
def test_inputs_are_those_rows_and_all_parts_make_the_whole(kind) -> None:
    whole = WHOLE[kind]()
    units = [unit for run in whole.runs for unit in run.split(32)]
    halves = [torch.cat(units[0::2]), torch.cat(units[1::2])]
    parts = [whole.inputs(rows) for rows in halves]
    for rows, part in zip(halves, parts, strict=True):
        assert type(part) is type(whole) and part.bias is None
        torch.testing.assert_close(part.dequantize(), whole.dequantize()[rows], rtol=0, atol=0)
    x = torch.randn(40, whole.in_features, generator=torch.Generator().manual_seed(2))
    total = sum(part.matmul(x[:, rows]) for rows, part in zip(halves, parts, strict=True)) + whole.bias
    torch.testing.assert_close(total, whole.matmul(x), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["gptq", "gptq act-order", "exl2"])
def test_a_slice_is_what_a_file_could_hold(kind) -> None:
    """What a slice says is on disk decodes to the same weight again, and has as many bits as it says."""
    whole = WHOLE[kind]()
    rows = torch.cat([unit for run in whole.runs for unit in run.split(32)][1:5])
    for part in (whole.outputs(torch.arange(32, 96)), whole.inputs(rows)):
        tensors = part.tensors()
        if kind == "exl2":
            again = exl2.decode("it", tensors, part.out_features)
        else:
            settings = GptqSettings(4, 64, False, "act" in kind, "gptq_v2")
            if len(tensors["scales"]) * 64 != part.in_features:
                continue  # groups of other sizes than a config can say
            again = gptq.decode("it", tensors, settings)
        torch.testing.assert_close(again.dequantize(), part.dequantize(), rtol=0, atol=0)
        assert sum(tensor.nbytes for tensor in tensors.values()) * 8 == part.stored_bits


def test_a_slice_along_units_takes_its_share_of_the_bits() -> None:
    for whole in (_gptq(act_order=True), _exl2()):
        first = torch.cat([run[: len(run) // 64 * 32] for run in whole.runs])
        share = len(first) / whole.in_features
        assert whole.inputs(first).stored_bits == pytest.approx(whole.stored_bits * share, rel=0.15)


def test_rows_that_break_a_unit_are_refused_not_rounded() -> None:
    some = torch.arange(64)
    broken = [(_gptq(act_order=True), some), (_exl2(), some), (_gptq(), torch.arange(16, 80))]  # scattered, or cut
    for whole, rows in broken:
        assert not whole.divides(rows)
        with pytest.raises(FormatError, match="64 inputs break a group"):
            whole.inputs(rows)
    assert _gptq().divides(some)  # groups in sequence
    assert _dense().divides(torch.arange(7)) and _dense().inputs(torch.arange(7)).in_features == 7


def test_groups_smaller_than_a_unit_are_taken_whole() -> None:
    whole = _gptq(group_size=16)
    assert whole.runs is None
    part = whole.inputs(torch.arange(32, 96))
    torch.testing.assert_close(part.dequantize(), whole.dequantize()[32:96], rtol=0, atol=0)
    assert not whole.divides(torch.arange(8, 72))


def test_zero_points_that_fill_no_word_are_refused() -> None:
    with pytest.raises(FormatError, match="12 outputs of 4 bits do not fill whole words"):
        _gptq().outputs(torch.arange(12))
