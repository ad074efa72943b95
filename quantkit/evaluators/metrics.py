"""What an answer is worth: exact match and F1 by the rules of SQuAD, BLEU and chrF by sacrebleu, metrics of others.

A metric for answers is a function of one answer and the right ones: `metric(answer, right) -> float`. Others join by an
entry point in the group `quantkit.metrics`:

    [project.entry-points."quantkit.metrics"]
    digits = "my_package.metrics:digits"
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

from quantkit.errors import UsageError

Metric = Callable[[str, Sequence[str]], float]
GROUP = "quantkit.metrics"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over items with its standard error; None where there is none."""

    value: float
    error: float | None

    @classmethod
    def mean(cls, values: Sequence[float]) -> "Figure":
        """Standard error: the deviation of the sample by the root of its size."""
        count = len(values)
        mean = sum(values) / count
        if count < 2:
            return cls(mean, None)
        return cls(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count))


def normalise(text: str) -> str:
    """Lower case, without punctuation and English articles, words apart by one space (SQuAD, arXiv:1606.05250, 6.1)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 where the answer is one of the right ones after `normalise`."""
    return float(any(normalise(answer) == normalise(one) for one in right))


def f1(answer: str, right: Sequence[str]) -> float:
    """The best harmonic mean of precision and recall of words. An answer of no words is right where no words are."""
    return max((_f1(normalise(answer).split(), normalise(one).split()) for one in right), default=0.0)


def _f1(answer: list[str], right: list[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    shared = sum((Counter(answer) & Counter(right)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(answer), shared / len(right)
    return 2 * precision * recall / (precision + recall)


def answer_metrics(extra: Sequence[str] = ()) -> dict[str, Metric]:
    """Exact match and F1, and those of `extra` that were installed as entry points.

    Raises UsageError for a name that there is not, or that is no function.
    """
    metrics: dict[str, Metric] = {"exact_match": exact_match, "f1": f1}
    if not extra:
        return metrics
    installed = {point.name: point for point in entry_points(group=GROUP)}
    for name in extra:
        if name in metrics:
            continue
        if name not in installed:
            known = ", ".join([*metrics, *sorted(installed)])
            raise UsageError(
                f"there is no metric `{name}`, only {known}",
                hint=f"install a package with the entry point group `{GROUP}`",
            )
        try:
            metric = installed[name].load()
        except Exception as error:  # of foreign code
            raise UsageError(
                f"metric `{name}` cannot be loaded from `{installed[name].value}`: {error}", hint="install it again"
            ) from error
        if not callable(metric):
            raise UsageError(
                f"metric `{name}` is a {type(metric).__name__}, not a function", hint="metric(answer, right) -> float"
            )
        metrics[name] = metric
    return metrics


def score_answers(
    answers: Sequence[str], right: Sequence[Sequence[str]], metrics: Mapping[str, Metric]
) -> dict[str, Figure]:
    """Each metric over all answers."""
    pairs = list(zip(answers, right, strict=True))
    return {name: Figure.mean([float(metric(*pair)) for pair in pairs]) for name, metric in metrics.items()}


def translation_figures(answers: Sequence[str], right: Sequence[str]) -> dict[str, Figure]:
    """Corpus BLEU and chrF, 0 to 100, each with the deviation of `RESAMPLES` bootstrap samples as its standard error.

    Raises UsageError where sacrebleu is not installed.
    """
    library = sacrebleu()
    figures = {}
    for name, metric in (("bleu", library.BLEU()), ("chrf", library.CHRF())):
        whole = metric.corpus_score(list(answers), [list(right)]).score
        figures[name] = Figure(whole, _bootstrap_error(metric, answers, right))
    return figures


def translation_signature() -> str:
    """What sacrebleu asks to be stated with a BLEU."""
    library = sacrebleu()
    metric = library.BLEU()
    metric.corpus_score(["a b c d"], [["a b c d"]])
    return str(metric.get_signature())


def sacrebleu() -> ModuleType:
    """Its metrics. Raises UsageError where it is not installed."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise UsageError(
            "translation is scored by sacrebleu, which is not installed", hint="pip install 'quantkit[tasks]'"
        ) from error
    return metrics


RESAMPLES = 100


def _bootstrap_error(metric: object, answers: Sequence[str], right: Sequence[str]) -> float | None:
    """Deviation of the score over samples of the sentences drawn with replacement (Koehn 2004)."""
    import random

    count = len(answers)
    if count < 2:
        return None
    draws = random.Random(0)
    scores = []
    for _ in range(RESAMPLES):
        chosen = [draws.randrange(count) for _ in range(count)]
        sample = metric.corpus_score([answers[at] for at in chosen], [[right[at] for at in chosen]])  # type: ignore[attr-defined]
        scores.append(sample.score)
    mean = sum(scores) / RESAMPLES
    return math.sqrt(sum((score - mean) ** 2 for score in scores) / (RESAMPLES - 1))
