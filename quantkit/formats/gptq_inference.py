"""Settings of a GPTQ linear that nobody wrote down, told from its tensors, or refused where they do not say."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.errors import FormatError
from quantkit.formats.gptq_config import CHECKPOINT_FORMATS, WIDTHS, GptqSettings
from quantkit.formats.gptq_zeros import read_zeros


def infer(name: str, tensors: Mapping[str, Tensor]) -> GptqSettings:
    """Bits from the widths of qzeros and scales, group size from g_idx, the zero-point convention from the zero points.

    A symmetric file has one zero point, `2^(bits-1)`, which only one of the two conventions reads out of it. An
    asymmetric one may mean either: FormatError. So is anything whose shapes no setting explains.
    """
    if any(suffix not in tensors or tensors[suffix].dim() != 2 for suffix in ("qweight", "qzeros", "scales")):
        raise _untold(name, "its tensors are not those of GPTQ")
    words, scales = tensors["qzeros"], tensors["scales"]
    if words.dtype != torch.int32:
        raise _untold(name, f"its zero points are {words.dtype}")
    bits, rest = divmod(words.shape[1] * 32, max(scales.shape[1], 1))
    if rest or bits not in WIDTHS:
        raise _untold(name, f"{words.shape[1]} words of zero points for {scales.shape[1]} outputs fit no width")
    in_features = tensors["qweight"].shape[0] * 32 // bits
    group_size = _group_size(in_features, scales.shape[0], tensors.get("g_idx"))
    for checkpoint_format in CHECKPOINT_FORMATS:
        settings = GptqSettings(bits, group_size, checkpoint_format=checkpoint_format)
        if bool((read_zeros(words, settings) == 1 << bits - 1).all()):
            return settings
    raise _untold(name, "its zero points are asymmetric, which `gptq` and `gptq_v2` store differently")


def _group_size(in_features: int, groups: int, g_idx: Tensor | None) -> int:
    """The members of the largest group; without g_idx, groups in sequence of `in/groups` or the next power of two."""
    if groups <= 1:
        return -1
    if g_idx is not None and bool(g_idx.any()):
        return int(torch.unique(g_idx, return_counts=True)[1].max())
    if in_features % groups == 0:
        return in_features // groups
    return int(2 ** (in_features // groups).bit_length())


def _untold(name: str, why: str) -> FormatError:
    return FormatError(
        f"`{name}` is stored as GPTQ without a `quantization_config`, and its tensors do not tell the settings: {why}",
        hint="put the quantize_config.json of this model beside its config.json",
    )
