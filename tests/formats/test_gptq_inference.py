"""What the tensors of a GPTQ linear tell of its settings, and where they keep silent."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats.codec import Codes
from quantkit.formats.gptq import GptqCodec, decode
from quantkit.formats.gptq_inference import infer


def encode(codec: GptqCodec, inputs: int, order: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
    """Random weights in GPTQ form: tensors by suffix, and the weight `[in, out]` they stand for."""
    torch.manual_seed(0)
    rows = torch.randn(inputs, 64)
    layout = codec.layout(inputs)
    spans = list(layout.spans())
    grids = tuple(codec.fit(rows[start:stop], group.bits, None) for group, start, stop in spans)
    q = torch.cat([grid.quantize(rows[start:stop]) for grid, (_, start, stop) in zip(grids, spans, strict=True)])
    stored = codec.encode(Codes(q, grids, layout, torch.arange(inputs) if order is None else order), None)
    return stored.tensors(), stored.dequantize()


@pytest.mark.parametrize("with_g_idx", [True, False])
@pytest.mark.parametrize(("inputs", "group_size"), [(128, 32), (128, 64), (160, 64), (128, -1), (96, 128)])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_files_tell_all(
    bits: int, checkpoint_format: str, inputs: int, group_size: int, with_g_idx: bool
) -> None:
    tensors, weight = encode(GptqCodec(bits, group_size, checkpoint_format=checkpoint_format), inputs)
    if not with_g_idx:
        del tensors["g_idx"]
    settings = infer("x", tensors)
    assert (settings.bits, settings.checkpoint_format) == (bits, checkpoint_format)
    assert settings.group_size == (-1 if group_size > inputs else group_size)
    assert torch.equal(decode("x", tensors, settings).dequantize(), weight)


def test_scattered_groups_are_told_by_their_members() -> None:
    order = torch.randperm(160, generator=torch.Generator().manual_seed(1))
    tensors, weight = encode(GptqCodec(4, 64, act_order=True), 160, order)
    assert infer("x", tensors).group_size == 64
    assert torch.equal(decode("x", tensors, infer("x", tensors)).dequantize(), weight)


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_asymmetric_files_keep_their_convention_to_themselves(checkpoint_format: str) -> None:
    tensors, _ = encode(GptqCodec(4, 32, sym=False, checkpoint_format=checkpoint_format), 128)
    with pytest.raises(FormatError, match=r"`x` is stored as GPTQ without a `quantization_config`.*asymmetric") as caught:
        infer("x", tensors)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qzeros": None}, "are not those of GPTQ"),
        ({"scales": None}, "are not those of GPTQ"),
        ({"scales": torch.ones(64)}, "are not those of GPTQ"),
        ({"qweight": torch.tensor(1)}, "are not those of GPTQ"),
        ({"qzeros": torch.ones(4, 8)}, "its zero points are torch.float32"),
        ({"qzeros": torch.zeros(4, 10, dtype=torch.int32)}, "10 words of zero points for 64 outputs fit no width"),
        ({"scales": torch.ones(4, 0)}, "fit no width"),
    ],
)
def test_shapes_that_no_setting_explains(changes: dict[str, Tensor | None], message: str) -> None:
    tensors, _ = encode(GptqCodec(4, 32), 128)
    changed = {suffix: tensor for suffix, tensor in {**tensors, **changes}.items() if tensor is not None}
    with pytest.raises(FormatError, match=message):
        infer("x", changed)
