"""ShareSource: the weights of a checkpoint as one of several processes holds them, for `models` to load as any others.

    q, k, v, gate, up   columns: the heads and inputs of the MLP that the process has; fused linears part by part
    o, down             rows, added up by all; where these would break groups of a scattered order (`o` of act-order
                        and EXL2 models), columns, with the inputs of all
    head, embedding     words
    norms, routers      whole

Of a plain weight only the bytes of the slice are read; a packed one is read whole, cut, and forgotten.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.models.architecture import EMBEDDING, FINAL_NORM, HEAD, Architecture, LinearSpec, by_stage
from quantkit.models.feedforward import Mixture
from quantkit.models.linear import Linear
from quantkit.models.norm import Norm
from quantkit.models.source import Device, Source, wrong_shape
from quantkit.models.transformer import Head, Model, has_head_of_its_own, load_block
from quantkit.runtime.parallel import ParallelPlan
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.shares import GatheredTensor, SplitEmbedding, SummedTensor


class ShareSource:
    """A `models.source.Source`. Linears are to be asked for in the order in which a model reads them."""

    def __init__(
        self, source: Source, architecture: Architecture, plan: ParallelPlan, ranks: Ranks, dtype: torch.dtype
    ) -> None:
        """`dtype`: of the multiplications, which dense weights take at once."""
        self._source, self._plan, self._ranks, self._dtype = source, plan, ranks, dtype
        self._as_on_disk = source if type(source) is Checkpoint else None  # others change what they read
        self._tied = plan.config.tie_embeddings and not has_head_of_its_own(source)
        self._inputs: dict[str, tuple[LinearSpec, LinearSpec]] = {}
        self._outputs: dict[str, LinearSpec] = {}
        self._ready: dict[str, StoredTensor] = {}
        for layer in range(plan.config.num_layers):
            stages = by_stage(architecture.block_linears(plan.config, layer))
            for readers, (output,) in zip(stages[::2], stages[1::2], strict=True):
                self._inputs |= {spec.name: (spec, output) for spec in readers}
                self._outputs[output.name] = output
        self._features: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str) -> Tensor:
        """Whole: what is no linear."""
        return self._source.tensor(name)

    def linear(self, name: str) -> StoredTensor:
        """The share of a linear, and whole what has none. Raises as a Checkpoint does, CheckpointError for another
        shape than the config has."""
        if name in self._inputs:
            spec, output = self._inputs[name]
            return self._columns(spec, self._chosen(spec, output))
        if name in self._outputs:
            spec = self._outputs[name]
            if spec.roles == ("down",):
                return self._ready.pop(name)
            return self._rows(spec, None, self._spans_of_heads())
        return self._head() if name == HEAD else self._source.linear(name)

    def embedding(self, head: StoredTensor, scale: float, device: Device) -> SplitEmbedding:
        """The words of this process; in a tied model those of its `head`, in the same memory."""
        config = self._plan.config
        words = self._plan.spans(config.vocab_size)[self._ranks.rank]
        if self._tied:
            assert isinstance(head, GatheredTensor)
            weight = head.part.tensors()["weight"]
        else:
            weight = self._matrix(EMBEDDING, words, range(config.hidden_size))
        return SplitEmbedding(weight.to(device), scale, self._dtype, words.start, config.vocab_size, self._ranks)

    def _chosen(self, spec: LinearSpec, output: LinearSpec) -> list[Tensor]:
        """Of each role of a linear the columns that this process has."""
        plan, rank, width = self._plan, self._ranks.rank, self._plan.config.head_dim
        heads = {"q": plan.heads(rank), "k": plan.kv_heads(rank), "v": plan.kv_heads(rank)}
        columns, first = [], 0
        for role, count in zip(spec.roles, spec.widths, strict=True):
            if role in heads:
                own = torch.arange(heads[role].start * width, heads[role].stop * width)
            else:
                own = self._inputs_of(output)
            columns.append(first + own)
            first += count
        return columns

    def _inputs_of(self, down: LinearSpec) -> Tensor:
        """The inputs of an MLP's `down` that this process has; that linear is read here, and kept for its turn."""
        if down.name not in self._ready:
            spans = self._plan.spans(down.in_features)
            if self._is_plain(down.name):
                parts = self._plan.inputs(down.in_features, None)
                self._ready[down.name] = self._rows(down, None, spans)
            else:
                stored = self._read(down)
                parts = self._plan.inputs(down.in_features, stored.runs)
                self._ready[down.name] = self._rows(down, stored, spans, parts)
            self._features = {down.name: parts[self._ranks.rank]}
        return self._features[down.name]

    def _spans_of_heads(self) -> list[range]:
        heads, width = [self._plan.heads(rank) for rank in range(self._plan.size)], self._plan.config.head_dim
        return [range(own.start * width, own.stop * width) for own in heads]

    def _rows(
        self,
        spec: LinearSpec,
        stored: StoredTensor | None,
        spans: Sequence[range],
        parts: Sequence[Tensor] | None = None,
    ) -> StoredTensor:
        """A linear whose inputs are shared out: `parts` of them, or `spans` where no other order is wanted. All
        processes come to the same form."""
        rank = self._ranks.rank
        if stored is None and self._is_plain(spec.name):
            weight = self._matrix(spec.name, range(spec.out_features), spans[rank])
            return SummedTensor(DenseTensor(weight.to(self._dtype)), self._bias(spec.name), self._ranks)
        stored = self._read(spec) if stored is None else stored
        parts = [torch.arange(span.start, span.stop) for span in spans] if parts is None else parts
        if all(stored.divides(part) for part in parts):
            return SummedTensor(self._in_dtype(stored.inputs(parts[rank])), stored.bias, self._ranks)
        outputs = self._plan.spans(spec.out_features)
        own = self._in_dtype(stored.outputs(torch.arange(outputs[rank].start, outputs[rank].stop)))
        return GatheredTensor(own, self._ranks, _lengths(outputs), _lengths(spans))

    def _columns(self, spec: LinearSpec, chosen: Sequence[Tensor]) -> StoredTensor:
        if not self._is_plain(spec.name) or not all(_is_span(part) for part in chosen):
            return self._in_dtype(self._read(spec).outputs(torch.cat(list(chosen))))
        spans = [range(int(part[0]), int(part[-1]) + 1) for part in chosen]
        weight = torch.cat([self._matrix(spec.name, span, range(spec.in_features)) for span in spans])
        bias = self._bias(spec.name)
        return DenseTensor(weight.to(self._dtype), None if bias is None else bias[torch.cat(list(chosen))])

    def _head(self) -> StoredTensor:
        config = self._plan.config
        words = self._plan.spans(config.vocab_size)
        own = words[self._ranks.rank]
        if self._tied:
            weight = self._matrix(EMBEDDING, own, range(config.hidden_size))
            part: StoredTensor = DenseTensor(weight.to(self._dtype))
        else:
            spec = LinearSpec(HEAD, config.hidden_size, (config.vocab_size,), ("head",), HEAD)
            part = self._columns(spec, [torch.arange(own.start, own.stop)])
        return GatheredTensor(part, self._ranks, _lengths(words))

    def _read(self, spec: LinearSpec) -> StoredTensor:
        stored = self._source.linear(spec.name)
        found = (stored.out_features, stored.in_features)
        if found != (spec.out_features, spec.in_features):
            raise wrong_shape(f"{spec.name}.weight", (spec.out_features, spec.in_features), found)
        return stored

    def _in_dtype(self, stored: StoredTensor) -> StoredTensor:
        if isinstance(stored, DenseTensor):
            return DenseTensor(stored.weight.to(self._dtype), stored.bias)
        return stored

    def _is_plain(self, name: str) -> bool:
        """Whether slices of a weight can be read by themselves."""
        return self._as_on_disk is not None and self._source.has(f"{name}.weight")

    def _matrix(self, name: str, rows: range, columns: range) -> Tensor:
        if self._as_on_disk is not None:
            return self._as_on_disk.part(f"{name}.weight", rows, columns)
        return self._source.tensor(f"{name}.weight")[rows.start : rows.stop, columns.start : columns.stop]

    def _bias(self, name: str) -> Tensor | None:
        return self._source.tensor(f"{name}.bias") if self._source.has(f"{name}.bias") else None


