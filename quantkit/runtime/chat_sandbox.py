"""The sandbox of chat templates: the dialect that they are written in, without powers and with a budget of work.

Jinja's own sandbox keeps a template from the machine, but lets it count and write without end. Here each step of a
loop, each call, each comparison and each text that an expression makes costs about what it takes, nested values for all
that is reached in them, and what one rendering may spend is bounded. The prices are estimates, so this holds time and
memory within seconds and some hundreds of megabytes, not to a figure. Two things have no price: the text of a template
itself in the body of a macro, and keys made to collide in a dict. Filters are those that templates of models use.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

BUDGET = 1 << 25
"""Of one rendering: characters, and steps at the prices below."""
STEP_COST, CALL_COST = 8, 32
READ_SHARE = 64
"""Text that is only looked at costs one for so many characters."""
GREATEST_NUMBER = 10_000
"""As an argument of a filter or method: widths, counts, precisions."""
LONGEST_INTEGER_BITS = 4096

FILTERS = (
    "abs", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "format", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort",
    "string", "title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
)
GLOBALS = ("dict", "cycler", "joiner", "namespace")
WIDE_FORMAT = re.compile(r"\d{5}|\*|[:!][^{}]*\{")
PADDING = ("ljust", "rjust", "center", "zfill", "expandtabs")


class Refusal(jinja2.TemplateError):
    """A template's own `raise_exception(...)`."""


