"""The model card of a candidate: Markdown to publish with its weights, nothing in it that was not measured."""

import json
from collections.abc import Mapping
from typing import Any

from quantkit.commands.quantization.resumption import redone


def card(report: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """From `Report.as_json()` and one of its candidates."""
    reference, compared = report["reference"], candidate["compared"]
    rows = [
        ("bits per weight, side data included", f"{candidate['bits_per_weight']:.4f}"),
        ("size", f"{candidate['size_bytes'] / 2**20:,.1f} MiB, {reference['size_bytes'] / 2**20:,.1f} MiB before"),
        (
            "perplexity",
            f"{number(compared['perplexity_candidate'])}, {number(compared['perplexity_reference'])} before",
        ),
        ("mean KL", f"{compared['kl_mean']:.5f} nats ({compared['kl_ci95'][0]:.5f} to {compared['kl_ci95'][1]:.5f})"),
        ("KL, 99th percentile", f"{compared['kl_p99']:.4f} nats"),
        ("same likeliest token", f"{compared['top1_agreement']:.2%}"),
    ]
    if candidate["probe"] is not None:
        probe = candidate["probe"]
        rows.append(("degeneration probe", f"{probe['verdict']}, loop rate {probe['loop_rate']:.1%}"))
    made_by = [f"    {candidate['command']}"] if candidate["command"] else ["    not recorded in the folder"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            "---",
            f"base_model: {json.dumps(reference['label'], ensure_ascii=False)}",
            "library_name: quantkit",
            "tags:",
            f"- {candidate['format']}",
            "- quantized",
            "---",
            "",
            f"# {candidate['label']}",
            "",
            f"`{reference['label']}`, quantized to {candidate['format']} with quantkit.",
            "",
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            f"Measured over {compared['source']}: {compared['windows']} windows of {compared['length']} tokens, "
            f"{compared['predictions']} predictions, BOS {'yes' if compared['bos'] else 'no'}, {compared['dtype']}; "
            f"{compared['convention']}.",
            "",
            "## Origin",
            "",
            f"- reference: sha256 over all tensors `{reference['fingerprint']}`",
            f"- this model: sha256 over all tensors `{candidate['fingerprint']}`",
            f"- calibration: {_calibration(candidate['made_with'])}",
            *(f"- redone since: {_redone(entry)}" for entry in redone(candidate["made_with"])),
            f"- measured with {versions}",
            "",
            "## Again",
            "",
            *made_by,
            f"    {report['command']}",
            "",
        ]
    )


def number(value: float | None) -> str:
    """A figure that JSON may have lost."""
    return "infinite" if value is None else f"{value:.4f}"


def _redone(entry: Mapping[str, Any]) -> str:
    count = entry.get("linears")
    linears = "1 linear" if count == 1 else f"{count} linears"
    return f"{linears} that match `{entry['facts'].get('redo')}`, {_calibration(entry['facts'])}"


CALIBRATED = ("gptq-to-exl2", "exl2-to-gptq")
"""Conversions that read text unless told not to."""


def _calibration(made: Mapping[str, Any]) -> str:
    """What the folder's own record says of it."""
    if not made:
        return "not known"
    versions = f"quantkit {made.get('quantkit')}, torch {made.get('torch')}"
    tokens = f"{made.get('samples')} × {made.get('length')} tokens"
    read = f"{tokens} of `{made.get('calibration')}`, seed {made.get('seed')}"
    command = str(made.get("command"))
    if command.startswith("convert"):
        calibrated = made.get("route") in CALIBRATED and not made.get("data_free")
        return f"{read if calibrated else 'no text'}, by `quantkit {command}`, {versions}"
    text = "no text" if made.get("effort") == "nearest" else read
    return f"{text}, effort `{made.get('effort')}`, {versions}"
