"""`quantkit quantize`: options → settings → `commands.quantize.run` → table or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    Calibration,
    CalibrationDtype,
    Device,
    JobFolder,
    Json,
    MaxMemory,
    Restart,
    Rotate,
    RowLength,
    Samples,
    memory_bytes,
)
from quantkit.commands.evaluation.gate import DAMAGE_FIGURES, Gate
from quantkit.errors import GateError, UsageError
from quantkit.settings import QuantizeSettings, ReportSettings, TextSettings

REPORT_TEXT = TextSettings(length=512, windows=8)
"""The same text over which the damage is measured, from its beginning."""


def quantize(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder of a Hugging Face model, or a hub id.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it appears when it is complete.")],
    format: Annotated[str, typer.Option("--format", help="Format of the result: gptq or exl2.")] = "gptq",
    bits: Annotated[int, typer.Option("--bits", help="GPTQ: width of a code: 2, 3, 4 or 8.")] = 4,
    group_size: Annotated[
        int,
        typer.Option("--group-size", help="GPTQ: input rows that share a scale, -1 for all; fewer are better, bigger."),
    ] = 128,
    sym: Annotated[
        bool, typer.Option("--sym/--asym", help="GPTQ: zero point in the middle, as all readers like, or free.")
    ] = True,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="GPTQ: groups of inputs alike in activation: better, slower to run.")
    ] = False,
    group_aware: Annotated[
        bool,
        typer.Option(
            "--group-aware",
            help="GPTQ: choose the scales of a group when it is reached, not before; groups are solved one by one.",
        ),
    ] = False,
    checkpoint_format: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-format",
            help="GPTQ: gptq holds zero point - 1, gptq_v2 the zero point; by default gptq if all is symmetric.",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Who shall load it: transformers, gptqmodel, vllm, exllamav2, or any of them and SGLang too. "
            "Chooses the group size if none is given; what cannot be loaded is refused before work.",
        ),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            help="GPTQ: REGEX:bits=8,group_size=32 (also sym, act_order) for linears whose full name begins so; may be "
            "repeated, the first match decides.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option("--skip", help="GPTQ: REGEX of linears that stay as they are; may be repeated, precedes rules."),
    ] = None,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="GPTQ: quantize the head too.")] = False,
    untie_head: Annotated[
        bool,
        typer.Option(
            "--untie-head",
            help="GPTQ: a head that is the embedding becomes a weight of its own; the bytes are in the report.",
        ),
    ] = False,
    rotate: Rotate = False,
    effort: Annotated[
        str,
        typer.Option(
            "--effort",
            help="nearest: rounded, without calibration, in seconds. fast: errors are passed on to where they do least "
            "harm, one forward pass over the text and half as much again. default: and tokens and outputs weighed by "
            "their gradients, about four more over 8,192 tokens; with GPTQ, scales and norms tuned to what the "
            "original says, about four more over 10,240. best: GPTQ only, and tuned four times over the whole text, "
            "about thirteen more; the least damage.",
        ),
    ] = "default",
    bpw: Annotated[
        str | None,
        typer.Option(
            "--bpw",
            help="EXL2: bits for each weight of the blocks' linears, all side data included; several as 3.0,4.0 give "
            "one folder each, OUT-3bpw and OUT-4bpw.",
        ),
    ] = None,
    head_bits: Annotated[
        int, typer.Option("--head-bits", help="EXL2: width of the head: 2, 3, 4, 5, 6, 8, or 16 to leave it as it is.")
    ] = 6,
    include_head: Annotated[bool, typer.Option("--include-head", help="EXL2: count the head in `--bpw`.")] = False,
    measurement: Annotated[
        Path | None, typer.Option("--measurement", help="EXL2: what `quantkit measure` wrote; else it is made first.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="EXL2: what `quantkit plan` wrote, in place of `--bpw`.")
    ] = None,
    calibration: Calibration = "bundled",
    samples: Samples = 128,
    length: RowLength = 512,
    route_all: Annotated[
        bool,
        typer.Option(
            "--route-all", help="Mixtures: show every expert all of the text, not only what the router sends to it."
        ),
    ] = False,
    hessian_dtype: Annotated[
        str, typer.Option("--hessian-dtype", help="Of the sums over calibration text: fp32 or fp64.")
    ] = "fp32",
    seed: Annotated[
        int, typer.Option("--seed", min=0, max=2**63 - 1, help="Chooses the rows; the same seed gives the same bytes.")
    ] = 0,
    device: Device = "auto",
    dtype: CalibrationDtype = "auto",
    redo: Annotated[
        str | None,
        typer.Option(
            "--redo",
            help="REGEX of linears of a finished OUT that are solved anew, all else byte for byte as it is: as OUT was "
            "made, but for the options given here (`--effort best`). What is worse on unseen text is not kept.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output folder that another command made, when done.")
    ] = False,
    job: JobFolder = None,
    restart: Restart = False,
    max_memory: MaxMemory = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail when a linear would stay dense or end in a short group.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Only say what would be done, and what it takes of time, memory and disk."),
    ] = False,
    no_eval: Annotated[bool, typer.Option("--no-eval", help="Skip perplexity, KL and the sample at the end.")] = False,
    gate: Annotated[
        str | None,
        typer.Option("--gate", help='Of the damage, as "kl_mean<0.05,ppl_ratio<1.02"; exits 3 where it is greater.'),
    ] = None,
    report_folder: Annotated[
        Path | None, typer.Option("--report", help="Write the report of `eval report` to this folder at the end.")
    ] = None,
    json: Json = False,
) -> int:
    """Quantize MODEL to GPTQ or EXL2 against calibration text, read the result back and measure the damage."""
    rates = _rates(bpw)
    conditions = Gate.parse(gate, DAMAGE_FIGURES)
    if report_folder is not None and (dry_run or len(rates) > 1):
        raise UsageError("`--report` is on one result, which is not made here", hint="use `quantkit eval report`")
    if gate and (no_eval or dry_run or len(rates) > 1):
        raise UsageError("`--gate` judges the damage of one result, which is not measured here", hint="leave it out")
    settings = QuantizeSettings(
        model=model,
        out=out,
        format=format,
        bits=bits,
        group_size=group_size,
        sym=sym,
        act_order=act_order,
        group_aware=group_aware,
        checkpoint_format=checkpoint_format,
        target=target,
        free_group_size=target is not None and _is_left_out(context, "group_size"),
        rule=tuple(rule or ()),
        skip=tuple(skip or ()),
        lm_head=lm_head,
        untie_head=untie_head,
        rotate=rotate,
        effort=effort,
        bpw=rates[0] if rates else None,
        head_bits=head_bits,
        include_head=include_head,
        measurement=measurement,
        plan=plan,
        calibration=calibration,
        samples=samples,
        length=length,
        route_all=route_all,
        hessian_dtype=hessian_dtype,
        seed=seed,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
        strict=strict,
        evaluate=not no_eval,
        judged=gate is not None,
        job=job,
        restart=restart,
        max_memory=memory_bytes("--max-memory", max_memory),
        redo=redo,
        asked=frozenset(name for name in context.params if not _is_left_out(context, name)),
    )
    from quantkit import console

    if dry_run:
        from quantkit.commands.quantization.outlook import foresee

        if len(rates) > 1:
            raise UsageError("`--dry-run` looks at one rate at a time", hint=f"use `--bpw {rates[0]:g}` with it")
        console.print_report(foresee(settings, console.Bars()), as_json=json)
        return 0
    if len(rates) > 1:
        from quantkit.commands.quantization.rates import run_rates

        console.print_report(run_rates(settings, rates, console.Bars()), as_json=json)
        return 0
    from quantkit.commands.quantize import run

    report = run(settings, console.Bars())
    console.print_report(report, as_json=json)
    if report.damage is not None and not json:
        console.print_text(f"\n> {report.damage.prompt}\n{report.damage.answer}")
    if report_folder is not None:
        from quantkit.commands.report import run as report_on

        found = report_on(ReportSettings(model, (str(out),), report_folder, REPORT_TEXT), console.Bars())
        console.say(f"report written to `{found.out}`")
    if report.damage is not None and (failed := conditions.failures(report.damage.figures())):
        console.print_error(f"the result fails its gate: {'; '.join(failed)}", f"it stays in `{out}`: use more bits")
        return GateError.exit_code
    return 0


def _rates(text: str | None) -> list[float]:
    """`3.0,4.0` → numbers. Raises UsageError for anything else."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"`{text}` is no rate", hint="use `--bpw 4.0`, or several as `--bpw 3.0,4.0`") from error


def _is_left_out(context: typer.Context, option: str) -> bool:
    """Whether an option has its default because nobody gave another."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "DEFAULT"
