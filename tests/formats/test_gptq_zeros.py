"""Zero points of GPTQ files: both conventions, and what writers made of the one that has no room for 0."""

import pytest
import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.formats.gptq_zeros import read_zeros, write_zeros

SYMMETRIC_WORDS = {
    (2, "gptq"): (0x55555555,),
    (2, "gptq_v2"): (0xAAAAAAAA,),
    (3, "gptq"): (0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D),
    (3, "gptq_v2"): (0x24924924, 0x49249249, 0x92492492),
    (4, "gptq"): (0x77777777,),
    (4, "gptq_v2"): (0x88888888,),
    (8, "gptq"): (0x7F7F7F7F,),
    (8, "gptq_v2"): (0x80808080,),
}


def _words(*words: int) -> Tensor:
    return torch.tensor([[word - (word >> 31 << 32) for word in words]], dtype=torch.int32)


@pytest.mark.parametrize(("bits", "checkpoint_format"), SYMMETRIC_WORDS)
def test_symmetric_words(bits: int, checkpoint_format: str) -> None:
    chosen = GptqSettings(bits, 32, checkpoint_format=checkpoint_format)
    pattern = SYMMETRIC_WORDS[bits, checkpoint_format]
    words = _words(*pattern * (bits if len(pattern) == 1 else 1))
    zeros = torch.full((1, 32), 1 << bits - 1, dtype=torch.uint8)
    assert torch.equal(read_zeros(words, chosen), zeros)
    assert torch.equal(write_zeros(zeros, bits, chosen), words)


@pytest.mark.parametrize(("bits", "checkpoint_format"), SYMMETRIC_WORDS)
def test_every_zero_point_that_can_be_written_is_read_back(bits: int, checkpoint_format: str) -> None:
    least = 1 if checkpoint_format == "gptq" else 0
    chosen = GptqSettings(bits, 32, sym=False, checkpoint_format=checkpoint_format)
    zeros = torch.arange(least, 1 << bits, dtype=torch.uint8).repeat(32).view(32, -1).t().contiguous()
    assert torch.equal(read_zeros(write_zeros(zeros, bits, chosen), chosen), zeros)


def test_v1_words_with_borrows() -> None:
    """Zero points 0, 5 as 4-bit v1: 0x50 - 0x11 = 0x3F, so the borrow of the first field lowers the second."""
    words = _words(0x00000050 - 0x11111111 & 0xFFFFFFFF)
    zeros = read_zeros(words.repeat(1, 4), GptqSettings(4, 32, sym=False))
    assert zeros[0, :8].tolist() == [0, 5, 0, 0, 0, 0, 0, 0]


def test_three_bit_v1_counts_each_field_by_itself() -> None:
    """A stored 7 is zero point 0, and does not carry into its neighbour."""
    words = _words(0b010_111, 0, 0)
    zeros = read_zeros(words, GptqSettings(3, 32, sym=False))
    assert zeros[0, :3].tolist() == [0, 3, 1]


def test_old_three_bit_constant_is_recognised_by_its_symmetric_words() -> None:
    words = _words(0x00000000, 0xB6DB6DB7, 0x49249249)
    assert bool((read_zeros(words, GptqSettings(3, 32)) == 4).all())


def test_old_three_bit_constant_is_undone_where_the_writer_is_known() -> None:
    zeros = torch.arange(32, dtype=torch.uint8)[None] % 8
    packed = write_zeros(zeros, 3, GptqSettings(3, 32, checkpoint_format="gptq_v2")).to(torch.int64) & 0xFFFFFFFF
    written = packed - torch.tensor([0x24924924, 0x92492492, 0x49249249]) & 0xFFFFFFFF
    words = _words(*written[0].tolist())
    config = {"quant_method": "gptq", "bits": 3, "sym": False, "meta": {"quantizer": ["gptqmodel:6.0.3"]}}
    assert torch.equal(read_zeros(words, GptqConfig.read(config).base), zeros)


def test_v1_cannot_write_a_zero_point_of_zero() -> None:
    with pytest.raises(FormatError, match="zero point of 0 cannot be written in checkpoint format `gptq`") as caught:
        write_zeros(torch.zeros(1, 32, dtype=torch.uint8), 4, GptqSettings(4, 32, sym=False))
    assert "gptq_v2" in str(caught.value.hint)
