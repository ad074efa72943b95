"""The GPTQ family: qweight, qzeros, scales, g_idx; both zero-point conventions, 2, 3, 4 and 8 bits.

    qweight  int32 [in·bits/32, out]    codes, packed down the rows; rows in the model's own order
    qzeros   int32 [groups, out·bits/32] zero points, packed along the columns; v1 files hold zero point - 1
    scales   float16 [groups, out]
    g_idx    int32 [in]                  group of each row

`docs/formats/gptq.md` has the bytes. How each linear is stored stands in the configuration (`gptq_config`), how a
group's grid is chosen in `gptq_grid`, how zero points lie in `qzeros` in `gptq_zeros`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats import gptq_config, gptq_grid, slices
from quantkit.formats.codec import Codes, Grid, Layout
from quantkit.formats.gptq_config import GptqConfig, GptqSettings
from quantkit.formats.gptq_zeros import read_zeros, write_zeros
from quantkit.formats.repacked import RepackedTensor
from quantkit.formats.words import codes_and_grids, misfit
from quantkit.kernels.protocol import Backend, GptqWeight, Repacked

__all__ = ["GptqCodec", "GptqConfig", "GptqSettings", "GptqTensor", "decode", "recognise"]

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx", "bias")
OTHER_SHAPE = f"correct `bits` and `group_size` in config.json; else {gptq_config.REQUANTIZE}"
CHECK_BITS = "check `bits` in the `quantization_config` against the file"


def recognise(suffixes: Collection[str]) -> bool:
    """Whether these tensor names of one linear are GPTQ's."""
    return "qweight" in suffixes


