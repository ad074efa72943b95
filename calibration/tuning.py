"""Tuning after rounding: codes stay, scales and norms follow the gradient of KL from the original model.

What the whole model says is the target, so that a block may make up for the errors of those before it, which no solver
of single linears can see. (End-to-end training of scales: EfficientQAT, arXiv 2407.11062, section 3.3; here the
original is the teacher.) Blocks are read when they run, and once more on the way back unless what they have computed is
held until then (`GRAPH_BYTES`): in memory are one block, the states of one batch at every block, and for each scale
three numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quantkit import heap
from quantkit.errors import CalibrationError
from quantkit.formats.codec import StoredTensor
from quantkit.models.architecture import FINAL_NORM, Architecture
from quantkit.models.block import Block, read_block
from quantkit.models.config import ModelConfig
from quantkit.models.feedforward import GatedMLP
from quantkit.models.rope import Rotary
from quantkit.models.source import Device, Source
from quantkit.models.transformer import Head, load_embedding, load_head
from quantkit.progress import Progress

BATCH_TOKENS = 512
READ_TOKENS = 4096
RATE, RATE_OF_A_BIT = 8e-4, 3.0
FIRST_MOMENT, SECOND_MOMENT, TINY = 0.8, 0.99, 1e-8
PREDICTIONS_AT_ONCE = 128
HELD_BYTES = 256 << 20
"""Of codes that are read once, not whenever a block runs."""
GRAPH_BYTES = 512 << 20
"""Of what blocks have computed: with all of it a step takes a fifth less time."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundedLinear:
    """A weight as `steps[j] · scale[group[j]]`.

    steps  int16 or int8 [in, out]: code minus zero point
    group  int64 [in]: the group of each row
    scale  float32 [groups, out]
    bias   [out], or None
    """

    steps: Tensor
    group: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def in_runs(self) -> bool:
        """Whether groups are of neighbouring rows, as many in each."""
        count, groups = len(self.group), len(self.scale)
        if count % groups:
            return False
        runs = torch.arange(groups, device=self.group.device).repeat_interleave(count // groups)
        return torch.equal(self.group, runs)


class Rounded(Protocol):
    """The rounded linears of a model, by name."""

    @property
    def scales(self) -> Mapping[str, Tensor]:
        """Of every rounded linear, float32 [groups, out]."""

    @property
    def bits(self) -> Mapping[str, int]:
        """Of a code of each."""

    def linear(self, name: str) -> RoundedLinear:
        """One of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """
    scales  of every rounded linear, float32 [groups, out], not yet rounded for a file
    norms   of every norm that was tuned, by name without `.weight`, float32, as the checkpoint has them (without the
            family's offset)
    course  mean KL over each pass through the text, while it was tuned
    """

    scales: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    course: tuple[float, ...]


def tune(
    original: Source,
    rounded: Rounded,
    config: ModelConfig,
    architecture: Architecture,
    rows: Tensor,
    passes: int,
    *,
    seed: int,
    dtype: torch.dtype,
    device: Device,
    progress: Progress,
    around: Source | None = None,
    graphs: int = GRAPH_BYTES,
) -> Tuned:
    """Go `passes` times through a text `rows`, int64 `[rows, length]`, in an order that `seed` draws, with a step after
    every `BATCH_TOKENS`: many small steps were worth more than few sure ones.

    around  all else that the rounded linears are to work with, which stays as it is: norms too. By default that is the
            original, whose norms are tuned
    graphs  bytes of what blocks have computed on the way forward, which is made anew on the way back where it is more;
            the result is the same

    Raises CalibrationError where states or gradients are not finite.
    """
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    generator = torch.Generator().manual_seed(seed)
    batch = max(1, BATCH_TOKENS // rows.shape[1])
    with torch.inference_mode(False), torch.no_grad():
        student = _Student(around or original, rounded, config, architecture, device, norms=around is None)
        teacher = _Reader(original, config, architecture, dtype, device)
        learner = _Reader(student, config, architecture, dtype, device, graph_bytes=graphs)
        descent = _Descent(student.leaves, steps=passes * math.ceil(len(rows) / batch))
        course = []
        with progress.task("tune", total=passes * len(rows)) as task:
            together = max(1, READ_TOKENS // rows.shape[1])
            targets = torch.cat([teacher.leaving(part).cpu() for part in rows.split(together)])
            for number in range(passes):
                lost = 0.0
                heap.give_back()
                for chosen in torch.randperm(len(rows), generator=generator).split(batch):
                    loss = learner.descend(rows[chosen], targets[chosen].to(device), teacher.head)
                    if not math.isfinite(loss):
                        raise CalibrationError("tuning gives a KL that is not finite", hint="use `--dtype fp32`")
                    descent.step()
                    lost += loss * len(chosen)
                    task.advance(len(chosen), note=f"pass {number + 1}, KL {loss:.4f}")
                course.append(lost / len(rows))
        return Tuned(student.scales(), student.tuned_norms(), tuple(course))


def divergences(
    original: Source,
    candidates: Sequence[Source],
    config: ModelConfig,
    architecture: Architecture,
    rows: Tensor,
    *,
    dtype: torch.dtype,
    device: Device,
) -> tuple[float, ...]:
    """Mean KL of each model from the original over a text, int64 `[rows, length]`; all of them in `dtype`."""
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    with torch.inference_mode(False), torch.no_grad():
        teacher = _Reader(original, config, architecture, dtype, device)
        batches = rows.split(max(1, READ_TOKENS // rows.shape[1]))
        head, targets = teacher.head, [teacher.leaving(batch).cpu() for batch in batches]
        found = []
        for candidate in candidates:
            heap.give_back()
            reader = _Reader(candidate, config, architecture, dtype, device)
            lost = [
                len(batch) * reader.distance(reader.leaving(batch), target.to(device), head)
                for batch, target in zip(batches, targets, strict=True)
            ]
            found.append(sum(lost) / len(rows))
    return tuple(found)


class _Scaled(StoredTensor):
    """A rounded weight whose scale is part of a graph. Where its product is `unread`, gradients alone are right."""

    def __init__(self, linear: RoundedLinear, scale: Tensor, *, unread: bool = False) -> None:
        self.in_features, self.out_features = linear.steps.shape
        self.bias = linear.bias
        self._linear, self._scale, self._unread = linear, scale, unread

    def tensors(self) -> dict[str, Tensor]:
        raise AssertionError("this form is for tuning alone")

    def dequantize(self) -> Tensor:
        return self._linear.steps * self._scale.detach()[self._linear.group]

    def to(self, device: Device) -> "_Scaled":
        linear = self._linear
        bias = None if linear.bias is None else linear.bias.to(device)
        moved = RoundedLinear(linear.steps.to(device), linear.group.to(device), linear.scale.to(device), bias)
        return _Scaled(moved, self._scale.to(device), unread=self._unread)

    def without_product(self) -> "_Scaled":
        return _Scaled(self._linear, self._scale, unread=True)

    def matmul(self, x: Tensor) -> Tensor:
        y: Tensor = _Multiply.apply(x, self._scale, self._linear, self._unread)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Multiply(torch.autograd.Function):
    """`x · (steps · scale)`, its gradients by two products of matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, linear: RoundedLinear, unread: bool) -> Tensor:
        weight = _weight(linear, scale, x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.linear, ctx.shape = linear, scale.shape
        return x.new_zeros(len(x), weight.shape[1]) if unread else x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        (gradient,), linear = gradients, ctx.linear
        of_weight = (x.T @ gradient).to(torch.float32).mul_(linear.steps)
        if linear.in_runs:
            of_scale = of_weight.unflatten(0, (ctx.shape[0], -1)).sum(1)
        else:
            of_scale = of_weight.new_zeros(ctx.shape).index_add_(0, linear.group, of_weight)
        return gradient @ weight.T, of_scale, None, None


def _weight(linear: RoundedLinear, scale: Tensor, dtype: torch.dtype) -> Tensor:
    if linear.in_runs:
        return (linear.steps.unflatten(0, (len(scale), -1)) * scale[:, None]).to(dtype).flatten(0, 1)
    return (linear.steps * scale[linear.group]).to(dtype)


class _Student:
    """The rounded model as a source. A leaf, at first 0, is the relative change of each scale and each norm."""

    def __init__(
        self,
        around: Source,
        rounded: Rounded,
        config: ModelConfig,
        architecture: Architecture,
        device: Device,
        *,
        norms: bool = True,
    ) -> None:
        self._around, self._rounded, self._device = around, rounded, device
        self._held: dict[str, RoundedLinear] = {}
        self._offset = architecture.norm_offset
        names = [name for index in range(config.num_layers) for name in architecture.norms(config, index)]
        tuned = (*names, FINAL_NORM) if norms else ()
        self._norms = {name: around.tensor(f"{name}.weight").to(device, torch.float32) for name in tuned}
        self._scales = {name: scale.to(device, torch.float32) for name, scale in rounded.scales.items()}
        self._changes = {
            name: torch.zeros_like(tensor).requires_grad_() for name, tensor in (self._scales | self._norms).items()
        }

    @property
    def leaves(self) -> list[tuple[Tensor, float]]:
        """With the rate of each: what there is to gain grows with the variance that rounding has added, which about
        doubles twice for each bit less. Norms serve all linears, and go at their mean."""
        rates = {name: RATE * RATE_OF_A_BIT ** (4 - bits) for name, bits in self._rounded.bits.items()}
        usual = sum(rates.values()) / max(1, len(rates))
        return [(leaf, rates.get(name, usual)) for name, leaf in self._changes.items()]

    def scales(self) -> dict[str, Tensor]:
        return {name: self._scale(name).detach().cpu() for name in self._scales}

    def tuned_norms(self) -> dict[str, Tensor]:
        return {name: self._norm(name).detach().cpu() for name in self._norms}

    def has(self, name: str) -> bool:
        return self._around.has(name)

    def tensor(self, name: str) -> Tensor:
        module = name.removesuffix(".weight")
        return self._norm(module) if module in self._norms else self._around.tensor(name)

    def linear(self, name: str) -> StoredTensor:
        if name not in self._scales:
            return self._around.linear(name)
        return _Scaled(self._linear(name), self._scale(name))

    def _linear(self, name: str) -> RoundedLinear:
        """Held in memory from its first use on, as long as there is room."""
        if name in self._held:
            return self._held[name]
        linear = self._rounded.linear(name)
        if self._rounded.bits[name] < 8:  # steps of 8 bits go to 255 on either side
            linear = replace(linear, steps=linear.steps.to(torch.int8))
        linear = replace(linear, steps=linear.steps.to(self._device), group=linear.group.to(self._device))
        if sum(held.steps.nbytes for held in self._held.values()) + linear.steps.nbytes <= HELD_BYTES:
            self._held[name] = linear
        return linear

    def _scale(self, name: str) -> Tensor:
        return self._scales[name] * (1 + self._changes[name])

    def _norm(self, name: str) -> Tensor:
        return (self._norms[name] + self._offset) * (1 + self._changes[name]) - self._offset


class _Reader:
    """A model of which one block is in memory, and as many graphs of blocks as `graph_bytes` hold."""

    def __init__(
        self,
        source: Source,
        config: ModelConfig,
        architecture: Architecture,
        dtype: torch.dtype,
        device: Device,
        graph_bytes: int = 0,
    ) -> None:
        self._place = source, config, architecture
        self._dtype, self._device, self._graph_bytes = dtype, device, graph_bytes
        self._embedding = load_embedding(source, config, architecture, dtype, device)

    @property
    def head(self) -> Head:
        return load_head(*self._place, self._dtype, self._device)

    def leaving(self, ids: Tensor) -> Tensor:
        """int64 `[b, length]` → what leaves the last block, float32."""
        rotary, states = self._rotary(ids), self._embedding(ids.to(self._device))
        for index in range(self._place[1].num_layers):
            states = self._block(index).forward(states, rotary)
        return states

    def descend(self, ids: Tensor, target: Tensor, teacher: Head) -> float:
        """Adds the gradients of the mean KL to those of the leaves; returns that mean. `teacher` reads `target`."""
        rotary, states = self._rotary(ids), self._embedding(ids.to(self._device))
        passed: list[tuple[Tensor, Tensor | None]] = []
        left = self._graph_bytes
        for index in range(self._place[1].num_layers):
            with torch.enable_grad():  # its scales are nodes of a graph
                block = self._block(index)
            entering, leaving = states.requires_grad_(), None
            left -= graph_bytes(block, ids.numel())
            if left >= 0:
                with torch.enable_grad():
                    leaving = block.forward(entering, rotary)
                states = leaving.detach()
            else:
                states = block.forward(entering, rotary)
            passed.append((entering, leaving))
        loss, gradient = self._divergence(states, target, teacher)
        while passed:
            entering, leaving = passed.pop()
            if leaving is None:
                with torch.enable_grad():
                    leaving = _through(self._block(len(passed))).forward(entering, rotary)
            leaving.backward(gradient)
            assert entering.grad is not None
            gradient = entering.grad
        return loss

    def distance(self, hidden: Tensor, target: Tensor, teacher: Head) -> float:
        """Mean KL of this model's predictions from the teacher's."""
        pieces = zip(*(states.flatten(0, 1).split(PREDICTIONS_AT_ONCE) for states in (hidden, target)), strict=True)
        head = self.head
        total = sum(divergence_and_slope(teacher(other), head(own))[0] for own, other in pieces)
        return total / (hidden.shape[0] * hidden.shape[1])

    def _block(self, index: int) -> Block:
        return read_block(*self._place, index, self._dtype, self._device)

    def _divergence(self, hidden: Tensor, target: Tensor, teacher: Head) -> tuple[float, Tensor]:
        """Mean KL of this model's predictions from the teacher's, and its gradient at `hidden`."""
        total, gradients, count = 0.0, [], hidden.shape[0] * hidden.shape[1]
        with torch.enable_grad():
            head = self.head
        pieces = zip(*(states.flatten(0, 1).split(PREDICTIONS_AT_ONCE) for states in (hidden, target)), strict=True)
        for own, other in pieces:
            own = own.detach().requires_grad_()
            with torch.enable_grad():
                found = head(own)
            lost, slope = divergence_and_slope(teacher(other), found.detach())
            found.backward(slope.div_(count), retain_graph=True)
            assert own.grad is not None
            gradients.append(own.grad)
            total += lost
        return total / count, torch.cat(gradients).reshape(hidden.shape)

    def _rotary(self, ids: Tensor) -> Rotary:
        return Rotary.at(self._place[1].ropes, torch.arange(ids.shape[1], device=self._device)[None])


def graph_bytes(block: Block, tokens: int) -> int:
    """About what the way back through a block needs of the way forward: what linears read and give, their weights in
    the dtype of the products, and what stands between them."""
    linears = block.linears.values()
    numbers = sum(linear.in_features * linear.out_features for linear in linears)
    numbers += 2 * tokens * sum(linear.in_features + linear.out_features for linear in linears)
    return numbers * next(iter(linears)).dtype.itemsize


def _through(block: Block) -> Block:
    """The same block for a gradient at what it adds to its states, without the product that only makes these states."""
    if not isinstance(block.mlp, GatedMLP) or block.after_mlp is not None:
        return block
    for linear in block.mlp.output.linears:
        if isinstance(linear.stored, _Scaled):
            linear.replace(linear.stored.without_product())
    return block


def divergence_and_slope(wanted: Tensor, found: Tensor) -> tuple[float, Tensor]:
    """Of logits, float32 `[n, vocab]`: `Σ KL(softmax(wanted) || softmax(found))` over the n predictions, and its
    gradient at `found`, which is the difference of the two softmaxes. Both logits are lost.

    KL is `Σ p · (wanted - found)` less what the two are normalised by; a normaliser is the largest logit less the
    logarithm of its probability.
    """
    p, q = wanted.softmax(-1), found.softmax(-1)
    total = float((_normaliser(found, q) - _normaliser(wanted, p)).sum(dtype=torch.float64))
    total += float(torch.linalg.vecdot(p, wanted.sub_(found)).sum(dtype=torch.float64))
    return total, q.sub_(p)


def _normaliser(logits: Tensor, probabilities: Tensor) -> Tensor:
    likeliest, place = probabilities.max(-1, keepdim=True)
    return logits.gather(-1, place) - likeliest.log()


class _Descent:
    """Adam (arXiv 1412.6980) with a rate that falls to nothing in a straight line."""

    def __init__(self, leaves: list[tuple[Tensor, float]], steps: int) -> None:
        self._leaves, self._steps, self._done = leaves, steps, 0
        self._moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf, _ in leaves]

    def step(self) -> None:
        """Moves every leaf against its gradient, which it takes away."""
        share = 1 - self._done / self._steps
        self._done += 1
        unbias = 1 - FIRST_MOMENT**self._done, 1 - SECOND_MOMENT**self._done
        for (leaf, rate), (first, second) in zip(self._leaves, self._moments, strict=True):
            if leaf.grad is None:
                continue
            first.lerp_(leaf.grad, 1 - FIRST_MOMENT)
            second.mul_(SECOND_MOMENT).addcmul_(leaf.grad, leaf.grad, value=1 - SECOND_MOMENT)
            leaf.data.addcdiv_(first, (second / unbias[1]).sqrt_().add_(TINY), value=-rate * share / unbias[0])
            leaf.grad = None
