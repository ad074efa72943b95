"""Zero points as GPTQ files hold them, in both conventions: v1 is zero point - 1, v2 the zero point itself."""

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats.gptq_config import GptqSettings

# A v1 file holds zero point - 1 in each field. Writers subtract one from all fields of a word at once, modulo 2³², so
# a zero point of 0 borrows from the next field; adding the same constant back is exact. 3-bit fields straddle words:
# there the current rule is field by field, modulo 8.
ONE_IN_EACH_FIELD = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
# GPTQModel before 7.0 had 3-bit constants that are not field-wise; this is what it subtracted from each word triple.
OLD_THREE_BIT_ONES = (0x24924924, 0x92492492, 0x49249249)
OLD_THREE_BIT_SYMMETRIC = (0x00000000, 0xB6DB6DB7, 0x49249249)


def read_zeros(qzeros: Tensor, settings: GptqSettings) -> Tensor:
    """int32 [groups, out·bits/32] as on disk → true zero points, uint8 [groups, out]."""
    bits = settings.bits
    if settings.checkpoint_format == "gptq_v2":
        return _unpack_along_columns(qzeros, bits)
    if bits != 3:
        return _unpack_along_columns(_add_to_words(qzeros, (ONE_IN_EACH_FIELD[bits],)), bits)
    if settings.packed_borrow or _repeats(qzeros, OLD_THREE_BIT_SYMMETRIC):
        return _unpack_along_columns(_add_to_words(qzeros, OLD_THREE_BIT_ONES), bits)
    return _unpack_along_columns(qzeros, bits) + 1 & 7


def write_zeros(zeros: Tensor, bits: int, settings: GptqSettings) -> Tensor:
    """True zero points, uint8 [groups, out] → int32 [groups, out·bits/32]. v1 files cannot hold 0: FormatError."""
    if settings.checkpoint_format == "gptq":
        if bool((zeros == 0).any()):
            raise FormatError("a zero point of 0 cannot be written in checkpoint format `gptq`", hint="use `gptq_v2`")
        zeros = zeros - 1
    return kernels.backend(zeros.device.type).pack(zeros.t().contiguous(), bits).t().contiguous()


def _unpack_along_columns(qzeros: Tensor, bits: int) -> Tensor:
    return kernels.backend(qzeros.device.type).unpack(qzeros.t().contiguous(), bits).t().contiguous()


def _add_to_words(words: Tensor, constants: tuple[int, ...]) -> Tensor:
    """Add the constants to the words of each row in turn, modulo 2³²."""
    repeats = words.shape[1] // len(constants)
    total = words.to(torch.int64) + torch.tensor(constants, device=words.device).repeat(repeats)
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


def _repeats(words: Tensor, pattern: tuple[int, ...]) -> bool:
    return bool(((words.to(torch.int64) & 0xFFFFFFFF).view(-1, len(pattern)) == torch.tensor(pattern)).all())
