"""SavedReference: what a model predicts over a text, in at most a fiftieth of its float16 logits.

Of each prediction the likeliest ids are kept with their log-probabilities, the mass of all others, and a sample of
those, drawn in proportion to their probability. The divergence of a candidate follows, with `K` the kept ids and `T`
the rest:

    KL = Σ_{i in K} p_i (ln p_i - ln q_i)  +  p(T) · mean over the sample of (ln p_i - ln q_i)

The first term is exact; the second is estimated (systematic sampling: Cochran, Sampling Techniques, chapter 8), and the
spread inside the samples gives the error that is stated. Log-probabilities are stored in 16 bits of the range of their
prediction and made to sum to one again when they are read, so that a model does not diverge from itself. Every tensor
has its digest in the file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from quantkit.checkpoint.durable import write_file
from quantkit.checkpoint.receipt import digest_of
from quantkit.errors import CheckpointError
from quantkit.evaluators.divergence import Divergence, Scores, compare_piece, pieces, top_ids, top_overlap
from quantkit.models.transformer import Model
from quantkit.progress import Progress

FORMAT = "quantkit reference 2"
DIGESTS = "sha256 "
"""A fact of this name, with that of a tensor behind it, is the tensor's digest; behind `facts` that of all facts."""
SHARE = 0.0195
"""Of the bytes of float16 logits; what is left of a fiftieth is for the header."""
LEAST_ENTRIES = 24
"""Kept however small the vocabulary is: of one below 12,000 ids the file is more than a fiftieth."""
TOP_SHARE = 2 / 3
"""Of the entries; the others are the sample."""
LEVELS = 65535
FIXED_BYTES = 16  # of a prediction: mass of the rest, range, loss, its token


