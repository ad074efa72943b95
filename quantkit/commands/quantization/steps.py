"""The work of `quantkit quantize` as steps of a job: one for each block and one for the head, then all of it together.

A step has the tensors of its linears as they go to the disk, the lines of the report and the digests. The result is put
together from the steps at the end, so that it is the same however often the work was taken up.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.sensitivity import Sensitivity
from quantkit.calibration.stream import ActivationStream
from quantkit.checkpoint.header import Header
from quantkit.checkpoint.receipt import Receipt, digest_of_values
from quantkit.checkpoint.spelling import on_disk
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.quantization.block import SolvedLinear, round_block, round_linear, solve_block, solve_head
from quantkit.commands.quantization.fallback import Descent, rows_at_once, run_in_parts
from quantkit.commands.quantization.job import QuantizeJob, Subject, on_gpu, rotary_of
from quantkit.commands.quantization.passage import HeldPassage, Passage
from quantkit.commands.quantization.redo_sources import Redo
from quantkit.commands.quantization.report import LinearResult
from quantkit.commands.quantization.walk import BlockWalk, step_of
from quantkit.errors import OWN_FAULT, GateError
from quantkit.formats.codec import StoredTensor
from quantkit.job.job import Job, Step
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.transformer import Block, Rotary, load_block, load_head
from quantkit.plan import kind_of
from quantkit.progress import Progress, Task

WALK, HEAD_STEP = "quantize", "quantize head"


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What has been changed in a result before it is put together.

    tensors  by name on the disk
    weights  `digest_of_values` of what each linear then decodes to
    """

    tensors: Mapping[str, Tensor]
    weights: Mapping[str, str]


UNCHANGED = Changes({}, {})


@torch.inference_mode()
def solve_steps(job: QuantizeJob, kept: Job, sensitivity: Sensitivity | None, progress: Progress) -> None:
    """Every step that `kept` does not have. Nothing of a block outlives its step. Without text its linears are rounded
    to nearest."""
    subject, descent = job.subject, Descent(job.subject, progress)
    walk = BlockWalk(subject, kept, WALK)
    has_text, has_head = bool(len(subject.rows)), job.has_head and not kept.has(HEAD_STEP)
    with progress.task("quantize", total=len(job.work)) as task:
        if done := sum(len(kept.value(name)["linears"]) for name in solved_steps(kept)):
            task.advance(done, note="done before")
        stream: ActivationStream | None = None
        if has_text and (walk.done < job.blocks or has_head):
            stream = walk.open()
        for index in range(walk.done, job.blocks):
            descent.begin(f"block {index}")
            with kept.step(walk.step(index)) as step:
                found = _Found(step, subject, f"block {index}", task)
                made = _BlockMade(job, index, found, sensitivity, partial(walk.aside, index))
                descent.run(partial(made.solve, stream))
                seal = None
                if stream is not None and (index + 1 < job.blocks or has_head):

                    leave = partial(made.leave, stream, descent)
                    stream, seal = walk.follow(leave, index)
                made.forget()
                step.finish(found.value(seal, descent))
            walk.leave(index)
        if has_head:
            descent.begin("head")
            with kept.step(HEAD_STEP) as step:
                found = _Found(step, subject, "head", task)
                found.add(descent.run(partial(_solved_head, job, stream)))
                step.finish(found.value(None, descent))
        kept.keep_states()