def load_share(
    source: Source,
    architecture: Architecture,
    plan: ParallelPlan,
    ranks: Ranks,
    dtype: torch.dtype,
    device: Device = "cpu",
) -> Model:
    """The part of a model that one process holds, which computes the whole together with the others. Its config is
    that of the part, so that caches are made for its heads. Raises as `Model.load` does."""
    config = plan.share(ranks.rank)
    own = ShareSource(source, architecture, plan, ranks, dtype)
    norm = Norm.read(own, FINAL_NORM, config.hidden_size, architecture.norm_offset, config.norm_eps, device)
    head = Head(norm, Linear(HEAD, own.linear(HEAD), dtype, device), config.logit_cap)
    head.linear.settle()
    embedding = own.embedding(head.linear.stored, config.embedding_scale, device)
    blocks = []
    for index in range(config.num_layers):
        blocks.append(load_block(own, config, architecture, index, dtype, device))
        for linear in blocks[-1].linears.values():
            linear.settle()
    return Model(config, architecture, dtype, torch.device(device), embedding, tuple(blocks), head)


def weight_bytes(model: Model) -> int:
    """Bytes of the weights that a model holds, as they are stored: of a part, those in its process."""
    stored = [linear.stored for linear in (*model.linears.values(), model.head.linear)]
    plain = [model.embedding.weight, model.head.norm.weight]
    for block in model.blocks:
        norms = [block.before_attention, block.after_attention, block.before_mlp, block.after_mlp]
        plain += [norm.weight for norm in (*norms, *block.attention.norms.values()) if norm is not None]
        if isinstance(block.mlp, Mixture):
            stored += [gate.stored for gate in (block.mlp.router, block.mlp.shared_gate) if gate is not None]
    head = {tensor.data_ptr() for tensor in model.head.linear.stored.tensors().values()}
    plain = [tensor for tensor in plain if tensor.data_ptr() not in head]
    return sum(weight.stored_bits for weight in stored) // 8 + sum(tensor.nbytes for tensor in plain)


def _lengths(spans: Sequence[range]) -> list[int]:
    return [len(span) for span in spans]


def _is_span(numbers: Tensor) -> bool:
    return bool((numbers.diff() == 1).all())