class Spent(jinja2.TemplateRuntimeError):
    """The budget is used up."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One for each template. `begin` starts a rendering, which no other thread may share."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            optimized=False,  # what is worked out while a template is compiled costs as well
            finalize=self._written,
        )
        self._left = BUDGET
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(self.filters[name], name) for name in FILTERS}
        self.filters |= {"_counted": self._counted, "_joined": self._joined}
        self.filters |= {"_seen": self._seen, "_glanced": self._glanced}
        self.tests = {name: self._bounded(cast(Callable[..., Any], test), name) for name, test in self.tests.items()}
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals["range"] = self._range
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(form)[:200])

    def begin(self) -> None:
        self._left = BUDGET

    def spend(self, cost: int) -> None:
        """Raises Spent where so much is not left."""
        self._left -= cost
        if self._left < 0:
            raise Spent(f"it takes more than {BUDGET} steps and characters")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.exceptions.SecurityError("`**` is not allowed here")
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > LONGEST_INTEGER_BITS:
                raise jinja2.exceptions.SecurityError("numbers this long are not allowed here")
        elif operator == "*":
            size = max((len(side) for side in (left, right) if isinstance(side, Sized)), default=0)
            self.spend(size * max((side for side in (left, right) if isinstance(side, int)), default=1))
        elif operator == "%":
            self._formatting(left, right)
        elif operator == "-":  # of the keys of dicts: all are hashed
            self.spend(self._weigh([left, right], READ_SHARE))
        else:
            self.spend(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(CALL_COST)
        method = getattr(called, "__wrapped__", called)  # what the sandbox of jinja2 puts around `format`
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if name in ("encode", "to_bytes", "translate"):  # `translate` may put any text for each character
            raise jinja2.exceptions.SecurityError(f"`{name}` is not allowed here")
        if isinstance(called, LoopContext):  # of a recursive loop: the loop again, over other items
            args = tuple(map(self._counted, args))
            kwargs = {key: self._counted(value) if key == "iterable" else value for key, value in kwargs.items()}
        elif isinstance(owner, str | int | float):
            args = tuple(self._paid(value, 1) for value in args)
            self._growth(name, owner, args, kwargs)
        elif isinstance(called, type) or (owner is not None and isinstance(owner, Collection | LoopContext | type)):
            args = tuple(map(self._paid, args))
            searched = [owner] if isinstance(owner, Collection) and name not in _LOOK_UP else []
            self.spend(self._weigh([*searched, *args, *kwargs.values()], READ_SHARE))
        return super().call(context, called, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Priced().visit(super()._parse(source, name, filename))
        return tree

    def _bounded(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A filter or test that is paid for by what it is given."""

        def bounded(*args: Any, **kwargs: Any) -> Any:
            # Some are handed the environment or the context first.
            passed = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self.spend(STEP_COST)
            if name in _GLANCE:
                return function(*args, **kwargs)
            passed = tuple(self._paid(value, 1 if name in _SPELT_OUT else READ_SHARE) for value in passed)
            args = (*args[: len(args) - len(passed)], *passed)
            if passed and isinstance(passed[0], str):
                self._growth(name, passed[0], passed[1:], kwargs)
            else:
                self._growth(name, "", passed, kwargs)
            return function(*args, **kwargs)

        if hasattr(function, "jinja_pass_arg"):
            bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return bounded

    def _growth(self, name: str, owner: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Pays for what a method or filter of this name makes of `owner`, before it does."""
        given = [*args, *named.values()]
        numbers = [abs(value) for value in given if isinstance(value, int)]
        if max(numbers, default=0) > GREATEST_NUMBER and name not in _TAKE_NUMBERS:
            raise jinja2.exceptions.SecurityError(f"numbers above {GREATEST_NUMBER} are not allowed in `{name}`")
        text = owner if isinstance(owner, str) else ""
        widest = max(numbers, default=4)
        if name in _SHALLOW:
            items = owner if isinstance(owner, str) and owner else given[0] if given else ()
            within = STEP_COST * len(items) if isinstance(items, Sized) else 0
            self.spend(within + widest + self._weigh(given[1:], READ_SHARE))
            return
        size = self._weigh(given, 1 if name in _SPELT_OUT else READ_SHARE)
        if name in ("format", "format_map"):
            self._formatting(text, given)
        elif name == "replace":
            length, after = (len(text), args) if isinstance(owner, str) and owner else (size, args[1:])
            new = named.get("new", after[1] if len(after) > 1 else "")
            self.spend(size + length + (length + 1) * (len(new) if isinstance(new, str) else self._weigh(new)))
        elif name == "join":
            parts = given[0] if given else ()
            between = len(text) if text else sum(len(value) for value in given[1:] if isinstance(value, str))
            self.spend(size + between * (len(parts) if isinstance(parts, Sized) else 1))
        elif name in PADDING:
            self.spend(len(text) + widest * (1 + text.count("\t")))
        elif name == "indent":
            self.spend(len(text) + widest * (1 + text.count("\n")))
        elif name in _LENGTHEN:
            self.spend(_LENGTHEN[name] * (size + len(text)))
        elif name == "tojson":
            self.spend(6 * (size + len(text)) + widest * (1 + size))
        elif name in _COMPARE:
            rounds = len(given[0]).bit_length() if given and isinstance(given[0], Sized) else 1
            self.spend(len(text) + size * max(rounds, 1))
        else:
            self.spend(size + (len(text) if name in _SPELT_OUT else len(text) // READ_SHARE))

    def _formatting(self, form: Any, values: Any) -> None:
        if isinstance(form, str):
            if WIDE_FORMAT.search(form):
                raise jinja2.exceptions.SecurityError("widths of numbers are not allowed here")
            count = 1 + form.count("%") + form.count("{")
            self.spend(len(form) + count * (GREATEST_NUMBER + self._weigh(values)))

    def _range(self, *bounds: int) -> range:
        steps = range(*bounds)
        self.spend(min(len(steps), BUDGET + 1))
        return steps

    def _counted(self, items: Any) -> Any:
        """The items of a loop, each at the cost of a step."""
        if not isinstance(items, Sized):
            return self._steps(items)
        self.spend(STEP_COST * len(items))
        return items

    def _steps(self, items: Iterable[Any], share: int = 0) -> Iterator[Any]:
        for item in items:
            self.spend(STEP_COST + (self._weigh(item, share) if share else 0))
            yield item

    def _joined(self, *parts: Any) -> str:
        """What `~` makes."""
        self.spend(self._weigh(parts))
        return "".join(map(str, parts))

    def _seen(self, value: Any) -> Any:
        """What is compared, is a key, or was cut out: all that is reached in it is looked at."""
        self.spend(STEP_COST + self._weigh(value, READ_SHARE))
        return self._paid(value)

    def _glanced(self, value: Any) -> Any:
        """What a key or a text is looked for in: of a mapping, no value is looked at."""
        if not isinstance(value, Mapping):
            return self._seen(value)
        self.spend(STEP_COST)
        return value

    def _paid(self, value: Any, share: int = READ_SHARE) -> Any:
        """What comes one by one is paid for as it comes."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        return self._steps(value, share)

    def _written(self, value: Any) -> Any:
        """What is put into the text."""
        self.spend(self._weigh(value))
        return value

    def _weigh(self, value: Any, share: int = 1) -> int:
        """About how many characters a value has as text, or a `share` of those; counting stops where the budget would.

        What stands in it twice counts twice, as it does for those who write, compare or hash it.
        """
        total, left = 0, [value]
        while left and total <= self._left:
            item = left.pop()
            kind = type(item)
            if kind is str:
                total += 4 + len(item) // share
            elif kind is int or kind is bool or kind is float or item is None:
                total += 24
            elif kind is list or kind is tuple:
                total += STEP_COST + len(item)
                if total <= self._left:
                    left += item
            elif isinstance(item, str):
                total += 4 + len(item) // share
            elif isinstance(item, range):
                total += 24 * (1 + len(item))
            elif isinstance(item, Mapping | Namespace):
                item = item if isinstance(item, Mapping) else object.__getattribute__(item, "_Namespace__attrs")
                total += STEP_COST + 2 * len(item)
                if total <= self._left:
                    left += [*item.keys(), *item.values()]
            elif isinstance(item, Collection):
                total += STEP_COST + len(item)
                if total <= self._left:
                    left += item
            else:
                total += 24
        return total


_TAKE_NUMBERS = ("abs", "float", "int", "string", "default", "d", "list", "min", "max", "sort", "tojson", "length")
_SPELT_OUT = frozenset(
    (
        "capitalize", "e", "escape", "lower", "safe", "string", "title", "trim", "upper", "urlencode", "join", "tojson",
        "sort", "unique", "dictsort", "groupby", "min", "max", "swapcase", "casefold", "strip", "lstrip", "rstrip",
        "split", "rsplit", "splitlines", "partition", "rpartition", "format", "removeprefix",
        "removesuffix", "center", "indent", "replace", "truncate", "wordcount",
    )
)
"""Make text of all that they are given, or copy it."""
_LENGTHEN = {"urlencode": 12, "e": 5, "escape": 5}
"""Write up to so many characters for one: `%F0%9F%98%80`, `&#34;`."""
_COMPARE = ("sort", "unique", "dictsort", "groupby", "min", "max")
_SHALLOW = ("batch", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice")
_GLANCE = frozenset(
    (
        "boolean", "callable", "count", "d", "default", "defined", "false", "first", "integer", "iterable", "last",
        "length", "mapping", "none", "number", "sameas", "sequence", "true", "undefined",
    )
)
"""See a type, a length or an end."""
_LOOK_UP = ("get", "items", "keys", "values")


class _Priced(NodeTransformer):
    """Puts a price on what the language does by itself: loops, `~`, comparisons, slices."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the name in jinja2
        self.generic_visit(node)
        node.iter = _filtered("_counted", cast(nodes.Expr, node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("_joined", node.nodes[0], *node.nodes[1:])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered("_seen", node.expr)
        for operand in node.ops:
            operand.expr = _filtered("_glanced" if operand.op in ("in", "notin") else "_seen", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered("_seen", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filtered("_seen", node) if node.ctx == "load" else node
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filtered("_seen", node.arg)
        return node


def _filtered(name: str, value: nodes.Expr, *others: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(others), [], None, None, lineno=value.lineno)


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's words for training; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: object = "") -> None:
    raise Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter of this name escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