class _BlockMade:
    """One block on its way from dense to quantized, on whatever device there is room."""

    def __init__(
        self,
        job: QuantizeJob,
        index: int,
        found: "_Found",
        sensitivity: Sensitivity | None,
        folder: Callable[[str], Path],
    ) -> None:
        self._job, self._index, self._found, self._sensitivity = job, index, found, sensitivity
        self._folder = folder
        self._passage: Passage | None = None
        self._rounded: dict[str, StoredTensor] = {}
        self._block: Block | None = None
        self._runs: tuple[str, Block, Rotary] | None = None

    def solve(self, stream: ActivationStream | None, subject: Subject) -> None:
        """Its linears, but those that are solved already."""
        self._block = None
        block, job = self._loaded(subject), self._job
        codecs = {name: codec for name, codec in job.codecs.items() if name not in self._rounded}
        if stream is None:
            solutions = round_block(block, codecs, job.before)
        else:
            self._passage = self._begin(stream, subject)
            solutions = solve_block(
                block,
                self._passage,
                codecs,
                self._sensitivity,
                hessian_dtype=job.hessian_dtype,
                route_all=job.route_all,
                hessian_bytes=subject.budget.hessian_bytes,
                apart=subject.budget.apart,
                before=job.before,
            )
        for name, stored in map(self._found.add, solutions):  # one at a time, and nothing else of it is held
            self._rounded[name] = stored
        self._block = block

    def forget(self) -> None:
        """The block; nothing more is to come."""
        self._block = self._runs = self._passage = None

    def leave(self, stream: ActivationStream, descent: Descent, folder: Path) -> ActivationStream:
        """The states behind the quantized block, from those before it."""
        name = f"block {self._index}"
        if isinstance(self._passage, HeldPassage) and self._block is not None:
            return self._passage.leave(self._block, name, folder)
        return stream.follow(lambda hidden: descent.run(partial(self._run, hidden)), name, folder=folder)

    def _begin(self, stream: ActivationStream, subject: Subject) -> Passage:
        """Nothing is held where work is done on a GPU: products take less time there than states on their way to it."""
        if on_gpu(self._job.subject.placement):
            return Passage(rows_at_once(stream, subject), rotary_of(subject))
        return HeldPassage(stream, rotary_of(subject), self._folder)

    def _run(self, hidden: Tensor, subject: Subject) -> Tensor:
        """The quantized block's answer to states `[b, s, hidden]`, in main memory."""
        device = subject.placement.device
        if self._runs is None or self._runs[0] != device:
            self._runs = None
            self._runs = device, self._quantized(subject), rotary_of(subject)
        _, block, rotary = self._runs
        return run_in_parts(block, hidden, rotary, subject)

    def _quantized(self, subject: Subject) -> Block:
        block, self._block = self._block, None
        if block is None or block.device.type != torch.device(subject.placement.device).type:
            block = self._loaded(subject)
        for linear in block.linears.values():
            linear.settle()
        return block

    def _loaded(self, subject: Subject) -> Block:
        """With what is solved of it as far as that goes."""
        placement = subject.placement
        place = self._job.source, subject.config, subject.architecture
        block = load_block(*place, self._index, placement.dtype, placement.device)
        for name, stored in self._rounded.items():
            round_linear(block.linears[name], stored)
        return block


def _solved_head(job: QuantizeJob, stream: ActivationStream | None, subject: Subject) -> SolvedLinear:
    placement = subject.placement
    place = job.source, subject.config, subject.architecture
    head = load_head(*place, placement.dtype, placement.device)
    states = None if stream is None else rows_at_once(stream, subject)
    apart = subject.budget.apart
    return solve_head(
        head, states, job.codecs, hessian_dtype=job.hessian_dtype, apart=apart, before=job.before
    )


def put_together(
    job: QuantizeJob, kept: Job, writer: CheckpointWriter, changes: Changes = UNCHANGED
) -> tuple[list[LinearResult], Receipt]:
    """Hands the tensors of all steps to the writer, then every other tensor as it is; what has been changed since, in
    the place of what it was.

    Raises JobError for a step that is damaged.
    """
    receipt = Receipt()
    for name in solved_steps(kept):
        value = kept.value(name)
        for tensor_name, tensor in kept.tensors(name):
            _add(writer, receipt, tensor_name, changes.tensors.get(tensor_name, tensor))
        for linear, digest in value["weights"].items():
            receipt.add_weight_digest(linear, changes.weights.get(linear, digest))
    results = solved_linears(kept)
    job.plan.check_done(result.name for result in results)
    _pass_through(job, writer, receipt, changes)
    return results, receipt


