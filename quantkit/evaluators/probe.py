"""The degeneration probe: bundled conversations over a cache, what is wrong with them, and whether that is too much.

A model alone is judged by what it says when tokens are sampled, on the prompts that a healthy small model then answers
without loops; beside a reference on all conversations, by what it does worse. `LIMITS` were set so that
SmolLM2-135M-Instruct and its 4-bit quantizations are well inside: see docs/results/evaluation.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.evaluators.conversation import Conversation, Frame, Prompt, converse, read_again, read_whole
from quantkit.evaluators.degeneration import Symptoms, divergence_point, examine
from quantkit.evaluators.divergence import divergences
from quantkit.models.transformer import Model
from quantkit.progress import Progress, Silent
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.sampler import Sampling

TOKENS = 400
"""What a model says in one conversation."""
WAYS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, min_p=0.05)}
LOOPING = 0.2
"""A conversation with a larger share of looped tokens is a looping one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is too much.

    looping    share of looping conversations
    stutter    mean share of tokens that say again what stands right before them
    entropy    mean entropy in nats, lowest and highest
    early      share of long answers that end too early
    missing    share of short answers that never end
    excess     loop rate, and stutter rate, above those of the reference
    kl         mean teacher-forced KL from the reference over its own conversations, in nats
    """

    looping: float = 0.3
    stutter: float = 0.2
    entropy: tuple[float, float] = (0.1, 3.5)
    early: float = 0.5
    missing: float = 0.5
    excess: float = 0.15
    kl: float = 0.5


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Talk:
    """One finished conversation, examined.

    way       how tokens were chosen, a key of `WAYS`
    found     whether its first answer has what the prompt looks for; None where it looks for nothing
    diverges  the first token that the reference has otherwise, in greedy conversations beside one; None where none
    kl        mean KL from the reference over the reference's conversation; None where the reference said nothing
    """

    prompt: Prompt
    way: str
    conversation: Conversation
    symptoms: Symptoms
    found: bool | None
    diverges: int | None = None
    kl: float | None = None

    @property
    def looping(self) -> bool:
        return self.symptoms.loop_rate > LOOPING


@dataclass(frozen=True, slots=True)
class FormatResult:
    """A model over one cache format.

    streamed  pages that went between the tiers of the cache; None where all positions are resident
    findings  what is too much, in words; none in a healthy one
    judged    False where there was nothing to judge by: no prompt that tells something alone, or no answer of the
              reference
    ran       False where a resident window was asked for and nothing had to be streamed
    """

    label: str
    talks: tuple[Talk, ...]
    streamed: int | None
    findings: tuple[str, ...]
    loop_excess: float | None = None
    kl: float | None = None
    judged: bool = True

    @property
    def ran(self) -> bool:
        return self.streamed != 0

    @property
    def verdict(self) -> str:
        if self.ran and self.findings:
            return "degenerate"
        return "healthy" if self.ran and self.judged else "not run"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the verdict is not `healthy`, in words."""
        if not self.ran:
            return ("not run: all positions stayed resident",)
        nothing = "nothing to judge by: no prompt fits that tells something alone, or the reference says nothing"
        return (*self.findings, *(() if self.judged else (nothing,)))

    @property
    def loop_rate(self) -> float:
        return mean([talk.symptoms.loop_rate for talk in self.talks])

    @property
    def diverges(self) -> float | None:
        """Median of the divergence points of greedy conversations; those that never diverge count with their length."""
        points = [
            talk.symptoms.tokens if talk.diverges is None else talk.diverges
            for talk in self.talks
            if talk.kl is not None
        ]
        return float(torch.tensor(points, dtype=torch.float64).median()) if points else None


def talk_all(
    model: Model,
    frame: Frame,
    prompts: Sequence[Prompt],
    cache: CachePlan,
    progress: Progress | None = None,
    *,
    seed: int = 0,
    tokens: int = TOKENS,
    ways: Sequence[str] = tuple(WAYS),
) -> tuple[list[Talk], int]:
    """Every prompt in each way, examined; and the pages streamed. Raises what `converse` raises."""
    plan = [(prompt, way) for way in ways for prompt in prompts]
    conversations = [
        Conversation.begin(prompt, frame, WAYS[way], seed + index, tokens) for index, (prompt, way) in enumerate(plan)
    ]
    streamed = converse(model, conversations, frame, cache, progress)
    talks = []
    for (prompt, way), one in zip(plan, conversations, strict=True):
        symptoms = examine(one.answers, prompt.least_tokens, prompt.short)
        talks.append(Talk(prompt, way, one, symptoms, prompt.found_in(one.answers[0].text)))
    return talks, streamed


