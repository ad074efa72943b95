"""`quantkit eval degeneration`: long conversations over every cache format asked for, and whether they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.evaluate import Loader
from quantkit.errors import CheckpointError, GateError, RequestError
from quantkit.evaluators.conversation import Frame, Prompt, bundled_prompts, most_positions
from quantkit.evaluators.probe import LIMITS, TOKENS, FormatResult, Talk, mean, probe, talk_all, tells_alone
from quantkit.progress import Progress
from quantkit.runtime.cache_format import cache_format, require_distinct
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import DegenerationSettings


@dataclass(frozen=True, slots=True)
class DegenerationReport:
    """What the probe found, format by format."""

    model: str
    reference: str | None
    formats: tuple[FormatResult, ...]
    tokens: int
    seed: int
    placement: Placement
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """`degenerate` when one format is, else `not run` when one did not run, else `healthy`."""
        verdicts = {result.verdict for result in self.formats}
        return next(word for word in ("degenerate", "not run", "healthy") if word in verdicts)

    @property
    def exit_code(self) -> int:
        """0 for a healthy model, else that of a failed check: what did not run was not shown to be healthy."""
        return 0 if self.verdict == "healthy" else GateError.exit_code

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and what limits the verdict."""
        short = f"degeneration shows late: conversations of less than {TOKENS} tokens prove little"
        return (*self.notes, *((short,) if self.tokens < TOKENS else ()))

    COLUMNS = (
        "cache",
        "verdict",
        "loop rate",
        "looping",
        "stutter",
        "entropy",
        "checks",
        "excess",
        "KL",
        "diverges at",
    )

    def rows(self) -> list[list[str]]:
        """A row for each cache format."""
        return [
            [
                result.label,
                result.verdict,
                f"{result.loop_rate:.1%}",
                f"{sum(talk.looping for talk in result.talks)} of {len(result.talks)}",
                f"{mean([talk.symptoms.stutter_rate for talk in result.talks]):.1%}",
                f"{mean([talk.symptoms.entropy for talk in result.talks]):.2f}",
                "{} of {}".format(*checks(result)),
                "" if result.loop_excess is None else f"{result.loop_excess:+.1%}",
                "" if result.kl is None else f"{result.kl:.4f}",
                "" if result.diverges is None else f"{result.diverges:.0f}",
            ]
            for result in self.formats
        ]

    def facts(self) -> list[list[str]]:
        """Why, and what defines the figures."""
        findings = [
            [f"cache {result.label}", reason]
            for result in self.formats
            for reason in result.reasons
        ]
        judged = (
            "beside the reference, on all prompts"
            if self.reference
            else "alone, by sampled answers to prompts on which healthy small models do not loop"
        )
        return [
            *findings,
            ["judged", judged],
            [
                "conversations",
                f"{len(self.formats[0].talks)} of {self.tokens} tokens, greedy and sampled, seed {self.seed}",
            ],
            ["arithmetic", f"{self.placement.dtype_name} on {self.placement.device}, backend {self.placement.backend}"],
            *(["note", note] for note in self.remarks),
        ]

    def as_json(self) -> dict[str, Any]:
        worst = max((result for result in self.formats if result.ran), key=lambda one: one.loop_rate, default=None)
        return {
            "model": self.model,
            "reference": self.reference,
            "verdict": self.verdict,
            "loop_rate": None if worst is None else worst.loop_rate,
            "tokens": self.tokens,
            "seed": self.seed,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
            "limits": {
                "looping": LIMITS.looping,
                "stutter": LIMITS.stutter,
                "entropy": list(LIMITS.entropy),
                "early": LIMITS.early,
                "missing": LIMITS.missing,
                "excess": LIMITS.excess,
                "kl": LIMITS.kl,
            },
            "formats": [_format_json(result) for result in self.formats],
            "prompts": [_talk_json(result.label, talk) for result in self.formats for talk in result.talks],
            "notes": list(self.remarks),
        }


def checks(result: FormatResult) -> tuple[int, int]:
    """Needles and short answers that were found, and how many were looked for."""
    looked = [talk.found for talk in result.talks if talk.found is not None]
    return sum(looked), len(looked)


