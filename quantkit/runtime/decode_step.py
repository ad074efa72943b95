"""DecodeStep: one token of each row through the whole model by kernels, over the pages of a pool.

    step = DecodeStep(model, pool, weights, rows=4, pages=8)
    step.fill(ids, positions, slots, tables)     # host → the buffers that the launches read
    step.launch()                                # embedding … logits: hundreds of launches, no allocation, no waiting
    step.logits                                  # float32 [rows, vocab], the same memory each time

A row is one token of any sequence: its new token, or one of several that a guess adds, each seeing those before it. All
that changes between two steps is in the buffers, so that the launches can be captured once and replayed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.formats.dense import DenseTensor
from quantkit.formats.repacked import RepackedTensor
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.steps import PAGE
from quantkit.models.block import Block
from quantkit.models.feedforward import GatedMLP
from quantkit.models.linear import Linear
from quantkit.models.norm import Norm
from quantkit.models.rope import Rope
from quantkit.models.transformer import Model
from quantkit.runtime.page_pool import PagePool


class Weights:
    """What the steps of one model share: the backend in memory that is made once, and small tensors in the dtypes in
    which they are read."""

    def __init__(self, model: Model, backend: CudaBackend) -> None:
        self.backend, self.workspace = backend.within()
        self._biases: dict[str, Tensor] = {}
        for linear in (*model.linears.values(), model.head.linear):
            if linear.stored.bias is not None:
                self._biases[linear.name] = linear.stored.bias.to(model.device, model.dtype)
        self.frequencies = {rope: rope.frequencies(1).to(model.device) for rope in set(model.config.ropes)}

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        """`x [rows, in] · W + bias → [rows, out]`, in memory of the workspace."""
        stored, bias = linear.stored, self._biases.get(linear.name)
        if isinstance(stored, DenseTensor):
            y = self.workspace.empty((len(x), stored.out_features), x.dtype, x.device)
            weight = stored.weight.t()
            return torch.mm(x, weight, out=y) if bias is None else torch.addmm(bias, x, weight, out=y)
        assert isinstance(stored, RepackedTensor)
        y = stored.product(x, self.backend)
        return y if bias is None else y.add_(bias)


class Rotations:
    """Cosines and sines of the rows of a step, for each rope in use."""

    def __init__(self, weights: Weights, rows: int, device: torch.device) -> None:
        self._frequencies = weights.frequencies
        self._positions = torch.empty(rows, 1, device=device)
        shapes = {rope: (rows, len(pairs)) for rope, pairs in weights.frequencies.items()}
        self._tables = {rope: torch.empty(3, *shape, device=device) for rope, shape in shapes.items()}

    def launch(self, positions: Tensor) -> None:
        """As `models.rope.Rotary.at` has it, for int64 positions [rows]."""
        self._positions[:, 0].copy_(positions)
        for rope, (angles, cos, sin) in self._tables.items():
            torch.mul(self._positions, self._frequencies[rope], out=angles)
            for function, table in ((torch.cos, cos), (torch.sin, sin)):
                function(angles, out=table)
                if rope.table_factor != 1:
                    table.mul_(rope.table_factor)

    def of(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """float32 [rows, pairs] twice."""
        _, cos, sin = self._tables[rope]
        return cos, sin


class DecodeStep:
    """Steps of `rows` rows over at most `pages` pages each. `decode_path` says which models and pools it is for."""

    def __init__(self, model: Model, pool: PagePool, weights: Weights, rows: int, pages: int) -> None:
        self.rows, self.pages = rows, pages
        self._model, self._weights = model, weights
        self._steps = weights.backend.steps
        device, config = model.device, model.config
        self._paged = [pool.paged(layer) for layer in range(config.num_layers)]
        self._longs = torch.zeros(3, rows, dtype=torch.int64, device=device)
        self._ints = torch.zeros(rows * (1 + pages), dtype=torch.int32, device=device)
        self.ids, self._positions, self._slots = self._longs
        self._lengths, self._table = self._ints[:rows], self._ints[rows:].view(rows, pages)
        stored = model.embedding.weight.dtype
        self._embedded = torch.empty(rows, config.hidden_size, dtype=stored, device=device)
        self._rounded = torch.empty(rows, config.hidden_size, dtype=model.dtype, device=device)
        self._hidden = torch.empty(rows, config.hidden_size, device=device)
        self._scale = float(torch.tensor(model.embedding.scale, dtype=model.dtype))
        self._rotations = Rotations(weights, rows, device)
        self.logits = torch.empty(rows, config.vocab_size, device=device)

    def fill(
        self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> None:
        """Of at most `rows` rows; the last one fills those that are left, which then write what it writes.

        slots   `page · 256 + row` of each row's own position in the pool
        tables  the pages of each row's sequence, up to that of its own position
        """
        assert len(ids) <= self.rows
        spare = self.rows - len(ids)
        longs = [[*part, *[part[-1]] * spare] for part in (ids, positions, slots)]
        ints = [position + 1 for position in longs[1]]
        for pages in (*tables, *[tables[-1]] * spare):
            ints += [*pages, *[0] * (self.pages - len(pages))]
        self._longs.copy_(torch.tensor(longs))
        self._ints.copy_(torch.tensor(ints, dtype=torch.int32))

    def launch(self) -> None:
        """Everything from the buffers to `logits`. Calling it twice leaves the same behind."""
        model, weights = self._model, self._weights
        weights.workspace.enter("ends")
        self._rotations.launch(self._positions)
        torch.index_select(model.embedding.weight, 0, self.ids, out=self._embedded)
        self._hidden.copy_(self._rounded.copy_(self._embedded)).mul_(self._scale)
        update = None
        for layer, block in enumerate(model.blocks):
            weights.workspace.enter("layers")  # the first operation reads `update`, and writes into other memory
            update = self._block(layer, block, update)
        weights.workspace.enter("ends")
        head = model.head
        self.logits.copy_(weights.product(head.linear, self._norm(head.norm, update)))
        if head.cap is not None:
            self.logits.div_(head.cap).tanh_().mul_(head.cap)

    def launch_greedily(self) -> None:
        """`launch`, and the likeliest token of each row becomes its id: with nobody in between, for speed alone, as
        positions stay as they are."""
        self.launch()
        self.ids.copy_(self._steps.argmax(self.logits))

    def _norm(self, norm: Norm, update: Tensor | None) -> Tensor:
        return self._steps.rms_norm(self._hidden, update, norm.weight, norm.epsilon, self._model.dtype)

    def _block(self, layer: int, block: Block, update: Tensor | None) -> Tensor:
        """What joins the residual stream behind the layer, halves [rows, hidden]; what joins it before comes in."""
        attention, product, steps = block.attention, self._weights.product, self._steps
        assert isinstance(block.mlp, GatedMLP)
        x = self._norm(block.before_attention, update)
        q, k, v = (product(linear, x).view(self.rows, -1, attention.head_dim) for linear in attention.inputs.linears)
        if attention.norms:
            q, k = self._by_head(attention.norms["q"], q), self._by_head(attention.norms["k"], k)
        keys, values = self._paged[layer]
        q = steps.rope_append(q, k, v, *self._rotations.of(attention.rope), self._slots, keys, values)
        past = (keys, values, self._table, self._lengths)
        window, cap = attention.window or 0, attention.cap or 0.0
        mixed = steps.attend(q, *past, attention.scale, window=window, cap=cap)
        (output,) = attention.output.linears
        x = self._norm(block.before_mlp, product(output, mixed.view(self.rows, -1)))
        gate, up = (product(linear, x) for linear in block.mlp.inputs.linears)
        (down,) = block.mlp.output.linears
        return product(down, steps.silu_mul(gate, up))

    def _by_head(self, norm: Norm, heads: Tensor) -> Tensor:
        rows = heads.view(-1, heads.shape[-1])
        wide = self._weights.workspace.empty(rows.shape, torch.float32, heads.device).copy_(rows)
        return self._steps.rms_norm(wide, None, norm.weight, norm.epsilon, heads.dtype).view(heads.shape)


def slot(place: int, position: int) -> int:
    """Of a position whose page has this place in the pool."""
    return place * PAGE + position % PAGE