def put_in_their_place(
    redo: Redo, kept: Job, writer: CheckpointWriter, before: Receipt, changes: Changes = UNCHANGED
) -> Receipt:
    """Hands every tensor of a result to the writer in its order, those of the linears that were solved anew as they are
    in the steps. `before` is the receipt of the result.

    Raises JobError for a step that is damaged, GateError where another tensor would not be as it was.
    """
    receipt = Receipt()
    replaced = {tensor for name in redo.names for tensor in redo.previous.tensors_of(name)}
    places: dict[str, str] = {}
    for step in solved_steps(kept):
        places |= dict.fromkeys(kept.homes(step), step)
        for linear, digest in kept.value(step)["weights"].items():
            receipt.add_weight_digest(linear, changes.weights.get(linear, digest))
    for name in redo.previous.names():
        if name not in replaced:
            _add(writer, receipt, name, redo.previous.tensor(name))
        elif name in changes.tensors:
            _add(writer, receipt, name, changes.tensors[name])
        elif name in places:
            _add(writer, receipt, name, kept.tensor(places[name], name))
    solved = {linear.name for linear in solved_linears(kept)}
    if solved != redo.names or places.keys() != replaced or not receipt.differing(before) <= replaced:
        raise GateError("not the linears that were asked for would be replaced, or not those alone", hint=OWN_FAULT)
    return receipt


def solved_linears(kept: Job) -> list[LinearResult]:
    """What is said of each linear that is solved."""
    return [LinearResult(**found) for step in solved_steps(kept) for found in kept.value(step)["linears"]]


def solved_blocks(kept: Job) -> int:
    """Blocks that are solved."""
    return sum(name != HEAD_STEP for name in solved_steps(kept))


class _Found:
    """What is found while a step is made."""

    def __init__(self, step: Step, subject: Subject, place: str, task: Task) -> None:
        self._step, self._subject, self._place, self._task = step, subject, place, task
        self._linears: list[dict[str, Any]] = []
        self._weights: dict[str, str] = {}

    def add(self, solved: SolvedLinear) -> tuple[str, StoredTensor]:
        """Keeps one linear; returns its name and what has been kept.

        Raises GateError where what was encoded is not what was solved.
        """
        name, stored = solved.result.name, solved.stored
        digest = digest_of_values(solved.weight())
        if digest_of_values(stored.dequantize()) != digest:
            raise GateError(
                f"`{name}` does not decode to the weight that was solved",
                hint="the memory of this machine may be faulty; run the command again",
            )
        for suffix, tensor in stored.tensors().items():
            self._step.add(on_disk(self._subject.module_on_disk(name), suffix), tensor)
        self._weights[name] = digest
        self._linears.append(asdict(solved.result))
        self._task.advance(note=f"{self._place}, {kind_of(name)}, error {solved.result.error:.5f}")
        return name, stored

    def value(self, seal: str | None, descent: Descent) -> dict[str, Any]:
        made = {"linears": self._linears, "weights": self._weights, "states": seal}
        return {**made, "fallbacks": descent.noted()}


def solved_steps(kept: Job) -> Iterator[str]:
    """Those that are done, in the order of the result."""
    index = 0
    while kept.has(step_of(WALK, index)):
        yield step_of(WALK, index)
        index += 1
    if kept.has(HEAD_STEP):
        yield HEAD_STEP


def solved_homes(kept: Job) -> dict[str, Header]:
    """Where the tensors are that the steps have made. Raises JobError for a file that is missing or damaged."""
    return {name: home for step in solved_steps(kept) for name, home in kept.homes(step).items()}


def _add(writer: CheckpointWriter, receipt: Receipt, name: str, tensor: Tensor) -> None:
    writer.add(name, tensor)
    receipt.add(name, tensor)


def _pass_through(job: QuantizeJob, writer: CheckpointWriter, receipt: Receipt, changes: Changes) -> None:
    """Every other tensor as it is; a tied head, which some files hold a second time, only once."""
    checkpoint = job.subject.checkpoint
    replaced = {name for linear in job.plan.quantized for name in checkpoint.tensors_of(linear.name)}
    if job.plan.head is not None or job.subject.config.tie_embeddings:
        replaced.update(name for name in checkpoint.names() if name.startswith(f"{HEAD}."))  # it may be quantized
    for name in checkpoint.names():
        if name not in replaced:
            _add(writer, receipt, name, changes.tensors.get(name, checkpoint.tensor(name)))
    if job.plan.added_bits and job.plan.head is None and job.subject.config.tie_embeddings:
        _add(writer, receipt, f"{HEAD}.weight", checkpoint.tensor(f"{EMBEDDING}.weight"))