@dataclass(frozen=True, slots=True)
class SavedReference:
    """Predictions of one model over windows of tokens; `n` predictions in each.

    windows  int64 [windows, L]
    ids      int32 [windows, n, entries]: the `top` likeliest in order, then the sample
    codes    int16 [windows, n, entries]: -ln p in steps of `range / LEVELS`, less 32768
    range    float32 [windows, n]: the largest -ln p of the prediction's entries
    rest     float32 [windows, n]: the probability of all ids but the likeliest
    loss     float32 [windows, n]: -ln p of the token that follows
    self_kl  mean KL of the model from what is kept of it; what rounding costs
    about    what made it, in words: model, text, arithmetic, BOS and so on
    """

    windows: Tensor
    first: int
    vocab: int
    top: int
    ids: Tensor
    codes: Tensor
    range: Tensor
    rest: Tensor
    loss: Tensor
    self_kl: float
    about: Mapping[str, str]

    @property
    def predictions(self) -> int:
        return self.loss.numel()

    @property
    def share(self) -> float:
        """Bytes of all tensors by those of the logits in float16."""
        tensors = self.tensors().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / (self.predictions * 2 * self.vocab)

    def tensors(self) -> dict[str, Tensor]:
        """As they are stored; ids of a small vocabulary take two bytes."""
        ids = self.ids.to(torch.int32)
        if self.vocab <= 1 << 16:
            ids = (ids - (1 << 15)).to(torch.int16)
        return {
            "windows": self.windows.to(torch.int32),
            "ids": ids,
            "codes": self.codes,
            "range": self.range,
            "rest": self.rest,
            "loss": self.loss,
        }

    def save(self, path: Path) -> None:
        """Written whole or not at all; a file of that name is replaced. Raises CheckpointError where it cannot be."""
        facts = {"format": FORMAT, "first": str(self.first), "vocab": str(self.vocab), "top": str(self.top)}
        facts = {**self.about, **facts, "self_kl": repr(self.self_kl)}
        tensors = self.tensors()
        part = path.with_name(f"{path.name}.part")
        try:
            part.unlink(missing_ok=True)
            write_file(part, safetensors.torch.save(tensors, {**facts, **_digests(facts, tensors)}))
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise CheckpointError(
                f"`{path}` cannot be written: {error.strerror}", hint="name a file in a folder that you may write to"
            ) from error

    @classmethod
    def load(cls, path: Path) -> "SavedReference":
        """Raises CheckpointError for a file that is none, or that is damaged."""
        hint = "make it again with `quantkit eval compare MODEL --save-reference FILE`"
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = dict(file.metadata() or {})
                if about.get("format") != FORMAT:
                    raise CheckpointError(
                        f"`{path}` is no saved reference: its format is {about.get('format')!r}, expected {FORMAT!r}",
                        hint="make one with `quantkit eval compare MODEL --save-reference FILE`",
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (safetensors.SafetensorError, OSError) as error:
            raise CheckpointError(
                f"`{path}` cannot be read as a saved reference: {error}",
                hint=hint,
            ) from error
        said = {name: about.pop(name) for name in list(about) if name.startswith(DIGESTS)}
        digests = _digests(about, tensors)
        if changed := sorted(name for name in said.keys() | digests.keys() if said.get(name) != digests.get(name)):
            what = ", ".join(f"`{name.removeprefix(DIGESTS)}`" for name in changed)
            raise CheckpointError(f"`{path}` is a damaged saved reference: {what} is not what was saved", hint=hint)
        try:
            first, vocab, top = (int(about.pop(key)) for key in ("first", "vocab", "top"))
            self_kl = float(about.pop("self_kl"))
            windows, ids = tensors["windows"].to(torch.int64), tensors["ids"].to(torch.int32)
            if vocab <= 1 << 16:
                ids += 1 << 15
            codes, widest, rest, loss = (tensors[name] for name in ("codes", "range", "rest", "loss"))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"`{path}` is a damaged saved reference: {error!r}", hint=hint) from error
        del about["format"]
        found = cls(windows, first, vocab, top, ids, codes, widest, rest, loss, self_kl, about)
        if wrong := found._fault():
            raise CheckpointError(f"`{path}` is a damaged saved reference: {wrong}", hint=hint)
        return found

    def _fault(self) -> str | None:
        """What is wrong with what was read, if anything."""
        if self.windows.dim() != 2 or 0 in self.windows.shape or not 1 <= self.first < self.windows.shape[1]:
            return f"windows {list(self.windows.shape)} of which tokens from {self.first} on are predicted"
        shape = torch.Size((len(self.windows), self.windows.shape[1] - self.first))
        if self.ids.dim() != 3 or not 1 <= self.top <= self.ids.shape[2] or self.codes.shape != self.ids.shape:
            return f"ids {list(self.ids.shape)} and codes {list(self.codes.shape)}, {self.top} of them the likeliest"
        for name, values, most in (("range", self.range, 3e38), ("rest", self.rest, 1.001), ("loss", self.loss, 3e38)):
            if values.shape != shape or values.dtype != torch.float32:
                return f"`{name}` is {list(values.shape)} {values.dtype}, expected {list(shape)} torch.float32"
            if not bool(((values >= 0) & (values <= most)).all()):
                return f"`{name}` has numbers outside 0 to {most:g}"
        if self.ids.shape[:2] != shape or self.codes.dtype != torch.int16:
            return f"codes {list(self.codes.shape)} {self.codes.dtype}, expected {list(shape)} predictions in int16"
        for name, ids in (("windows", self.windows), ("ids", self.ids)):
            if int(ids.min()) < 0 or int(ids.max()) >= self.vocab:
                return f"`{name}` has ids from {int(ids.min())} to {int(ids.max())}, the vocabulary {self.vocab}"
        return None


