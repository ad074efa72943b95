"""The sandbox of chat templates: the dialect that they are written in, without powers and with a budget of work.

Jinja's own sandbox keeps a template from the machine, but lets it count and write without end. Here each step of a
loop, each call and each text that is made costs something, and what one rendering may spend is bounded: so is its time,
and the memory of all texts together. Filters are those that templates of models use.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
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

    intercepted_binops = frozenset({"+", "*", "**", "%"})

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
        self.filters |= {"_counted": self._counted, "_joined": self._joined, "_seen": self._seen}
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
        else:
            self.spend(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(CALL_COST)
        method = getattr(called, "__wrapped__", called)  # what the sandbox of jinja2 puts around `format`
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            self._growth(name, owner, args, kwargs)
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
        size = self._weigh(given)
        if name in ("format", "format_map"):
            self._formatting(text, given)
        elif name == "replace":
            self.spend(len(text) + (len(text) + 1) * (len(str(given[1])) if len(given) > 1 else 0))
        elif name == "join":
            parts = given[0] if given else ()
            between = len(text) if text else sum(len(value) for value in given[1:] if isinstance(value, str))
            self.spend(size + between * (len(parts) if isinstance(parts, Sized) else 1))
        elif name in PADDING:
            self.spend(len(text) + widest * (1 + text.count("\t")))
        elif name == "indent":
            self.spend(len(text) + widest * (1 + text.count("\n")))
        elif name == "tojson":
            self.spend(6 * (size + len(text)) + widest * (1 + size))
        elif name in ("batch", "slice"):
            self.spend(size + widest)
        else:
            self.spend((size + len(text)) if name in _COPY else (size + len(text)) // READ_SHARE)

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

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(STEP_COST)
            yield item

    def _joined(self, *parts: Any) -> str:
        """What `~` makes."""
        self.spend(self._weigh(parts))
        return "".join(map(str, parts))

    def _seen(self, value: Any) -> Any:
        """What is compared, or was cut out."""
        self.spend(STEP_COST + (len(value) // READ_SHARE if isinstance(value, Sized) else 0))
        return value

    def _written(self, value: Any) -> Any:
        """What is put into the text."""
        self.spend(self._weigh(value))
        return value

    def _weigh(self, value: Any) -> int:
        """About how many characters a value has as text; counting stops where the budget would."""
        total, left = 0, [value]
        while left and total <= self._left:
            item = left.pop()
            if isinstance(item, str | bytes):
                total += len(item)
            elif isinstance(item, Mapping):
                left += [*item.keys(), *item.values()]
                total += 4
            elif isinstance(item, list | tuple | set | frozenset):
                left += item
                total += 2
            else:
                total += 24
        return total


_TAKE_NUMBERS = ("abs", "float", "int", "string", "default", "d", "list", "min", "max", "sort", "tojson", "length")
_COPY = frozenset(
    (
        "capitalize", "e", "escape", "list", "lower", "safe", "string", "title", "trim", "upper", "urlencode",
        "reverse", "sort", "unique", "dictsort", "items", "groupby", "swapcase", "casefold", "strip", "lstrip",
        "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "encode", "translate", "format",
        "removeprefix", "removesuffix",
    )
)


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
            operand.expr = _filtered("_seen", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered("_seen", node) if isinstance(node.arg, nodes.Slice) and node.ctx == "load" else node


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
