"""Patterns: `--rule 'REGEX:bits=8,group_size=32'`, `--skip REGEX`, `--redo REGEX`, read, held to a model, and written.

A pattern is matched at the start of a linear's full name, as it is called on disk, since that is what readers of
`dynamic` do. Skips go before rules, as GPTQModel has it; among rules the first match decides. Each must decide about
some linear: one that does not is a mistake, and is refused with the names that it may have meant.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import FormatError, UsageError
from quantkit.formats.gptq import GptqCodec
from quantkit.plan import kind_of

SHAPE = "write it as `--rule 'model.layers.0.*down_proj:bits=8,group_size=32'`"
# What a rule may change → what `dynamic` calls it.
KEYS = {"bits": "bits", "group_size": "group_size", "sym": "sym", "act_order": "desc_act"}
ALIASES = {name: key for key, name in KEYS.items()}


@dataclass(frozen=True, slots=True)
class Rule:
    """One `--rule`, or one `--skip`, whose `changes` are None: the linears it matches stay dense. `word` is the option
    that has no changes: a `--redo` has none either."""

    pattern: str
    changes: Mapping[str, int | bool] | None = None
    word: str = "skip"

    @property
    def text(self) -> str:
        """What `read_rules` would read again."""
        if self.changes is None:
            return self.pattern
        return f"{self.pattern}:" + ",".join(f"{key}={str(value).lower()}" for key, value in self.changes.items())

    @property
    def option(self) -> str:
        """What was typed, more or less."""
        return f"--{self.word if self.changes is None else 'rule'} '{self.text}'"

    def matches(self, name: str) -> bool:
        return re.match(self.pattern, name) is not None

    def codec(self, base: GptqCodec) -> GptqCodec:
        """Raises FormatError, with the rule in it, for a width or group size that GPTQ lacks."""
        changes: dict[str, Any] = dict(self.changes or {})
        try:
            return replace(base, **changes)
        except FormatError as error:
            raise FormatError(f"`{self.option}`: {error.message}", hint=SHAPE) from error


def read_rules(rules: Sequence[str], skips: Sequence[str]) -> tuple[Rule, ...]:
    """All of them, skips first. Raises UsageError for text that is no rule."""
    rules, skips = ((given,) if isinstance(given, str) else given for given in (rules, skips))
    return (*(Rule(_pattern(text, "skip")) for text in skips), *map(_read_rule, rules))


def read_redo(text: str) -> Rule:
    """What is to be solved anew. Raises UsageError for text that is no pattern."""
    return Rule(_pattern(text, "redo"), word="redo")


def deciding(rules: Iterable[Rule], name: str) -> Rule | None:
    """The first that matches."""
    return next((rule for rule in rules if rule.matches(name)), None)


def require_used(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """UsageError for a rule that decides about none of these linears."""
    used = {id(deciding(rules, name)) for name in names}
    for rule in rules:
        if id(rule) not in used:
            raise _unused(rule, names)


def as_dynamic(rules: Sequence[Rule]) -> dict[str, dict[str, Any]]:
    """Pattern → what differs there, in the words of GPTQ's `dynamic`."""
    return {
        f"-:{rule.pattern}" if rule.changes is None else f"+:{rule.pattern}": {
            KEYS[key]: value for key, value in (rule.changes or {}).items()
        }
        for rule in rules
    }


def _read_rule(text: str) -> Rule:
    pattern, colon, changes = text.rpartition(":")
    pairs = [pair.partition("=") for pair in changes.split(",")]
    if not colon or not all(equals for _, equals, _ in pairs):
        raise UsageError(f"`--rule '{text}'` does not say what to change, after a last `:`", hint=SHAPE)
    found: dict[str, int | bool] = {}
    for typed, _, value in pairs:
        key = ALIASES.get(typed.strip(), typed.strip())
        if key not in KEYS:
            raise UsageError(f"`--rule '{text}'` changes `{key}`", hint=f"a rule can change {', '.join(KEYS)}")
        if key in found:
            raise UsageError(f"`--rule '{text}'` says `{key}` twice", hint="say it once")
        found[key] = _value(text, key, value.strip())
    return Rule(_pattern(pattern, "rule"), found)


def _pattern(text: str, option: str) -> str:
    if not text:
        raise UsageError(f"`--{option}` has no pattern", hint="`.*` matches every linear")
    try:
        re.compile(text)
    except re.error as error:
        hint = r"write a dot as `\.`, a bracket as `\(`"
        raise UsageError(f"`{text}` is no regular expression: {error}", hint=hint) from error
    return text


def _value(text: str, key: str, value: str) -> int | bool:
    switch: Mapping[str, bool] = {"true": True, "false": False}
    read: Callable[[str], int | bool] = switch.__getitem__ if key in ("sym", "act_order") else int
    try:
        return read(value)
    except (KeyError, ValueError):
        expected = "true or false" if key in ("sym", "act_order") else "a whole number"
        raise UsageError(f"`--rule '{text}'`: expected {expected} for `{key}`, found `{value}`", hint=SHAPE) from None


def _unused(rule: Rule, names: Sequence[str]) -> UsageError:
    taken = [name for name in names if rule.matches(name)]
    if taken:
        return UsageError(
            f"`{rule.option}` decides nothing: an option before it takes all {len(taken)} linears that it matches, "
            f"`{taken[0]}` for one",
            hint="the first rule that matches decides, and `--skip` comes before rules: put the narrower one first",
        )
    none = f"`{rule.option}` matches none of {len(names)} linears"
    inside = next((name for name in names if re.search(rule.pattern, name)), None)
    if inside is None:
        return UsageError(none, hint=f"did you mean {_near(rule, names)}?")
    hint = f"a pattern begins where the name does: write `.*{rule.pattern}`"
    return UsageError(f"{none}, only the middle of `{inside}`", hint=hint)


def _near(rule: Rule, names: Sequence[str]) -> str:
    """Names, one of each kind, that resemble the pattern; where none does, one of each kind."""
    kinds = {kind_of(name): name for name in reversed(names)}
    letters = re.sub(r"\\.|[^\w.]+", ".", rule.pattern)
    last = ["", *re.findall(r"[A-Za-z_]\w*", letters)][-1]
    words = {kind.rpartition(".")[2]: name for kind, name in kinds.items()}
    near = [words[word] for word in difflib.get_close_matches(last, words, n=3)]
    near = near or [kinds[kind] for kind in difflib.get_close_matches(letters, kinds, n=3)]
    return ", ".join(f"`{name}`" for name in near or list(kinds.values())[:3])
