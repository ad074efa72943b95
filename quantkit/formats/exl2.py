"""EXL2: mixed bit widths in one weight, the important rows first and widest.

    q_weight     int32 [packed rows, out]  codes, packed down the rows of each group; rows in stored order
    q_scale      int32 [groups, out/8]     eight 4-bit scale codes per word
    q_scale_max  float16 [groups]          the multiplier of each group
    q_groups     int16 [2·groups]          (bits, first packed row) of each group, unsigned
    q_invperm    int32 [in]                the stored row of each input feature

`out` is padded to a multiple of 32 on disk. `docs/formats/exl2.md` has the bytes. Which layouts are legal stands in
`exl2_layout`, how a group's scales are chosen in `exl2_grid`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from quantkit import kernels
from quantkit.errors import FormatError
from quantkit.formats import exl2_grid, exl2_layout, slices
from quantkit.formats.codec import Codes, Grid, Group, Layout, StoredTensor
from quantkit.formats.exl2_layout import MOST_IN_FEATURES, Width
from quantkit.formats.joined import JoinedTensor
from quantkit.formats.repacked import RepackedTensor
from quantkit.formats.words import misfit
from quantkit.kernels.protocol import WIDTHS, Backend, Exl2Weight, Repacked
from quantkit.kernels.reference import exl2_scales

__all__ = ["Exl2Codec", "Exl2Tensor", "Width", "decode", "encode", "recognise"]

DTYPES = {
    "q_weight": torch.int32,
    "q_scale": torch.int32,
    "q_scale_max": torch.float16,
    "q_groups": torch.int16,
    "q_invperm": torch.int32,
}
DAMAGED = "the file is damaged or of another format: download the checkpoint again"


MARK = "q_weight"
"""The tensor that a linear in this form always has."""


def recognise(suffixes: Collection[str]) -> bool:
    """Whether these tensor names of one linear are EXL2's."""
    return MARK in suffixes


