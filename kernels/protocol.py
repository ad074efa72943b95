"""What every backend can do, each operation with its shapes and dtypes.

`quantkit.kernels.reference` is the definition of each operation; another backend may only be faster. Weights are
`[in, out]`. A weight comes in as it is packed on disk (`GptqWeight`, `Exl2Weight`), is repacked once for the reader,
and the repacked form serves every multiplication; `…_restore` gives the disk words back, bit for bit, so that only
one of the two forms has to stay in memory.

Packing, for 2, 3, 4, 5, 6 and 8 bits: the 32-bit words of one column are one little-endian bit stream, first word
first, and code k is its bits `[bits·k, bits·k + bits)`, least significant bit first. int32 words are bit containers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True, eq=False)
class GptqWeight:
    """`w[i, o] = (code[i, o] - zeros[group[i], o]) · scales[group[i], o]`, rounded once to float16.

    words   int32 [in·bits/32, out]: codes packed down the rows, rows in the model's own order
    scales  float16, bfloat16 or float32 [groups, out]
    zeros   uint8 [groups, out]: true zero points
    group   int64 [in]: the group of each row, `0 <= group < groups`, in any order
    bits    width of a code
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor
    group: Tensor
    bits: int


@dataclass(frozen=True, slots=True, eq=False)
class Exl2Weight:
    """`w[order[r], o] = (code[r, o] - 2^(bits-1)) · S[g, o]`, rounded once to float16, for stored row r of group g.

    `S[g, o] = fp16((c + 1)² · fp16(scale_max[g] / 256))`, where c is the 4-bit scale code of column o.

    words        int32 [packed rows, out]: the groups one after another, each packed down the rows
    scale_codes  int32 [groups, out/8]: eight 4-bit codes per word, lowest column in the lowest bits
    scale_max    float16 [groups]
    groups       (bits, rows) of each group; widths may differ
    order        int64 [in]: the input feature that each stored row holds
    """

    words: Tensor
    scale_codes: Tensor
    scale_max: Tensor
    groups: tuple[tuple[int, int], ...]
    order: Tensor


class Repacked(Protocol):
    """A weight in the layout that one backend reads fastest. Only the backend that made it can use it."""

    @property
    def size_bytes(self) -> int:
        """Memory of its tensors."""


class Backend(Protocol):
    """The arithmetic on bits. `reason` says in words why this backend was chosen."""

    name: str
    reason: str

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """uint8 [in, out] → int32 [in·bits/32, out]. Raises FormatError when the rows do not fill whole words or a
        code does not fit its width."""

    def unpack(self, words: Tensor, bits: int) -> Tensor:
        """int32 [rows, out] → uint8 [rows·32/bits, out], the inverse of `pack`."""

    def gptq_dequantize(self, weight: GptqWeight) -> Tensor:
        """float16 [in, out], computed in float32 and rounded once."""

    def gptq_repack(self, weight: GptqWeight) -> Repacked:
        """The form that `gptq_matmul` reads."""

    def gptq_restore(self, repacked: Repacked) -> GptqWeight:
        """The inverse of `gptq_repack`: the same words, scales, zeros and groups."""

    def gptq_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        """x [m, in] times the dequantized (float16) weight → [m, out] in the dtype of x, summed in float32.

        For bfloat16 x the weights may be rounded to bfloat16 as well.
        """

    def exl2_dequantize(self, weight: Exl2Weight) -> Tensor:
        """float16 [in, out], rows in the order of the model's input features."""

    def exl2_repack(self, weight: Exl2Weight) -> Repacked:
        """The form that `exl2_matmul` reads."""

    def exl2_restore(self, repacked: Repacked) -> Exl2Weight:
        """The inverse of `exl2_repack`: the same words, scale codes, maxima, groups and order."""

    def exl2_matmul(self, x: Tensor, repacked: Repacked) -> Tensor:
        """As `gptq_matmul`."""

    def attends_many(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `attend_many` is for tensors like these, and faster than torch's own kernel."""

    def attend_many(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0) -> Tensor:
        """Causal attention of the last s of t positions: q [heads, s, d], k and v [kv_heads, t, d] → [s, heads, d] in
        the dtype of q, scores and sums in float32. Head h reads key-value head h // (heads / kv_heads).

        scale   above 0
        window  positions a query sees, its own included; 0 for all before it

        What is no finite number in a query, or in what it sees, comes out of it as NaN; such a value may come out of
        queries just before it as well.
        """

    def rotates_heads(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Whether `rotate_heads` is for heads like these, and faster than torch's operations."""

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """Heads `[b, s, heads, d]` of many tokens rotated in float32 and rounded to `dtype`: pair i of a head is
        (element i, element i + pairs), and elements from 2·pairs on are left alone; cos and sin float32 [b or 1, s,
        pairs]. Every operation is rounded, so that all backends give the same bits. (Su et al. 2021, RoFormer, section
        3.4.2)"""

    def adds_gram(self, total: Tensor, rows: Tensor) -> bool:
        """Whether `add_gram` is for tensors like these, and faster than torch's products in float32."""

    def add_gram(self, total: Tensor, rows: Tensor, factors: Tensor) -> None:
        """Adds `Σ_t factors[t]² · rows[t, i] · rows[t, j]` to total[i, j] for i <= j, in float32; what is below the
        diagonal is left in any state. Rows times their factors may be rounded to the dtype of the rows.

        total float32 [n, n]; rows [m, n] of any float dtype, all finite; factors float32 [m].
        """

    def grid_error(self, rows: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, top: int) -> Tensor:
        """What each candidate grid would cost: `Σ_r importance[r] · (rows[r, o] - nearest(rows[r, o]))²`.

        rows float32 [g, out], importance float32 [g], scales float32 [n, out] (none 0, any sign), zeros int32 [n, out],
        codes 0 … top → float32 [n, out].
        """

    def solve_rows(
        self, weight: Tensor, target: Tensor, factor: Tensor, group: Tensor, scales: Tensor, zeros: Tensor, top: int
    ) -> tuple[Tensor, Tensor]:
        """Round b consecutive rows, each to its nearest code after the errors of the rows before it are fed forward.

        With unit lower triangular `factor` B (GPTQ in its LDL form; QuIP, arXiv 2307.13304, section 3), for each row j:

            t[j] = target[j] + Σ_{k<j} B[j, k] · e[k]        q[j] = nearest code of t[j]        e[j] = weight[j] - ŵ[j]

        weight  float32 [b, out]: the rows as they were before any error was fed into them
        target  float32 [b, out]: weight plus the feedback of all rows before this block; equal to weight for the first
        factor  float32 [b, b]: the block's square on the diagonal of B; only entries below the diagonal are read
        group   int64 [b]: the grid of each row
        scales  float32 [groups, out]; zeros int32 [groups, out]; codes 0 … top. A zero scale gives code = zero, ŵ = 0

        Returns codes uint8 [b, out] and errors e float32 [b, out], which the caller multiplies with the rows of B below
        this block: `target[next] = weight[next] + B[next, :done] · e[:done]`. Ties round to even.
        """
