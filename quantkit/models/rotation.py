"""Rotation: the same model with its residual stream and its values turned, so that no weight stands out from the rest.

For x the residual stream and R orthogonal, x R has the norm of x. So once the weight of each norm is in the linears
that read it, every reader W `[out, in]` may become W R and every writer Rᵀ W, and the outputs stay (SliceGPT, arXiv
2401.15024, section 3.1; QuaRot, arXiv 2404.00456, stage 1a). Values are mixed linearly by attention: each head of v
and what o reads of it are turned by a matrix of their own (QuaRot, stage 1b).

A turned weight is a sum over many weights with random signs: outliers are spread out, and groups fit their grids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UnsupportedModel
from quantkit.models.architecture import FINAL_NORM, HEAD, Architecture, LinearSpec, block_of
from quantkit.models.catalog import FAMILIES
from quantkit.models.config import ModelConfig

LARGEST_HADAMARD = 64
PIECE_VALUES = 1 << 22
"""Turned at a time, in float64."""
WRITERS = {"o", "down"}
BEFORE_ATTENTION = {"q", "k", "v"}


@dataclass(frozen=True, slots=True, eq=False)
class Orthogonal:
    """An orthogonal matrix `[n, n]` as diag(signs) · (F₁ ⊗ F₂ ⊗ …), float64.

    Factors are Hadamard matrices for the part of n that is a power of two, and one orthogonal matrix for what is odd.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    @classmethod
    def drawn(cls, size: int, generator: torch.Generator) -> "Orthogonal":
        signs = 2.0 * torch.randint(0, 2, (size,), generator=generator).to(torch.float64) - 1
        odd, factors = size, []
        while odd % 2 == 0:
            width = min(LARGEST_HADAMARD, odd & -odd)
            factors.append(hadamard(width))
            odd //= width
        if odd > 1:
            factors.append(_orthogonal(odd, generator))
        return cls(signs, tuple(factors))

    def turn(self, x: Tensor) -> Tensor:
        """`[..., n]` float64 → x times the matrix."""
        turned, right = x * self.signs, x.shape[-1]
        for factor in self.factors:
            right //= len(factor)
            turned = factor.T @ turned.reshape(-1, len(factor), right)
        return turned.reshape(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What becomes of each tensor of one model. Everything is computed in float64 and rounded once, to the dtype that
    the tensor had."""

    residual: Orthogonal
    values: Orthogonal
    head_dim: int
    norm_offset: float

    @classmethod
    def drawn(cls, config: ModelConfig, architecture: Architecture, seed: int) -> "Rotation":
        """The same seed gives the same rotation. Raises UnsupportedModel for a family whose norms cannot be folded."""
        if architecture.post_norms:
            family = next(name for name, known in FAMILIES.items() if known is architecture)
            raise UnsupportedModel(
                f"`{family}` cannot be rotated: its norms behind attention and MLP scale each channel of the residual "
                "stream on its own",
                hint="leave out `--rotate`",
            )
        generator = torch.Generator().manual_seed(seed)
        residual = Orthogonal.drawn(config.hidden_size, generator)
        values = Orthogonal.drawn(config.head_dim, generator)
        return cls(residual, values, config.head_dim, architecture.norm_offset)

    def embedding(self, weight: Tensor) -> Tensor:
        """`[vocab, hidden]` → the same."""
        return self._turned(weight, None, by_head=False)

    def norm(self, weight: Tensor) -> Tensor:
        """A norm over the residual stream once its weight is folded away."""
        return torch.full_like(weight, 1.0 - self.norm_offset)

    def linear(self, spec: LinearSpec, weight: Tensor, norm: Tensor | None) -> Tensor:
        """`[out, in]` → the same. `norm` is the weight of the norm that it reads, by `norm_before`."""
        if WRITERS.issuperset(spec.roles):
            return self._turned(weight.T, None, by_head="o" in spec.roles).T.contiguous()
        if norm is not None:
            norm = norm.to(torch.float64) + self.norm_offset
        parts = zip(spec.roles, weight.split(spec.widths), strict=True)
        return torch.cat([self._turned(part, norm, by_head=role == "v") for role, part in parts])

    def bias(self, spec: LinearSpec, bias: Tensor) -> Tensor:
        """`[out]` → the same."""
        if WRITERS.issuperset(spec.roles):
            return self.residual.turn(bias.to(torch.float64)).to(bias.dtype)
        parts = zip(spec.roles, bias.split(spec.widths), strict=True)
        return torch.cat([self._values_of_bias(part) if role == "v" else part for role, part in parts])

    def _values_of_bias(self, bias: Tensor) -> Tensor:
        return self.values.turn(bias.to(torch.float64).view(-1, self.head_dim)).flatten().to(bias.dtype)

    def _turned(self, rows: Tensor, norm: Tensor | None, *, by_head: bool) -> Tensor:
        """`[rows, hidden]`: along the residual stream, and `by_head` along the rows of each head too."""
        turned = torch.empty(rows.shape, dtype=rows.dtype)
        step = self.head_dim * max(1, PIECE_VALUES // (self.head_dim * rows.shape[1]))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step].to(torch.float64)
            piece = self.residual.turn(piece if norm is None else piece * norm)
            if by_head:
                heads = piece.view(-1, self.head_dim, piece.shape[1]).transpose(1, 2)
                piece = self.values.turn(heads).transpose(1, 2).reshape(piece.shape)
            turned[start : start + step] = piece.to(rows.dtype)
        return turned


def norm_before(spec: LinearSpec) -> str | None:
    """The name of the norm whose outputs a linear reads; None where it reads something else."""
    if WRITERS.issuperset(spec.roles):
        return None
    if spec.name == HEAD:
        return FINAL_NORM
    name = "input_layernorm" if BEFORE_ATTENTION.issuperset(spec.roles) else "post_attention_layernorm"
    return f"model.layers.{block_of(spec.name)}.{name}"


def hadamard(size: int) -> Tensor:
    """Sylvester's, of norm one: rows of ±1/√size, for a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, pair)
    return matrix / size**0.5


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Uniform over all orthogonal matrices (Mezzadri 2007, section 5)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return q * torch.sign(torch.diagonal(r))