def _digests(facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the facts, and of each tensor with its dtype and shape."""
    found = {f"{DIGESTS}facts": sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()}
    return found | {f"{DIGESTS}{name}": digest_of(tensor) for name, tensor in tensors.items()}


def entries_for(vocab: int) -> tuple[int, int]:
    """How many ids of a prediction are kept: likeliest ones, and a sample of the others."""
    width = 2 + (2 if vocab <= 1 << 16 else 4)
    room = int(SHARE * 2 * vocab - FIXED_BYTES) // width
    entries = min(vocab, max(LEAST_ENTRIES, room))
    if entries == vocab:
        return vocab, 0
    top = round(entries * TOP_SHARE)
    return top, entries - top


class Recorder:
    """Takes the logits of a reference piece by piece, as `evaluators.divergence.pieces` gives them."""

    def __init__(self, windows: Tensor, first: int, vocab: int) -> None:
        self.windows, self.first, self.vocab = windows, first, vocab
        self.top, self.sample = entries_for(vocab)
        shape = (len(windows), windows.shape[1] - first)
        self.ids = torch.empty(*shape, self.top + self.sample, dtype=torch.int32)
        self.codes = torch.empty(*shape, self.top + self.sample, dtype=torch.int16)
        self.range, self.rest, self.loss = (torch.empty(shape, dtype=torch.float32) for _ in range(3))
        self._random = torch.Generator().manual_seed(0)
        self._self_kl = 0.0

    def put(self, row: int, start: int, logits: Tensor, targets: Tensor) -> None:
        """Logits `[b, c, vocab]` of the windows from `row` on, predictions from `start` on, with what follows."""
        likely = logits.cpu().double().log_softmax(-1)
        best = likely.topk(self.top).indices
        # Of equals, of which low precision makes many, the lowest id comes first, as everywhere else.
        choice = likely.argmax(-1, keepdim=True)
        best = torch.where(best == choice, best[..., :1], best)
        best[..., :1] = choice
        rest = likely.exp().scatter(-1, best, 0.0)
        mass = rest.sum(-1)
        kept = best
        if self.sample:
            kept = torch.cat([best, self._draw(rest, mass, best)], dim=-1)
        surprise = -likely.gather(-1, kept)
        widest = surprise.amax(-1).clamp_min(1e-6)
        place = slice(row, row + logits.shape[0]), slice(start, start + logits.shape[1])
        self.ids[place] = kept.to(torch.int32)
        codes = (surprise / widest[..., None] * LEVELS).round().to(torch.int32)
        self.codes[place] = (codes - (1 << 15)).to(torch.int16)
        self.range[place], self.rest[place] = widest.float(), mass.float()
        self.loss[place] = -likely.gather(-1, targets.cpu()[..., None])[..., 0].float()
        self._self_kl += float(estimate(self.finish({}), row, start, logits, targets)[0].sum())

    def _draw(self, rest: Tensor, mass: Tensor, best: Tensor) -> Tensor:
        """Systematic sample of the ids in proportion to `rest [b, c, vocab]`; the likeliest where nothing is left."""
        marks = torch.arange(self.sample) + torch.rand(*mass.shape, 1, generator=self._random, dtype=torch.float64)
        sums = rest.cumsum(-1)
        drawn = torch.searchsorted(sums, marks / self.sample * sums[..., -1:], right=True).clamp_max(self.vocab - 1)
        return torch.where(mass[..., None] > 0, drawn, best[..., :1])

    def finish(self, about: Mapping[str, str]) -> SavedReference:
        kept = (self.ids, self.codes, self.range, self.rest, self.loss)
        self_kl = self._self_kl / self.loss.numel()
        return SavedReference(self.windows, self.first, self.vocab, self.top, *kept, self_kl, about)


def record(
    model: Model, windows: Tensor, about: Mapping[str, str], progress: Progress | None = None, *, first: int = 1
) -> SavedReference:
    """The predictions of a model over windows, int64 `[n, L]`. Raises GateError when logits are not finite."""
    recorder = Recorder(windows, first, model.config.vocab_size)
    for row, start, (logits,), targets in pieces([model], windows, first, "reference", progress):
        recorder.put(row, start, logits, targets)
    return recorder.finish(about)


def compare_and_record(
    reference: Model,
    candidate: Model,
    windows: Tensor,
    about: Mapping[str, str],
    progress: Progress | None = None,
    *,
    first: int = 1,
) -> tuple[Divergence, SavedReference, Divergence]:
    """`divergence.compare` and `record` in one pass: the divergence from full logits, what is kept of the reference,
    and the divergence that follows from that alone.

    Raises CheckpointError for a candidate that lacks words of the reference, GateError when logits are not finite.
    """
    recorder = Recorder(windows, first, reference.config.vocab_size)
    require_vocabulary(recorder.finish({}), candidate.config.vocab_size)
    exact, estimated = Scores.empty(windows, first), Scores.empty(windows, first)
    for row, start, (left, right), targets in pieces([reference, candidate], windows, first, "compare", progress):
        recorder.put(row, start, left, targets)
        exact.put(row, start, compare_piece(left, right[..., : recorder.vocab], targets))
        estimated.put(row, start, estimate(recorder.finish({}), row, start, right, targets))
    saved = recorder.finish(about)
    notes = _notes(saved, candidate.config.vocab_size)
    return exact.divergence(windows, first, notes), saved, estimated.divergence(windows, first, notes)


def compare_saved(saved: SavedReference, candidate: Model, progress: Progress | None = None) -> Divergence:
    """As `divergence.compare`, with the candidate alone in memory; `kl_error` says how far the mean may be off.

    Raises CheckpointError for a candidate that lacks words of the reference, GateError when logits are not finite.
    """
    require_vocabulary(saved, candidate.config.vocab_size)
    scores = Scores.empty(saved.windows, saved.first)
    for row, start, (logits,), targets in pieces([candidate], saved.windows, saved.first, "compare", progress):
        scores.put(row, start, estimate(saved, row, start, logits, targets))
    return scores.divergence(saved.windows, saved.first, _notes(saved, candidate.config.vocab_size))


def require_vocabulary(saved: SavedReference, vocab: int) -> None:
    if vocab < saved.vocab:
        raise CheckpointError(
            f"the saved reference knows {saved.vocab} ids, the candidate {vocab}: what the others take cannot be told",
            hint="compare with the reference model itself, which is then cut to the words that both have",
        )


def _notes(saved: SavedReference, vocab: int) -> tuple[str, ...]:
    if vocab == saved.vocab:
        return ()
    return (f"vocabularies of {saved.vocab} and {vocab} rows: compared on the first {saved.vocab}",)


def estimate(saved: SavedReference, row: int, start: int, logits: Tensor, targets: Tensor) -> Tensor:
    """Candidate's logits `[b, c, vocab]` of some windows → `[10, b, c]` for `Scores`."""
    place = slice(row, row + logits.shape[0]), slice(start, start + logits.shape[1])
    likely = logits[..., : saved.vocab].cpu().double().log_softmax(-1)
    ids = saved.ids[place].long()
    step = saved.range[place].double()[..., None] / LEVELS
    before = -(saved.codes[place].double() + (1 << 15)) * step
    after = likely.gather(-1, ids)
    rest = saved.rest[place].double()
    top_before, top_after = before[..., : saved.top], after[..., : saved.top]
    # What rounding has changed of the sum goes back in proportion.
    top_before = top_before + (torch.log1p(-rest) - top_before.logsumexp(-1))[..., None]
    terms = top_before.exp() * (top_before - top_after)
    kl = terms.sum(-1)
    # Half a step on each `ln p`, less its mean, which the sum to one takes away: to first order what stays of it in KL
    # is its product with the change less the mean of that.
    change, share = top_before - top_after, top_before.softmax(-1)
    spread = (change - (share * change).sum(-1, keepdim=True)).abs()
    rounding = step[..., 0] / 2 * (top_before.exp() * spread).sum(-1)
    variance = torch.zeros_like(kl)
    if ids.shape[-1] > saved.top:
        mean, variance, slope = _mean_of_rest(before[..., saved.top :] - after[..., saved.top :], rest, top_after)
        kl, variance = kl + rest * mean, rest**2 * variance
        rounding = rounding + step[..., 0] / 2 * rest * slope
    chosen = -likely.gather(-1, targets.cpu()[..., None])[..., 0]
    choice = likely.argmax(-1)
    values = [kl, variance, saved.loss[place].double(), chosen, ids[..., 0].double(), choice.double()]
    values += [top_before[..., 0].exp(), likely.gather(-1, choice[..., None])[..., 0].exp()]
    overlap = top_overlap(ids[..., : top_ids(likely).shape[-1]], top_ids(likely))
    return torch.stack([*values, overlap, rounding])


def _mean_of_rest(change: Tensor, rest: Tensor, top_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean of `ln p - ln q` over the ids that are not among the likeliest, the variance of that mean, and how much it
    moves at most with the `change` of all, `[b, c]`.

    change     ln p - ln q of the sample, [b, c, sample]
    rest       p(T), [b, c]
    top_after  ln q of the likeliest ids, [b, c, top]

    `q / p` has the known mean `q(T) / p(T)` and falls as the change grows, so that their sum varies far less where the
    candidate is close: a control variate. It serves where all changes of the sample are small and its ratios agree with
    the known mean: else the candidate makes something likely that the sample has not seen.
    """
    count = change.shape[-1]
    ratio = (-change).clamp_max(600).exp()
    mass = (1 - top_after.exp().sum(-1)).clamp_min(0) / rest.clamp_min(torch.finfo(torch.float64).tiny)
    surplus = ratio.mean(-1) - mass
    controlled = (change + ratio).var(-1)
    close = (change.abs().amax(-1) <= 1) & (controlled < change.var(-1))
    serves = close & (surplus.abs() <= 4 * (ratio.var(-1) / count).sqrt() + 1e-9)
    mean = change.mean(-1)
    variance = torch.where(serves, controlled, change.var(-1)) / count
    slope = torch.where(serves, (1 - ratio).abs().mean(-1), 1.0)
    return torch.where(serves, mean + surplus, mean), variance, slope