def _format_json(result: FormatResult) -> dict[str, Any]:
    found, looked = checks(result)
    return {
        "format": result.label,
        "verdict": result.verdict,
        "findings": list(result.findings),
        "loop_rate": result.loop_rate,
        "looping": sum(talk.looping for talk in result.talks),
        "conversations": len(result.talks),
        "stutter_rate": mean([talk.symptoms.stutter_rate for talk in result.talks]),
        "entropy": mean([talk.symptoms.entropy for talk in result.talks]),
        "distinct_4": mean([talk.symptoms.distinct_4 for talk in result.talks]),
        "checks_found": found,
        "checks": looked,
        "loop_excess": result.loop_excess,
        "kl": result.kl,
        "diverges_at": result.diverges,
        "pages_streamed": result.streamed,
    }


def _talk_json(label: str, talk: Talk) -> dict[str, Any]:
    found = talk.symptoms
    return {
        "format": label,
        "prompt": talk.prompt.name,
        "kind": talk.prompt.kind,
        "way": talk.way,
        "judged_alone": tells_alone(talk),
        "tokens": found.tokens,
        "answers": len(talk.conversation.answers),
        "loop_rate": found.loop_rate,
        "loops": [{"start": one.start, "period": one.period, "tokens": one.length} for one in found.loops],
        "stutter_rate": found.stutter_rate,
        "distinct_4": found.distinct_4,
        "entropy": found.entropy,
        "collapsed_rate": found.collapsed_rate,
        "early_stop": found.early_stop,
        "missing_stop": found.missing_stop,
        "found": talk.found,
        "diverges_at": talk.diverges,
        "kl": talk.kl,
        "text": [answer.text for answer in talk.conversation.answers],
    }


def run(
    settings: DegenerationSettings, progress: Progress, load: Loader = load_model
) -> DegenerationReport:
    """Probe a model; `load` gives it, and its reference, once all else is checked.

    Raises CheckpointError for the models' files, UsageError for settings, RequestError for a context that is too short,
    GateError when logits are no finite numbers.
    """
    require_distinct(settings.kv)
    placement = Placement.choose(settings.device, settings.dtype)
    checkpoint = open_checkpoint(settings.model)
    original = None if settings.reference is None else open_checkpoint(settings.reference)
    caches = [CachePlan(name, resident=settings.kv_resident) for name in settings.kv or (None,)]
    for cache in caches:  # refused before the weights are read
        cache_format(cache.kv, checkpoint.model_config.head_dim, placement.dtype)
    tokenizer = Tokenizer.open(checkpoint.path)
    prompts, follow_ups = bundled_prompts(settings.quick)
    frame = Frame(tokenizer, follow_ups)
    prompts, notes = _fitting(prompts, frame, settings, checkpoint, original)
    model = load(checkpoint, placement.device, placement.dtype)
    reference = None
    if original is not None:
        other = load(original, placement.device, placement.dtype)
        talks, _ = talk_all(other, frame, prompts, CachePlan(), progress, seed=settings.seed, tokens=settings.tokens)
        reference = (other, talks)
    results = tuple(
        probe(model, frame, prompts, cache, progress, reference, seed=settings.seed, tokens=settings.tokens)
        for cache in caches
    )
    notes = (*checkpoint.notes, *notes)
    return DegenerationReport(
        settings.model, settings.reference, results, settings.tokens, settings.seed, placement, notes
    )


def _fitting(
    prompts: Sequence[Prompt],
    frame: Frame,
    settings: DegenerationSettings,
    checkpoint: Checkpoint,
    original: Checkpoint | None,
) -> tuple[tuple[Prompt, ...], tuple[str, ...]]:
    """Prompts that the context of both models has room for, and a note on those left out. Raises CheckpointError for
    models that read text differently, RequestError where no prompt fits."""
    context = checkpoint.model_config.context
    if original is not None:
        context = min(context, original.model_config.context)
        texts = [prompt.text for prompt in prompts]
        theirs = Tokenizer.open(original.path)
        if [theirs.encode(text) for text in texts] != [frame.tokenizer.encode(text) for text in texts]:
            raise CheckpointError(
                f"`{checkpoint.path}` and `{original.path}` split text into different tokens, so that their answers "
                "cannot be compared",
                hint="name the model that the candidate was made from as `--reference`",
            )
    fitting = tuple(one for one in prompts if most_positions(one, frame, settings.tokens) <= context)
    if not fitting:
        least = min(most_positions(one, frame, settings.tokens) for one in prompts)
        raise RequestError(
            f"conversations of {settings.tokens} tokens take up to {least} positions, the context has {context}",
            hint=f"--tokens {max(16, settings.tokens - (least - context))}",
        )
    left_out = [one.name for one in prompts if one not in fitting]
    note = f"left out, too long for a context of {context}: {', '.join(left_out)}"
    return fitting, (note,) if left_out else ()
