"""`quantkit quantize`: a model folder → the same model in fewer bits, solved block by block against real activations.

Everything that can be refused is refused before work (`quantize_job`). Then one block at a time is read, solved
(`quantize_block`), written, and run again as quantized to make the inputs of the next. The result is read back and
compared with what was solved before it takes its place, and measured against the original after.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration import text
from quantkit.calibration.stream import ActivationStream
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.checkpoint.receipt import Receipt
from quantkit.checkpoint.writer import CheckpointWriter
from quantkit.commands.quantize_block import solve_block
from quantkit.commands.quantize_job import QuantizeJob, choose_codec, choose_placement, prepare, require_finite
from quantkit.commands.quantize_report import Calibration, Cost, Damage, LinearResult, QuantizeReport
from quantkit.errors import RequestError
from quantkit.evaluators import divergence
from quantkit.formats.dense import DenseTensor
from quantkit.models.architecture import HEAD
from quantkit.models.transformer import Model, Rotary, load_block, load_embedding
from quantkit.plan import Plan, kind_of
from quantkit.progress import Progress, Tqdm
from quantkit.runtime.generator import Generator, Request
from quantkit.runtime.load import load
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import QuantizeSettings

BATCH_TOKENS = 2048
"""Calibration tokens that go through a block together."""
EVALUATION_WINDOWS, EVALUATION_LENGTH = 8, 512
SAMPLE_PROMPT, SAMPLE_TOKENS = "What is gravity? Answer in two sentences.", 64


def quantize(model: str | Path, out: str | Path, *, progress: Progress | None = None, **options: Any) -> QuantizeReport:
    """Quantize `model` into the folder `out`. Options are the fields of `quantkit.settings.QuantizeSettings`.

    report = quantkit.quantize("models/llama", "models/llama-gptq", bits=4, group_size=64)
    """
    return run(QuantizeSettings(str(model), Path(out), **options), progress or Tqdm())


def run(settings: QuantizeSettings, progress: Progress) -> QuantizeReport:
    """Quantize. Raises an error of the tree for anything that cannot be done; then no folder is left behind.

    Only a GateError of the measurement at the end comes when the result is complete; it stays.
    """
    start = time.monotonic(), time.process_time()
    codec, placement = choose_codec(settings), choose_placement(settings)
    checkpoint = open_checkpoint(settings.model)
    with CheckpointWriter(settings.out, source=checkpoint.path, overwrite=settings.overwrite) as writer:
        job = prepare(settings, checkpoint, codec, placement)
        _announce(job, progress)
        require_finite(checkpoint, progress)
        results, receipt = _quantize(job, writer, settings.out, progress)
        job.plan.check_done(result.name for result in results)
        _pass_through(job, writer, receipt)
        files = _finish(job, writer, receipt)
    spent = _spent_since(start)
    damage = _measure(job, settings.out, progress) if settings.evaluate else None
    return QuantizeReport(
        out=settings.out,
        format=codec.name,
        settings={key: getattr(settings, key) for key in ("bits", "group_size", "sym", "act_order")},
        backend=f"{placement.backend}: {placement.reason}",
        plan=job.plan,
        linears=tuple(results),
        parameters=job.parameters,
        size_bytes=sum(file.stat().st_size for file in files if file.suffix == ".safetensors"),
        calibration=Calibration(
            source=settings.calibration,
            rows=settings.samples,
            length=settings.length,
            seed=settings.seed,
            device=placement.device,
            dtype=placement.dtype_name,
        ),
        cost=Cost(*spent, *(_spent_since(start) if settings.evaluate else spent)),
        damage=damage,
    )


def _announce(job: QuantizeJob, progress: Progress) -> None:
    plan, (rows, length) = job.plan, job.rows.shape
    progress.say(
        f"{len(plan.quantized)} linears to {plan.bits_per_weight:.3f} bits per weight, {len(plan.dense)} stay dense"
    )
    for remark in (*job.checkpoint.notes, *plan.remarks()):
        progress.say(f"note: {remark}")
    progress.say(f"calibration: {rows} × {length} tokens, {job.placement.dtype_name} on {job.placement.device}")


@torch.inference_mode()
def _quantize(
    job: QuantizeJob, writer: CheckpointWriter, out: Path, progress: Progress
) -> tuple[list[LinearResult], Receipt]:
    """The loop over blocks. Nothing of a block outlives it but its line of the report and its digests."""
    results: list[LinearResult] = []
    receipt = Receipt()
    device, dtype = job.placement.device, job.placement.dtype
    rotary = Rotary.at(job.config.ropes, torch.arange(job.rows.shape[1], device=device)[None])
    with _stream(job, out) as stream, progress.task("quantize", total=len(job.plan.quantized)) as task:
        for index in range(job.config.num_layers):
            block = load_block(job.checkpoint, job.config, job.architecture, index, dtype, device)
            rounded: dict[str, DenseTensor] = {}
            for solved in solve_block(block, stream, rotary, job.plan, job.codec):
                name, stored = solved.result.name, solved.stored
                for suffix, tensor in stored.tensors().items():
                    _add(writer, receipt, f"{_module_on_disk(job.checkpoint, name)}.{suffix}", tensor)
                receipt.add_weight(name, solved.weight)
                rounded[name] = DenseTensor(stored.dequantize().T, stored.bias)
                results.append(solved.result)
                task.advance(note=f"block {index}, {kind_of(name)}, error {solved.result.error:.5f}")
            if index + 1 == job.config.num_layers:
                break
            for name, linear in block.linears.items():
                linear.replace(rounded.get(name, linear.stored))

            def run_block(hidden: Tensor) -> Tensor:
                return block.forward(hidden.to(device), rotary)  # noqa: B023 - called before the next block is read

            stream.advance(run_block, f"block {index}")
    return results, receipt


@contextmanager
def _stream(job: QuantizeJob, out: Path) -> Iterator[ActivationStream]:
    """The embedded text: in memory, or in a hidden folder beside `out` where it is large."""
    device = job.placement.device
    embedding = load_embedding(job.checkpoint, job.config, job.architecture, job.placement.dtype, device)
    folder = None
    if job.spills:
        # The writer's lock keeps others out of this name; what a killed process left there is of no use.
        folder = out.expanduser().absolute().with_name(f".{out.name}.activations")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    try:
        yield ActivationStream.start(
            lambda ids: embedding(ids.to(device)),
            job.rows,
            batch_rows=max(1, BATCH_TOKENS // job.rows.shape[1]),
            folder=folder,
        )
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _add(writer: CheckpointWriter, receipt: Receipt, name: str, tensor: Tensor) -> None:
    writer.add(name, tensor)
    receipt.add(name, tensor)


def _module_on_disk(checkpoint: Checkpoint, linear: str) -> str:
    """What the source calls a linear; its Hugging Face name where the source holds it in parts."""
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors_of(linear)}
    return modules.pop() if len(modules) == 1 else linear


def _pass_through(job: QuantizeJob, writer: CheckpointWriter, receipt: Receipt) -> None:
    """Every other tensor as it is; a tied head, which some files hold a second time, only once."""
    replaced = {name for linear in job.plan.quantized for name in job.checkpoint.tensors_of(linear.name)}
    if job.config.tie_embeddings:
        replaced.add(f"{HEAD}.weight")
    for name in job.checkpoint.names():
        if name not in replaced:
            _add(writer, receipt, name, job.checkpoint.tensor(name))


def _finish(job: QuantizeJob, writer: CheckpointWriter, receipt: Receipt) -> list[Path]:
    quantization = job.codec.config(true_sequential=False, dynamic=_rules(job.plan))
    return writer.finish(
        {**job.checkpoint.config, "quantization_config": quantization},
        job.checkpoint.side_files(),
        {"quantize_config.json": quantization},
        check=lambda folder: receipt.check(open_checkpoint(folder)),
    )


def _rules(plan: Plan) -> dict[str, dict[str, Any]]:
    """`dynamic` rules for the linears that stay dense: one for each kind, or for each name where a kind is divided."""
    divided = {linear.kind for linear in plan.quantized}
    rules: dict[str, dict[str, Any]] = {}
    for linear in plan.dense:
        pattern = re.escape(linear.name)
        if linear.kind not in divided:
            pattern = re.sub(r"\d+(?=\\\.)", r"\\d+", pattern)
        rules[f"-:^{pattern}$"] = {}
    return rules


def _measure(job: QuantizeJob, out: Path, progress: Progress) -> Damage:
    """The result against the original on bundled text that calibration never sees, and one greedy answer."""
    length = min(EVALUATION_LENGTH, job.config.max_positions)
    windows = text.held_back(job.tokenizer, length, EVALUATION_WINDOWS)
    device = job.placement.device
    reference = Model.stream(job.checkpoint, job.config, job.architecture, torch.float32, device)
    candidate = load(out, device, torch.float32)
    found = divergence.compare(reference, candidate, windows, progress)
    prompt = _sample_prompt(job.tokenizer)
    room = min(SAMPLE_TOKENS, job.config.max_positions - len(prompt))
    request = Request(prompt, room, stop_ids=job.tokenizer.eos_ids)
    return Damage(
        windows=len(windows),
        tokens=found.reference.tokens,
        perplexity_reference=found.reference.perplexity,
        perplexity_candidate=found.candidate.perplexity,
        kl_mean=found.kl_mean,
        kl_ci95=found.kl_ci95,
        top1_agreement=found.top1_agreement,
        prompt=SAMPLE_PROMPT,
        answer=Generator(candidate, job.tokenizer).run(request).text if room > 0 else "",
    )


def _sample_prompt(tokenizer: Tokenizer) -> list[int]:
    """A chat where the model has a template, else plain text."""
    try:
        return tokenizer.chat([{"role": "user", "content": SAMPLE_PROMPT}])
    except RequestError:
        return tokenizer.encode(SAMPLE_PROMPT, special=True)


def _spent_since(start: tuple[float, float]) -> tuple[float, float, int]:
    """Wall seconds, processor seconds, and the peak memory of the process so far in bytes.

    `VmHWM` and not `ru_maxrss`, which a child inherits from its parent.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return time.monotonic() - start[0], time.process_time() - start[1], int(found[1]) * 1024 if found else 0