def decode(name: str, tensors: Mapping[str, Tensor], out_features: int | None = None) -> "Exl2Tensor":
    """One linear from its tensors by suffix. `out_features` is the true width where it is not a multiple of 32.

    `q_perm` of old files is ignored: it follows from `q_invperm`. Raises FormatError, naming the tensor, for anything
    that does not fit: widths that do not descend, starts that do not match, an order that is no permutation.
    """
    for suffix, dtype in DTYPES.items():
        if suffix not in tensors:
            raise FormatError(f"`{name}` has no tensor `{name}.{suffix}`", hint=DAMAGED)
        if tensors[suffix].dtype != dtype:
            raise misfit(name, suffix, str(dtype).removeprefix("torch."), tensors[suffix], DAMAGED)
    q_weight, q_scale, q_scale_max = tensors["q_weight"], tensors["q_scale"], tensors["q_scale_max"]
    if q_weight.dim() != 2 or q_weight.shape[1] % 32:
        raise misfit(name, "q_weight", "a matrix of a multiple of 32 columns", q_weight, DAMAGED)
    packed_rows, padded = q_weight.shape
    layout = read_layout(name, tensors["q_groups"], packed_rows)
    count = len(layout.groups)
    if q_scale.shape != (count, padded // 8):
        raise misfit(name, "q_scale", f"shape [{count}, {padded // 8}]", q_scale, DAMAGED)
    if q_scale_max.shape != (count,) or not bool(torch.isfinite(q_scale_max).all()):
        raise misfit(name, "q_scale_max", f"{count} finite numbers", q_scale_max, DAMAGED)
    order = _order(name, tensors["q_invperm"], layout.rows)
    true = padded if out_features is None else out_features
    if not padded - 32 < true <= padded:
        raise FormatError(f"`{name}.q_weight`: expected {true} columns, padded to 32, found {padded}", hint=DAMAGED)
    bias = tensors.get("bias")
    if bias is not None and bias.shape not in ((padded,), (true,)):
        raise misfit(name, "bias", f"shape [{padded}]", bias, DAMAGED)
    weight = Exl2Weight(q_weight, q_scale, q_scale_max, tuple((g.bits, g.rows) for g in layout.groups), order)
    kept = {suffix: tensors[suffix] for suffix in (*DTYPES, "bias") if suffix in tensors and suffix != "q_weight"}
    return Exl2Tensor(weight, kept, true)


def encode(codes: Codes, bias: Tensor | None = None) -> "Exl2Tensor":
    """The on-disk form of a solved weight; outputs are padded with codes that are exactly zero, a bias with zeros.

    Each grid's `stored` has `q_scale` (uint8 [out], codes 0 … 15) and `q_scale_max` (float16, one number). Raises
    FormatError for a layout that EXL2's readers cannot read, and for a bias beyond float16.
    """
    reason = exl2_layout.refusal(codes.layout)
    if reason is not None:
        raise FormatError(reason)
    out_features = codes.q.shape[1]
    missing = -out_features % 32
    backend = kernels.backend(codes.q.device.type)
    words: list[Tensor] = []
    pairs: list[tuple[int, int]] = []
    scale_codes: list[Tensor] = []
    for (group, start, end), grid in zip(codes.layout.spans(), codes.grids, strict=True):
        q = torch.nn.functional.pad(codes.q[start:end], (0, missing), value=1 << group.bits - 1)
        pairs.append((group.bits, sum(run.shape[0] for run in words)))
        words.append(backend.pack(q, group.bits))
        scale_codes.append(torch.nn.functional.pad(grid.stored["q_scale"], (0, missing)))
    tensors = {
        "q_weight": torch.cat(words),
        "q_scale": backend.pack(torch.stack(scale_codes).t().contiguous(), 4).t().contiguous(),
        "q_scale_max": torch.stack([grid.stored["q_scale_max"] for grid in codes.grids]).to(torch.float16),
        "q_groups": torch.tensor(pairs, dtype=torch.int32).flatten().to(torch.int16),
        "q_invperm": codes.order.argsort().to(torch.int32),
    }
    if bias is not None:
        tensors["bias"] = torch.nn.functional.pad(bias.to(torch.float16), (0, missing))
        if not bool(torch.isfinite(tensors["bias"]).all()):
            raise FormatError(f"a bias of {float(bias.abs().max()):.3g} does not fit float16, as EXL2 stores it")
    return decode("the encoded weight", tensors, out_features)


class Exl2Tensor(RepackedTensor[Exl2Weight]):
    """One linear in EXL2 form."""

    def __init__(self, weight: Exl2Weight, kept: Mapping[str, Tensor], out_features: int) -> None:
        """`kept`: what is on disk besides q_weight, by suffix. `out_features`: the true width, without padding."""
        super().__init__(weight, weight.words.device)
        self.in_features, self.out_features = weight.order.numel(), out_features
        self.bias = kept["bias"][:out_features] if "bias" in kept else None
        self._kept = dict(kept)
        self._code_bits = weight.words.numel() * 32

    def tensors(self) -> dict[str, Tensor]:
        return {"q_weight": self._stored().words, **self._kept}

    def dequantize(self) -> Tensor:
        return kernels.backend(self._device).exl2_dequantize(self._stored())[:, : self.out_features]

    def _multiply(self, backend: Backend, repacked: Repacked, x: Tensor) -> Tensor:
        return backend.exl2_matmul(x, repacked)[:, : self.out_features]

    def to(self, device: str | torch.device) -> "Exl2Tensor":
        if self._is_on(device):
            return self
        weight = self._stored()
        words, scale_codes, scale_max, order = (
            part.to(device) for part in (weight.words, weight.scale_codes, weight.scale_max, weight.order)
        )
        kept = {suffix: tensor.to(device) for suffix, tensor in self._kept.items()}
        moved = Exl2Weight(words, scale_codes, scale_max, weight.groups, order)
        return Exl2Tensor(moved, kept, self.out_features)

    def codes(self) -> Codes:
        """The integer codes and grids, rows in stored order, padding removed: what `encode` takes."""
        weight, width = self._stored(), self.out_features
        backend = kernels.backend(self._device)
        scales = exl2_scales(weight.scale_codes, weight.scale_max)
        scale_codes = backend.unpack(weight.scale_codes.t().contiguous(), 4).t()
        q, grids, word = [], [], 0
        for g, (bits, rows) in enumerate(weight.groups):
            words = rows * bits // 32
            q.append(backend.unpack(weight.words[word : word + words], bits)[:, :width])
            stored = {"q_scale": scale_codes[g, :width], "q_scale_max": weight.scale_max[g]}
            middle = torch.full((width,), 1 << bits - 1, dtype=torch.int32)
            grids.append(Grid(scales[g, :width].to(torch.float32), middle, (1 << bits) - 1, stored))
            word += words
        layout = Layout(tuple(Group(bits, rows) for bits, rows in weight.groups))
        return Codes(torch.cat(q), tuple(grids), layout, weight.order)

    def outputs(self, columns: Tensor) -> "Exl2Tensor":
        return Exl2Tensor(*slices.exl2_outputs(self._stored(), self._kept, columns), len(columns))

    def inputs(self, rows: Tensor) -> "Exl2Tensor":
        return Exl2Tensor(*slices.exl2_inputs(self._stored(), rows), self.out_features)

    def divides(self, rows: Tensor) -> bool:
        return slices.exl2_divides(self._stored(), rows)

    @property
    def runs(self) -> tuple[Tensor, ...] | None:
        return slices.exl2_runs(self._stored())

    @property
    def stored_bits(self) -> int:
        return self._code_bits + sum(tensor.nbytes * 8 for tensor in self._kept.values())

    def _pack(self, backend: Backend, weight: Exl2Weight) -> Repacked:
        return backend.exl2_repack(weight)

    def _restore(self, backend: Backend, repacked: Repacked) -> Exl2Weight:
        return backend.exl2_restore(repacked)


@dataclass(frozen=True, slots=True)
class Exl2Codec:
    """Writes EXL2. `mix` is the layout of one weight, or shares of the rows of any weight, widest first.

    Rows are stored in the order in which they are solved, the most important first, so that it always acts in order.
    `parts` are names and widths of the parts of a fused weight: readers of EXL2 know them by themselves only.
    """

    mix: Layout | tuple[Width, ...]
    parts: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.mix, Layout):
            exl2_layout.check(self.mix)
        elif reason := exl2_layout.refusal(self.mix):
            raise FormatError(reason)

    @property
    def name(self) -> str:
        return "exl2"

    @property
    def act_order(self) -> bool:
        return True

    @property
    def columns_alone(self) -> bool:
        return False  # a group has one multiplier for all of them

    def whole_groups(self, in_features: int) -> Tensor | None:
        return None

    def refusal(self, in_features: int, out_features: int) -> str | None:
        if not isinstance(self.mix, Layout):
            return exl2_layout.shape_refusal(in_features, self.mix[-1].bits)
        rows = self.mix.rows
        return None if rows == in_features else f"the layout is for {rows} input features, not for {in_features}"

    def layout(self, in_features: int) -> Layout:
        reason = self.refusal(in_features, 1)
        if reason is not None:
            raise FormatError(reason)
        return self.mix if isinstance(self.mix, Layout) else exl2_layout.mixed(in_features, self.mix)

    def stored_bits(self, in_features: int, out_features: int, bias: bool) -> int:
        """All bits on disk of a weight of this shape; see `exl2_layout.stored_bits`."""
        widths = [width for _, width in self.parts] or [out_features]
        return exl2_layout.stored_bits_in_parts(self.layout(in_features), widths, bias)

    def fit(self, rows: Tensor, bits: int, importance: Tensor | None) -> Grid:
        """See `exl2_grid.fit`."""
        return exl2_grid.fit(rows, bits, importance)

    def encode(self, codes: Codes, bias: Tensor | None) -> StoredTensor:
        """See the function of this name; the parts of a fused weight one by one."""
        if not self.parts:
            return encode(codes, bias)
        ends = list(accumulate(width for _, width in self.parts))
        found: dict[str, StoredTensor] = {}
        for (name, width), end in zip(self.parts, ends, strict=True):
            own = slice(end - width, end)
            grids = tuple(_columns(grid, own) for grid in codes.grids)
            part = Codes(codes.q[:, own].contiguous(), grids, codes.layout, codes.order)
            found[name] = encode(part, None if bias is None else bias[own])
        return JoinedTensor(found)


