"""NativeStep: one token of each row through the whole model on the CPU, in one call without Python in between.

    step = NativeStep(model, pool, rows=1, pages=8, threads=2)
    step.fill(ids, positions, slots, tables)
    step.launch()
    step.logits                                  # float32 [rows, vocab], the same memory each time

The same as `decode_step.DecodeStep`, as a `kernels.program.Program`: the operations of all layers, made once, with the
addresses of weights, pages and buffers. `decode_path` says which models and pools it is for.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quantkit.formats.dense import DenseTensor
from quantkit.formats.repacked import RepackedTensor
from quantkit.kernels import attention as attending
from quantkit.kernels import operations
from quantkit.kernels.integers import Rounded, padded
from quantkit.kernels.planes import Planes
from quantkit.kernels.program import Program
from quantkit.kernels.steps import PAGE
from quantkit.models.attention import Attention
from quantkit.models.feedforward import GatedMLP
from quantkit.models.linear import Linear
from quantkit.models.norm import Norm
from quantkit.models.rope import Rotary
from quantkit.models.transformer import Model
from quantkit.runtime.page_pool import PagePool


class NativeStep:
    """Steps of at most `rows` rows over at most `pages` pages each. `rows` becomes what is in memory for them."""

    def __init__(self, model: Model, pool: PagePool, rows: int, pages: int, threads: int) -> None:
        config = model.config
        self.rows, self.pages = padded(rows), pages
        self._model, self._pool = model, pool
        self._program = Program()
        self._ids = torch.zeros(self.rows, dtype=torch.int64)
        self._slots = torch.zeros(self.rows, dtype=torch.int64)
        self._lengths = torch.zeros(self.rows, dtype=torch.int32)
        self._table = torch.zeros(self.rows, pages, dtype=torch.int32)
        self._hidden = torch.empty(self.rows, config.hidden_size)
        self._update = torch.empty(self.rows, config.hidden_size)
        self._x = torch.empty(self.rows, config.hidden_size)
        self._rotations = {rope: torch.empty(2, self.rows, rope.dim // 2) for rope in set(config.ropes)}
        self._scores = torch.empty(threads, pages * PAGE + config.head_dim)
        self._rounded: dict[tuple[int, int], Rounded] = {}
        self.logits = torch.empty(self.rows, config.vocab_size)
        for layer, block in enumerate(model.blocks):
            assert isinstance(block.mlp, GatedMLP)
            self._add_norm(block.before_attention, joins=layer > 0)
            self._add_attention(block.attention)
            self._add_norm(block.before_mlp, joins=True)
            self._add_mlp(block.mlp)
        self._add_norm(model.head.norm, joins=True)
        self._add_products((model.head.linear,), self._x, self.logits)

    def fill(
        self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> None:
        """As `DecodeStep.fill` has it."""
        assert len(ids) <= self.rows
        spare = self.rows - len(ids)
        whole = [*positions, *[positions[-1]] * spare]
        self._ids.copy_(torch.tensor([*ids, *[ids[-1]] * spare]))
        self._slots.copy_(torch.tensor([*slots, *[slots[-1]] * spare]))
        self._lengths.copy_(torch.tensor(whole) + 1)
        for row, table in enumerate((*tables, *[tables[-1]] * spare)):
            self._table[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        rotary = Rotary.at(self._model.config.ropes, torch.tensor(whole)[None])
        for rope, tables_of in self._rotations.items():
            for mine, table_of in zip(tables_of, rotary.tables[rope], strict=True):
                mine.copy_(table_of[0])

    def launch(self) -> None:
        """Everything from the buffers to `logits`. Calling it twice leaves the same behind."""
        self._hidden.copy_(self._model.embedding(self._ids[None])[0])
        self._program.run(len(self._scores))
        cap = self._model.head.cap
        if cap is not None:
            self.logits.div_(cap).tanh_().mul_(cap)

    def _add_norm(self, norm: Norm, *, joins: bool) -> None:
        """`joins`: what the part before has made is added to the residual stream first."""
        epsilon = np.array([norm.epsilon], np.float32)
        update = self._update if joins else None
        operands = (self._hidden, update, norm.weight, epsilon, self._x, self.rows, self._hidden.shape[1])
        self._program.add(operations.rms_norm(), operands)

    def _add_attention(self, attention: Attention) -> None:
        dim, layer = attention.head_dim, attention.layer
        qkv = torch.empty(self.rows, sum(linear.out_features for linear in attention.inputs.linears))
        self._add_products(attention.inputs.linears, self._x, qkv)
        heads, kv_heads = (linear.out_features // dim for linear in attention.inputs.linears[:2])
        keys, values = self._pool.paged(layer)
        weights = [attention.norms[role].weight if attention.norms else None for role in "qk"]
        epsilon = np.array([attention.norms["q"].epsilon if attention.norms else 0], np.float32)
        cos, sin = self._rotations[attention.rope]
        pages = (*attending.place(keys), *attending.place(values))
        sizes = (self.rows, heads, kv_heads, dim)
        self._program.add(
            attending.rope_append(keys.bits, values.bits, bool(attention.norms), keys.block * values.block > 1),
            (qkv, cos, sin, *weights, epsilon, self._slots, *pages, *sizes, cos.shape[1]),
        )
        mixed = torch.empty(self.rows, heads * dim)
        scale = np.array([attention.scale], np.float32)
        reads = (self._table, self._lengths, self._scores, scale, attention.window or 0)
        self._program.add(
            attending.attend(keys.bits, values.bits, values.block > 1), (qkv, mixed, *pages, *reads, *sizes, self.pages)
        )
        self._add_products(attention.output.linears, mixed, self._update)

    def _add_mlp(self, mlp: GatedMLP) -> None:
        both = torch.empty(self.rows, sum(linear.out_features for linear in mlp.inputs.linears))
        self._add_products(mlp.inputs.linears, self._x, both)
        fed = torch.empty(self.rows, both.shape[1] // 2)
        self._program.add(operations.silu_mul(), (both, fed, self.rows, fed.shape[1]))
        self._add_products(mlp.output.linears, fed, self._update)

    def _add_products(self, linears: Sequence[Linear], x: Tensor, y: Tensor) -> None:
        """The outputs of all of them side by side."""
        forms = [_form(linear) for linear in linears]
        inputs: list[tuple[Tensor | None, Rounded]] = []
        for form in forms:
            if isinstance(form, Planes) and not any(_same(form.order, order) for order, _ in inputs):
                rounded = self._memory(form.in_features, len(inputs))
                rounded.add_rounding(self._program, x, form.order, waits=False)
                inputs.append((form.order, rounded))
        if inputs:
            self._program.wait()
        column = 0
        for linear, form in zip(linears, forms, strict=True):
            bias = None if linear.stored.bias is None else linear.stored.bias.to(torch.float32)
            if isinstance(form, Planes):
                rounded = next(own for order, own in inputs if _same(form.order, order))
                rounded.add_product(self._program, form, y, column, bias)
            else:
                sizes = (column, self.rows, x.shape[1], linear.in_features, linear.out_features, y.shape[1])
                self._program.add(operations.dense_product(), (x, form, bias, y, *sizes), waits=False)
            column += linear.out_features
        assert column == y.shape[1]
        self._program.wait()

    def _memory(self, width: int, number: int) -> Rounded:
        """One for each width and order in use at a time; those before it are done with."""
        if (width, number) not in self._rounded:
            self._rounded[width, number] = Rounded(self.rows, width)
        return self._rounded[width, number]


def _form(linear: Linear) -> Planes | Tensor:
    """Bit planes, or a dense weight [out, in] in bfloat16."""
    stored = linear.stored
    if isinstance(stored, RepackedTensor):
        assert isinstance(stored.repacked, Planes)
        return stored.repacked
    assert isinstance(stored, DenseTensor) and stored.weight.dtype == torch.bfloat16
    return stored.weight.contiguous()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))

