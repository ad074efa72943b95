"""The page of a report: one HTML file that needs nothing else, light and dark, for screens of any width and readers."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from quantkit.commands.evaluation.card import number
from quantkit.commands.evaluation.plots import Point, heat_map, lines, scatter

STYLE = """
:root{--back:#fff;--text:#1b1f24;--soft:#57606a;--line:#d0d7de;--card:#f6f8fa;--cell:#0550ae;
--s0:#0550ae;--s1:#bc4c00;--s2:#116329;--s3:#8250df;--s4:#a40e26;--s5:#5c4200;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--back:#0d1117;--text:#e6edf3;--soft:#9da7b3;--line:#3d444d;--card:#161b22;
--cell:#79c0ff;--s0:#79c0ff;--s1:#ffa657;--s2:#7ee787;--s3:#d2a8ff;--s4:#ff9492;--s5:#e3b341}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main,header,footer{max-width:68rem;margin:0 auto;padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;margin:1.5rem 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.25rem;margin:2.25rem 0 .5rem}h3{font-size:1.05rem;margin:1.5rem 0 .5rem;overflow-wrap:anywhere}
p{margin:.5rem 0}.soft{color:var(--soft)}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px;background:var(--card);margin:.75rem 0}
.wide:focus-visible,a:focus-visible,summary:focus-visible{outline:3px solid var(--s0);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.5rem .75rem;color:var(--soft)}
th,td{text-align:left;padding:.4rem .75rem;border-top:1px solid var(--line);vertical-align:top}
th[scope=col]{white-space:nowrap}td.n,th.n{text-align:right;white-space:nowrap}
svg{display:block;width:100%;min-width:34rem;height:auto}
svg text{fill:var(--text);paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round;
font-size:13px;font-family:inherit}
svg .grid{stroke:var(--line);stroke-width:1}svg .level{stroke:var(--soft);stroke-dasharray:6 4;stroke-width:1.5}
svg .front{fill:none;stroke:var(--soft);stroke-width:1.5}svg .cell{fill:var(--cell)}
svg .line{fill:none;stroke-width:2}
code,pre{font:14px/1.5 ui-monospace,monospace;overflow-wrap:anywhere;white-space:pre-wrap}
pre{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.75rem;margin:.5rem 0}
summary{cursor:pointer;padding:.25rem 0}nav ul{padding-left:1.2rem;columns:14rem}a{color:var(--s0)}
.skip{position:absolute;left:-999rem}.skip:focus{position:static}
.bad{color:var(--s4);font-weight:600}.good{color:var(--s2);font-weight:600}
@media print{.wide{overflow:visible}svg{min-width:0}}
""" + "".join(f".s{at}{{stroke:var(--s{at})}}.s{at}.mark{{fill:var(--s{at})}}" for at in range(6))


def page(report: Mapping[str, Any]) -> str:
    """The whole HTML document, from `Report.as_json()`."""
    title = f"{report['reference']['label']}: {_count(len(report['candidates']), 'quantization')}"
    sections = [
        ("summary", "Summary", _summary(report)),
        ("rate", "What the bits buy", _rate(report)),
        ("bits", "Where the bits are", _bits(report)),
        *([("sensitivity", "What would hurt", _sensitivity(report))] if report["sensitivity"] else []),
        ("depth", "Error by depth", _depth(report)),
        ("worst", "Where they differ most", _worst(report)),
        *(
            [("probe", "Long conversations", _probe(report))]
            if any(one["probe"] for one in report["candidates"])
            else []
        ),
        ("again", "How to get this again", _again(report)),
    ]
    links = "".join(f'<li><a href="#{name}">{words}</a></li>' for name, words, _ in sections)
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{words}</h2>{text}</section>'
        for name, words, text in sections
    )
    first = report["candidates"][0]["compared"]
    measured = (
        f"Measured over {escape(first['source'])}: {first['windows']} windows of {first['length']} tokens, "
        f"{first['predictions']} predictions; BOS {'yes' if first['bos'] else 'no'}; {escape(first['dtype'])} on "
        f"{escape(first['device'])}. {escape(first['convention'])}."
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f'<style>{STYLE}</style></head><body><a class="skip" href="#summary">to the figures</a>'
        f'<header><h1>{escape(title)}</h1><p class="soft">{measured}</p>'
        f'<nav aria-label="sections"><ul>{links}</ul></nav></header><main>{body}</main>'
        f'<footer><p class="soft">{escape(", ".join(f"{name} {one}" for name, one in report["versions"].items()))}</p>'
        "</footer></body></html>\n"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = 1) -> str:
    """Cells are HTML already; the first column heads its row, the first `text` columns are words."""
    head = "".join(f'<th scope="col"{"" if at < text else _N}>{escape(one)}</th>' for at, one in enumerate(columns))
    lines_ = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{cell}</th>' if at == 0 else f"<td{'' if at < text else _N}>{cell}</td>"
            for at, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return _wide(
        caption,
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{lines_}</tbody></table>",
    )


_N = ' class="n"'


def _wide(label: str, inside: str) -> str:
    """Something wider than a phone: it scrolls by itself, with the keyboard too."""
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}, scrolls sideways">{inside}</div>'


def _summary(report: Mapping[str, Any]) -> str:
    reference = report["reference"]
    first = report["candidates"][0]["compared"]
    rows = [
        [
            escape(reference["label"]),
            "the reference",
            f"{reference['bits_per_weight']:.3f}",
            _size(reference),
            number(first["perplexity_reference"]),
            "",
            "",
        ]
    ]
    for one in report["candidates"]:
        compared = one["compared"]
        low, high = compared["kl_ci95"]
        rows.append(
            [
                escape(one["label"]),
                escape(one["format"]) + (f", {_verdict(one['probe'])}" if one["probe"] else ""),
                f"{one['bits_per_weight']:.3f}",
                _size(one),
                number(compared["perplexity_candidate"]),
                f'{compared["kl_mean"]:.5f}<br><span class="soft">{low:.5f} to {high:.5f}</span>',
                f"{compared['top1_agreement']:.1%}",
            ]
        )
    columns = ["model", "format", "bits per weight", "MiB", "perplexity", "mean KL, nats (95 %)", "same likeliest"]
    return _table("Each model at a glance; bits count scales and all other side data", columns, rows, text=2)


def _size(model: Mapping[str, Any]) -> str:
    return f"{model['size_bytes'] / 2**20:,.1f}"


def _verdict(probe: Mapping[str, Any]) -> str:
    colour = "good" if probe["verdict"] == "healthy" else "bad"
    return f'<span class="{colour}">{escape(probe["verdict"])}</span>'


def _rate(report: Mapping[str, Any]) -> str:
    perplexity, divergence = [], []
    for one in report["candidates"]:
        compared, bits = one["compared"], one["bits_per_weight"]
        if compared["perplexity_candidate"] is not None:
            perplexity.append(Point(one["label"], bits, compared["perplexity_candidate"]))
        divergence.append(Point(one["label"], bits, max(compared["kl_mean"], 1e-9), *compared["kl_ci95"]))
    before = report["candidates"][0]["compared"]["perplexity_reference"]
    level = None if before is None else ("reference", before)
    x = "bits per weight, side data included"
    plots = [scatter("plot-kl", "Mean KL against bits", x, "mean KL, nats", divergence, log=True)]
    if perplexity:
        spread = max(point.y for point in perplexity) > 4 * (before or 1)
        plots.insert(
            0,
            scatter("plot-perplexity", "Perplexity against bits", x, "perplexity", perplexity, log=spread, level=level),
        )
    words = '<p class="soft">The line joins those that no other candidate beats with fewer bits.</p>'
    return words + "".join(
        _wide(name, plot) for name, plot in zip(("perplexity", "KL")[-len(plots) :], plots, strict=True)
    )


def _bits(report: Mapping[str, Any]) -> str:
    return "".join(
        f"<h3>{escape(one['label'])}</h3>"
        + _wide(
            f"bits of {one['label']}",
            heat_map(f"plot-bits-{at}", f"Bits of {one['label']}", "bits per weight", *_grid(one["bits"])),
        )
        + _details(one["label"], "bits per weight", one["bits"])
        for at, one in enumerate(report["candidates"])
    )


def _grid(values: Mapping[str, Sequence[float | None]]) -> tuple[list[str], list[Sequence[float | None]]]:
    return [kind.rpartition(".")[2] for kind in values], list(values.values())


def _details(name: str, unit: str, values: Mapping[str, Sequence[float | None]]) -> str:
    """The same figures as a table."""
    columns = ["block", *(kind.rpartition(".")[2] for kind in values)]
    rows = [
        [str(block), *("" if row[block] is None else f"{row[block]:.4g}" for row in values.values())]
        for block in range(max(len(row) for row in values.values()))
    ]
    return f"<details><summary>as a table</summary>{_table(f'{unit}, {name}', columns, rows)}</details>"


def _sensitivity(report: Mapping[str, Any]) -> str:
    found = report["sensitivity"]
    plot = heat_map(
        "plot-sensitivity", "Damage of each linear near four bits", found["unit"], *_grid(found["damage"]), log=True
    )
    words = '<p class="soft">What each linear alone would do to the predictions in its layout nearest to four bits.</p>'
    return words + _wide("sensitivity", plot) + _details("sensitivity", found["unit"], found["damage"])


def _depth(report: Mapping[str, Any]) -> str:
    series = [(one["label"], one["depth"]) for one in report["candidates"]]
    plot = lines("plot-depth", "Error of the residual stream by depth", "block", "relative error", series)
    columns = ["block", *(label for label, _ in series)]
    rows = [[str(at), *(f"{row[at]:.4g}" for _, row in series)] for at in range(len(series[0][1]))]
    table = _table("relative error behind each block", columns, rows)
    words = (
        '<p class="soft">Norm of the difference by the norm of the reference, behind each block, over one window.</p>'
    )
    return words + _wide("error by depth", plot) + f"<details><summary>as a table</summary>{table}</details>"


def _worst(report: Mapping[str, Any]) -> str:
    parts = []
    for one in report["candidates"]:
        rows = [
            [
                f"{word['kl']:.3f}",
                f"…{escape(word['context'])}<strong>{escape(word['target'])}</strong>",
                f"{word['probability_reference']:.1%} → {word['probability_candidate']:.1%}",
                _said(word["reference_says"]),
                _said(word["candidate_says"]),
            ]
            for word in one["compared"]["worst"]
        ]
        columns = ["KL", "text, with what follows", "its probability", "reference says", "candidate says"]
        parts.append(_table(f"Predictions of {one['label']} furthest from the reference", columns, rows, text=5))
    return "".join(parts)


def _said(choice: Mapping[str, Any]) -> str:
    return f"<code>{escape(repr(choice['text']))}</code> {choice['probability']:.0%}"


def _probe(report: Mapping[str, Any]) -> str:
    rows, texts = [], []
    for one in report["candidates"]:
        probe = one["probe"]
        if probe is None:
            continue
        for form in probe["formats"]:
            rows.append(
                [
                    escape(one["label"]),
                    _verdict(form),
                    escape(form["format"]),
                    f"{form['loop_rate']:.1%}",
                    f"{form['looping']} of {form['conversations']}",
                    f"{form['stutter_rate']:.1%}",
                    "" if form["kl"] is None else f"{form['kl']:.4f}",
                ]
            )
            texts += [f"<li>{escape(one['label'])}: {escape(finding)}</li>" for finding in form["findings"]]
    columns = ["candidate", "verdict", "cache", "loop rate", "looping", "stutter", "KL, nats"]
    found = f"<ul>{''.join(texts)}</ul>" if texts else ""
    return (
        _table("Conversations with the model, greedy and sampled, beside the reference's", columns, rows, text=3)
        + found
    )


def _again(report: Mapping[str, Any]) -> str:
    rows = [
        [escape(one["label"]), f"<code>{one['fingerprint']}</code>"]
        for one in (report["reference"], *report["candidates"])
    ]
    commands = [one["command"] for one in report["candidates"] if one["command"]]
    text = "\n".join([*commands, report["command"]])
    return (
        _table("SHA-256 over all tensors of a model, by name", ["model", "fingerprint"], rows, text=2)
        + f"<pre>{escape(text)}</pre>"
    )
