"""`quantkit eval tasks` beside lm-evaluation-harness, item by item, on the same files.

    python docs/bench/peers/lm_eval.py prepare DIR arc_easy.jsonl piqa.jsonl hellaswag.jsonl lambada_openai.jsonl
    quantkit eval tasks MODEL DIR/*.jsonl --dtype fp32 --save-items DIR/items.jsonl
    # in an environment of its own, with `pip install lm-eval`:
    HF_DATASETS_OFFLINE=1 lm_eval run --model hf --model_args pretrained=MODEL,dtype=float32 --device cpu \\
        --tasks qk_arc_easy,qk_piqa,qk_hellaswag,qk_lambada_openai --include_path DIR --batch_size 8 \\
        --log_samples --output_path DIR/out
    python docs/bench/peers/lm_eval.py compare DIR

The first 500 items of each file unless `--limit` says otherwise. Items have `query`, `choices` and `gold`, or `context`
and `continuation`. `compare` prints, for each task, how many items have the same choice, and the differences of
log-likelihoods in nats.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

CHOICE = """output_type: multiple_choice
doc_to_text: "{{query}}"
doc_to_target: gold
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
LAST_WORD = """output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: "{{' '+continuation}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def prepare(folder: Path, files: list[Path], limit: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        items = folder.resolve() / file.name
        lines = file.read_text(encoding="utf-8").splitlines()[:limit]
        items.write_text("\n".join(lines) + "\n", encoding="utf-8")
        where = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {items}\ntest_split: test\n"
        kind = CHOICE if "choices" in json.loads(lines[0]) else LAST_WORD
        (folder / f"{file.stem}.yaml").write_text(f"task: qk_{file.stem}\n{where}{kind}")


def first_number(answer: object) -> float:
    """A response is a log-likelihood, or one with whether it is what greedy decoding says."""
    while isinstance(answer, list):
        answer = answer[0]
    return float(str(answer))


def best(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def compare(folder: Path) -> None:
    ours: dict[str, list[list[float]]] = {}
    for line in (folder / "items.jsonl").read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        ours.setdefault(item["task"], []).append(item["likelihoods"])
    for task, likelihoods in ours.items():
        samples = sorted(folder.glob(f"out/**/samples_qk_{task}_*.jsonl"))[-1]
        lines = samples.read_text(encoding="utf-8").splitlines()
        documents = sorted(map(json.loads, lines), key=lambda one: one["doc_id"])
        theirs = [[first_number(answer) for answer in one["resps"]] for one in documents]
        items = list(zip(likelihoods, theirs, strict=True))
        same = sum(best(mine) == best(other) for mine, other in items)
        pairs = [pair for item in items for pair in zip(*item, strict=True)]
        off = [abs(mine - other) for mine, other in pairs]
        most = max(range(len(off)), key=off.__getitem__)
        sys.stdout.write(
            f"{task}: {same} of {len(items)} choices the same; {len(off)} log-likelihoods, off by "
            f"{statistics.median(off):.1e} in the median and {off[most]:.1e} at most (of {pairs[most][1]:.0f}), "
            f"{sum(one > 1e-3 for one in off)} by more than 1e-3\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("folder", type=Path)
    preparing.add_argument("files", type=Path, nargs="+")
    preparing.add_argument("--limit", type=int, default=500)
    comparing = commands.add_parser("compare")
    comparing.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.command == "prepare":
        prepare(given.folder, given.files, given.limit)
    else:
        compare(given.folder)


if __name__ == "__main__":
    main()