def _columns(grid: Grid, columns: slice) -> Grid:
    stored = {"q_scale": grid.stored["q_scale"][columns], "q_scale_max": grid.stored["q_scale_max"]}
    return Grid(grid.scale[columns], grid.zero[columns], grid.top, stored)


def read_layout(name: str, q_groups: Tensor, packed_rows: int) -> Layout:
    """The groups, from pairs of width and first packed row; a group ends where the next one starts. Raises FormatError
    for what EXL2 cannot hold."""
    if q_groups.dim() != 1 or q_groups.numel() % 2 or not q_groups.numel():
        raise misfit(name, "q_groups", "pairs of width and first packed row", q_groups, DAMAGED)
    pairs = (q_groups.to(torch.int32) & 0xFFFF).view(-1, 2).tolist()
    ends = [start for _, start in pairs[1:]] + [packed_rows]
    groups: list[Group] = []
    for g, ((bits, start), end) in enumerate(zip(pairs, ends, strict=True)):
        where = f"group {g} of `{name}.q_groups`"
        if bits not in WIDTHS:
            raise FormatError(f"{where}: expected 2, 3, 4, 5, 6 or 8 bits, found {bits}", hint=DAMAGED)
        if groups and bits > groups[-1].bits:
            raise FormatError(f"{where}: widths must descend, found {bits} after {groups[-1].bits} bits", hint=DAMAGED)
        if end <= start or (g == 0 and start != 0):
            raise FormatError(f"{where}: starts do not match, found packed rows {start} to {end}", hint=DAMAGED)
        rows, rest = divmod((end - start) * 32, bits)
        short_tail = bits == 2 and rows % 32 == 16 and end == packed_rows
        if rest or (rows % 32 and not short_tail):
            raise FormatError(
                f"{where}: {end - start} packed rows at {bits} bits are no multiple of 32 rows", hint=DAMAGED
            )
        groups.append(Group(bits, rows))
    return Layout(tuple(groups))


def _order(name: str, q_invperm: Tensor, rows: int) -> Tensor:
    """int64 [in]: the input feature of each stored row."""
    if q_invperm.shape != (rows,):
        raise misfit(name, "q_invperm", f"{rows} numbers, one for each row of `q_groups`", q_invperm, DAMAGED)
    if rows > MOST_IN_FEATURES:
        raise FormatError(f"`{name}.q_invperm`: {rows} inputs are more than the {MOST_IN_FEATURES} that EXL2 can order")
    order = q_invperm.argsort()
    if not torch.equal(q_invperm[order].to(torch.int64), torch.arange(rows, device=order.device)):
        raise FormatError(f"`{name}.q_invperm` is no permutation of 0 … {rows - 1}", hint=DAMAGED)
    return order