def decode(name: str, tensors: Mapping[str, Tensor], settings: GptqSettings | None) -> "GptqTensor":
    """One linear from its tensors by suffix. Raises FormatError, naming the tensor, for anything that does not fit.

    `settings` is what `GptqConfig.for_module` gives: None where a rule says that the linear is dense.
    """
    if settings is None:
        raise FormatError(
            f"`{name}.qweight` is there, but a `dynamic` rule says that `{name}` is not quantized",
            hint="remove the rule that starts with `-:` from the `quantization_config` of config.json",
        )
    qweight, qzeros, scales = codes_and_grids(name, tensors, OTHER_SHAPE)
    in_features, out_features = qweight.shape[0] * 32 // settings.bits, qweight.shape[1]
    if refusal := _refusal(in_features, out_features):
        raise FormatError(f"`{name}.qweight` {_shape(qweight)} at {settings.bits} bits: {refusal}", hint=CHECK_BITS)
    groups = -(-in_features // _rows_of_group(settings, in_features))
    if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32) or scales.shape != (groups, out_features):
        expected = f"floats of shape [{groups}, {out_features}] at group size {settings.group_size}"
        raise misfit(name, "scales", expected, scales, OTHER_SHAPE)
    if not bool(torch.isfinite(scales).all()):
        raise FormatError(f"`{name}.scales` holds NaN or infinity", hint="download the checkpoint again")
    if qzeros.shape != (groups, out_features * settings.bits // 32):
        raise misfit(name, "qzeros", f"shape [{groups}, {out_features * settings.bits // 32}]", qzeros, OTHER_SHAPE)
    bias = tensors.get("bias")
    if bias is not None and (bias.shape != (out_features,) or not bias.is_floating_point()):
        raise misfit(name, "bias", f"floats of shape [{out_features}]", bias, OTHER_SHAPE)
    zeros = read_zeros(qzeros, settings)
    _check_convention(name, zeros, settings)
    group = _group_of_rows(name, tensors.get("g_idx"), settings, in_features, groups, scales.device)
    weight = GptqWeight(qweight, scales, zeros, group, settings.bits)
    kept = {suffix: tensors[suffix] for suffix in SUFFIXES[1:] if suffix in tensors}
    return GptqTensor(weight, kept)


class GptqTensor(RepackedTensor[GptqWeight]):
    """One linear in GPTQ form."""

    def __init__(self, weight: GptqWeight, kept: Mapping[str, Tensor]) -> None:
        """`kept`: what is on disk besides qweight, by suffix."""
        super().__init__(weight, weight.words.device)
        self.in_features, self.out_features = weight.group.numel(), weight.words.shape[1]
        self.bits = weight.bits
        self.bias = kept.get("bias")
        self.row_groups: Tensor = weight.group
        # Scales are in the weight, in one form or another: they are not held a second time.
        self._kept = {suffix: tensor for suffix, tensor in kept.items() if suffix != "scales"}
        self._scale_bits = 8 * weight.scales.nbytes

    def tensors(self) -> dict[str, Tensor]:
        weight = self._stored()
        found = {**self._kept, "qweight": weight.words, "scales": weight.scales}
        return {suffix: found[suffix] for suffix in SUFFIXES if suffix in found}

    def dequantize(self) -> Tensor:
        return kernels.backend(self._device).gptq_dequantize(self._stored())

    def _multiply(self, backend: Backend, repacked: Repacked, x: Tensor) -> Tensor:
        return backend.gptq_matmul(x, repacked)

    def to(self, device: str | torch.device) -> "GptqTensor":
        if self._is_on(device):
            return self
        weight = self._stored()
        words, scales, zeros, group = (
            part.to(device) for part in (weight.words, weight.scales, weight.zeros, weight.group)
        )
        kept = {suffix: tensor.to(device) for suffix, tensor in self._kept.items()}
        return GptqTensor(GptqWeight(words, scales, zeros, group, weight.bits), kept)

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [in, out] in the model's own order, zero points uint8 [groups, out], scales [groups, out]."""
        weight = self._stored()
        q = kernels.backend(self._device).unpack(weight.words, self.bits)
        return q, weight.zeros, weight.scales

    def outputs(self, columns: Tensor) -> "GptqTensor":
        return GptqTensor(*slices.gptq_outputs(self._stored(), self._kept, columns))

    def inputs(self, rows: Tensor) -> "GptqTensor":
        return GptqTensor(*slices.gptq_inputs(self._stored(), self._kept, rows))

    def divides(self, rows: Tensor) -> bool:
        return slices.gptq_divides(self.row_groups, rows)

    @property
    def runs(self) -> tuple[Tensor, ...] | None:
        return slices.gptq_runs(self.row_groups)

    def steps(self) -> Tensor:
        """Codes minus zero points, int16 [in, out]: the weight is `steps · scales[row_groups]`."""
        weight = self._stored()
        codes = kernels.backend(self._device).unpack(weight.words, weight.bits).to(torch.int16)
        return codes.sub_(weight.zeros.to(torch.int16)[weight.group])

    def with_scales(self, scales: Tensor) -> "GptqTensor":
        """The same codes on other scales, floats [groups, out]. Raises FormatError where float16 cannot hold them."""
        own = scales.to(torch.float16)
        if not bool(torch.isfinite(own).all()):
            raise FormatError("a scale is beyond what float16 holds", hint="use `--effort fast`")
        weight = self._stored()
        return GptqTensor(GptqWeight(weight.words, own, weight.zeros, weight.group, weight.bits), self._kept)

    @property
    def stored_bits(self) -> int:
        codes = self.in_features * self.out_features * self.bits
        return codes + self._scale_bits + sum(tensor.nbytes * 8 for tensor in self._kept.values())

    def _pack(self, backend: Backend, weight: GptqWeight) -> Repacked:
        return backend.gptq_repack(weight)

    def _restore(self, backend: Backend, repacked: Repacked) -> GptqWeight:
        return backend.gptq_restore(repacked)


@dataclass(frozen=True, slots=True)
class GptqCodec:
    """Writes GPTQ. `checkpoint_format` None: `gptq` (v1, read by all) when symmetric; `gptq_v2` when not, as a v1
    file cannot hold a zero point of 0 and GPTQModel refuses asymmetric v1 files that others wrote.

    Without `act_order` groups are of consecutive rows. Their grids are fitted before any row is rounded; with
    `group_aware` each when its group is reached, groups being solved whole. The file looks the same.
    """

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False
    checkpoint_format: str | None = None
    group_aware: bool = False

    def __post_init__(self) -> None:
        if self.checkpoint_format is None:
            object.__setattr__(self, "checkpoint_format", "gptq" if self.sym else "gptq_v2")
        if self.bits not in gptq_config.WIDTHS:
            raise FormatError(f"GPTQ holds 2, 3, 4 or 8 bits, not {self.bits}", hint="use `--bits 4`")
        if self.group_size != -1 and self.group_size < 1:
            raise FormatError(f"group size {self.group_size} is neither -1 nor above 0", hint="use `--group-size 128`")
        if self.group_size >= 2**31:  # other readers keep it in 32 bits
            raise FormatError(f"group size {self.group_size} is larger than any weight", hint="use `--group-size -1`")
        if self.checkpoint_format not in gptq_config.CHECKPOINT_FORMATS:
            raise FormatError(
                f"expected checkpoint format `gptq` or `gptq_v2`, found `{self.checkpoint_format}`",
                hint="leave out `--checkpoint-format`: `gptq` where all is symmetric, else `gptq_v2`",
            )

    @property
    def name(self) -> str:
        return "gptq"

    @property
    def settings(self) -> GptqSettings:
        assert self.checkpoint_format is not None
        return GptqSettings(self.bits, self.group_size, self.sym, self.act_order, self.checkpoint_format)

    def refusal(self, in_features: int, out_features: int) -> str | None:
        return _refusal(in_features, out_features)

    @property
    def columns_alone(self) -> bool:
        return True

    def whole_groups(self, in_features: int) -> Tensor | None:
        if not self.group_aware or self.act_order or not 0 < self.group_size < in_features:
            return None
        return torch.arange(in_features) // self.group_size

    def layout(self, in_features: int) -> Layout:
        return Layout.uniform(in_features, self.bits, self.group_size)

    def stored_bits(self, in_features: int, out_features: int, bias: bool) -> int:
        """All bits on disk of a weight of this shape: codes, scales, zero points, group numbers, bias."""
        layout = self.layout(in_features)
        groups = len(layout.groups) * out_features * (16 + self.bits)
        return layout.code_bits(out_features) + groups + 32 * in_features + 16 * out_features * bias

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        """See `gptq_grid.fit`. Zero points stay above 0 where the file is v1, which cannot hold 0."""
        least_zero = 1 if self.checkpoint_format == "gptq" else 0
        return gptq_grid.fit(rows, bits, importance, sym=self.sym, least_zero=least_zero)

    def encode(self, codes: Codes, bias: Tensor | None) -> GptqTensor:
        """Rows go to the model's own order: row j of `codes` is feature `order[j]`, and `g_idx[order[j]]` its group."""
        bits = codes.layout.groups[0].bits
        in_features, out_features = codes.q.shape
        if refusal := _refusal(in_features, out_features):
            raise FormatError(refusal)
        rows = torch.tensor([group.rows for group in codes.layout.groups])
        g_idx = torch.empty(in_features, dtype=torch.int64)
        g_idx[codes.order] = torch.repeat_interleave(torch.arange(len(rows)), rows)
        grids = codes.grids
        if not self.act_order:
            g_idx, grids = _in_sequence(g_idx, grids, self.layout(in_features))
        q = torch.empty_like(codes.q)
        q[codes.order] = codes.q
        scales = torch.stack([grid.stored["scales"] for grid in grids])
        zeros = torch.stack([grid.stored["zeros"] for grid in grids])
        qweight = kernels.backend(q.device.type).pack(q, bits)
        weight = GptqWeight(qweight, scales, zeros, g_idx, bits)
        kept = {"qzeros": write_zeros(zeros, bits, self.settings), "scales": scales, "g_idx": g_idx.to(torch.int32)}
        return GptqTensor(weight, kept if bias is None else {**kept, "bias": bias.to(torch.float16)})

    def config(
        self,
        *,
        lm_head: bool = False,
        damping: float = 0.01,
        true_sequential: bool = True,
        quantized_names: Sequence[Sequence[str]] | None = None,
        dynamic: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The `quantization_config` of a checkpoint written with this codec; see `gptq_config.write`."""
        return gptq_config.write(
            self.settings,
            lm_head=lm_head,
            damping=damping,
            true_sequential=true_sequential,
            quantized_names=quantized_names,
            dynamic=dynamic,
        )


def _check_convention(name: str, zeros: Tensor, settings: GptqSettings) -> None:
    """Symmetric files have one known zero point: off by one everywhere means that the format is labelled wrongly."""
    middle = 1 << settings.bits - 1
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[settings.checkpoint_format]
    shifted = middle + 1 if settings.checkpoint_format == "gptq" else middle - 1
    if settings.sym and bool((zeros == shifted).all()):
        raise FormatError(
            f"`{name}.qzeros` gives zero point {shifted} throughout, where a symmetric file has {middle}: "
            f"its words follow `{other}`, but `checkpoint_format` says `{settings.checkpoint_format}`",
            hint=f'set `"checkpoint_format": "{other}"` in the `quantization_config` of config.json',
        )


def _group_of_rows(
    name: str, g_idx: Tensor | None, settings: GptqSettings, in_features: int, groups: int, device: torch.device
) -> Tensor:
    """int64 [in]. Absent or, as some writers leave it, all zeros: groups in sequence, which act-order never has.
    Negative: from the last group."""
    if g_idx is not None and (g_idx.shape != (in_features,) or g_idx.is_floating_point()):
        raise misfit(name, "g_idx", f"integers of shape [{in_features}]", g_idx, OTHER_SHAPE)
    if g_idx is None or not bool(g_idx.any()):
        if settings.act_order and groups > 1:
            raise FormatError(
                f"`{name}.g_idx` {'is absent' if g_idx is None else 'is all zeros'}, but `desc_act` is true: nothing"
                f" says which of {groups} groups a row belongs to",
                hint='download the checkpoint again; if its groups are in sequence ("static groups"), set'
                ' `"desc_act": false` in the `quantization_config` of config.json',
            )
        return torch.arange(in_features, device=device) // _rows_of_group(settings, in_features)
    group = g_idx.to(torch.int64)
    outside = group[(group < -groups) | (group >= groups)]
    if len(outside):
        raise FormatError(
            f"`{name}.g_idx` names group {int(outside[0])}, but there are {groups} groups",
            hint=f"correct `group_size` in config.json; else {gptq_config.REQUANTIZE}",
        )
    return torch.where(group < 0, group + groups, group)


def _in_sequence(g_idx: Tensor, grids: tuple[Grid, ...], layout: Layout) -> tuple[Tensor, tuple[Grid, ...]]:
    """Groups numbered by place, for files without act-order, whichever order the groups were solved in."""
    firsts = torch.tensor([start for _, start, _ in layout.spans()])
    solved = g_idx[firsts]
    in_sequence = torch.repeat_interleave(torch.arange(len(firsts)), torch.tensor([g.rows for g in layout.groups]))
    if len(grids) != len(firsts) or not torch.equal(solved[in_sequence], g_idx):
        raise FormatError("only an act-order file can hold groups of scattered rows", hint="use `--act-order`")
    return in_sequence, tuple(grids[int(group)] for group in solved)


def _refusal(in_features: int, out_features: int) -> str | None:
    for count, side in ((in_features, "input"), (out_features, "output")):
        if count % 32 or count == 0:
            return f"{count} {side} features are not a multiple of 32, as GPTQ's packed words need"
    return None


def _rows_of_group(settings: GptqSettings, in_features: int) -> int:
    return in_features if settings.group_size == -1 else min(settings.group_size, in_features)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