def probe(
    model: Model,
    frame: Frame,
    prompts: Sequence[Prompt],
    cache: CachePlan,
    progress: Progress | None = None,
    reference: tuple[Model, Sequence[Talk]] | None = None,
    *,
    seed: int = 0,
    tokens: int = TOKENS,
    limits: Limits = LIMITS,
) -> FormatResult:
    """One cache format, judged alone or beside a reference: that model and its talks over the same prompts."""
    talks, streamed = talk_all(model, frame, prompts, cache, progress, seed=seed, tokens=tokens)
    label, pages = cache.label(model), streamed if cache.resident else None
    if reference is None:
        judged = any(tells_alone(talk) for talk in talks)
        return FormatResult(label, tuple(talks), pages, judge_alone(talks, limits), judged=judged)
    original, theirs = reference
    beside = []
    with (progress or Silent()).task("reading the reference's answers", total=len(talks)) as task:
        for talk, other in zip(talks, theirs, strict=True):
            beside.append(_beside(model, talk, original, other, cache) if talk.way == "greedy" else talk)
            task.advance()
    excess = mean([talk.symptoms.loop_rate for talk in talks]) - mean([talk.symptoms.loop_rate for talk in theirs])
    values = [talk.kl for talk in beside if talk.kl is not None]
    kl = mean(values) if values else None
    findings = judge_beside(talks, theirs, kl, limits)
    return FormatResult(label, tuple(beside), pages, findings, excess, kl, judged=kl is not None)


def _beside(model: Model, talk: Talk, original: Model, other: Talk, cache: CachePlan) -> Talk:
    """A greedy talk with what the reference says of it."""
    mine, theirs = ([index for answer in one.conversation.answers for index in answer.ids] for one in (talk, other))
    vocab = min(original.config.vocab_size, model.config.vocab_size)
    kl = None
    if any(other.conversation.answered):  # else the reference has nothing to say of this talk
        right, ours = read_whole(original, other.conversation), read_again(model, other.conversation, cache)
        kl = float(divergences(right[:, :vocab], ours[:, :vocab]).mean())
    return Talk(
        talk.prompt,
        talk.way,
        talk.conversation,
        talk.symptoms,
        talk.found,
        divergence_point(mine, theirs),
        kl,
    )


def tells_alone(talk: Talk) -> bool:
    """Whether a talk tells something without a reference."""
    return talk.prompt.alone and talk.way == "sampled"


def judge_alone(talks: Sequence[Talk], limits: Limits = LIMITS) -> tuple[str, ...]:
    """What is too much in a model's own talks. Short answers must end whatever the prompt and the way."""
    judged = [talk.symptoms for talk in talks if tells_alone(talk)]
    looping = mean([found.loop_rate > LOOPING for found in judged])
    stutter = mean([found.stutter_rate for found in judged])
    entropy = mean([found.entropy for found in judged])
    early, missing = wrong_ends([talk for talk in talks if talk.prompt.alone or talk.prompt.short])
    low, high = limits.entropy
    findings = []
    if looping > limits.looping:
        findings.append(f"{looping:.0%} of the conversations loop, at most {limits.looping:.0%} is healthy")
    if stutter > limits.stutter:
        findings.append(f"{stutter:.0%} of the tokens stutter, at most {limits.stutter:.0%} is healthy")
    if early > limits.early:
        findings.append(f"{early:.0%} of the long answers end too early, at most {limits.early:.0%} is healthy")
    if missing > limits.missing:
        findings.append(f"{missing:.0%} of the short answers never end, at most {limits.missing:.0%} is healthy")
    if judged and not low <= entropy <= high:
        findings.append(f"mean entropy is {entropy:.2f} nats, {low} to {high} is healthy")
    return tuple(findings)


def judge_beside(
    talks: Sequence[Talk], theirs: Sequence[Talk], kl: float | None, limits: Limits = LIMITS
) -> tuple[str, ...]:
    """What is too much above the reference, over all prompts; `kl` is None where there is none."""
    findings = []
    for name in ("loop_rate", "stutter_rate"):
        mine, other = (mean([getattr(talk.symptoms, name) for talk in each]) for each in (talks, theirs))
        if mine - other > limits.excess:
            findings.append(
                f"{name.replace('_', ' ')} {mine:.0%} against {other:.0%} of the reference, at most "
                f"{limits.excess:.0%} more is healthy"
            )
    if kl is not None and kl > limits.kl:
        findings.append(f"KL {kl:.2f} nats over the reference's answers, at most {limits.kl} is healthy")
    words = ("long answers end too early", "short answers never end")
    each_limit = (limits.early, limits.missing)
    for what, mine, other, limit in zip(words, wrong_ends(talks), wrong_ends(theirs), each_limit, strict=True):
        if mine - other > limit:
            findings.append(f"{mine:.0%} of the {what}, {other:.0%} with the reference")
    return tuple(findings)


def wrong_ends(talks: Sequence[Talk]) -> tuple[float, float]:
    """Share of the long answers that end too early, and of the short ones that never end."""
    early = mean([talk.symptoms.early_stop for talk in talks if not talk.prompt.short])
    return early, mean([talk.symptoms.missing_stop for talk in talks if talk.prompt.short])


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0
