"""`quantkit generate --prompts-file F.jsonl`: a queue of requests on one model, as many at once as the cache holds.

Each line is an object with `prompt`, `chat` or `messages`, perhaps an `id`, and any of the settings in `FIELDS`; what
it leaves out is as on the command line. Every line is read and checked before any weight is.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from quantkit.calibration.json_lines import parse_line
from quantkit.checkpoint.adapter import open_weighted
from quantkit.commands.generation.setup import Setup, cache_rows, decode_rows, idle_options, ran_on, read_text
from quantkit.errors import QuantkitError, RequestError, UsageError
from quantkit.models.transformer import Model
from quantkit.progress import Progress
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.decode_path import DecodePath
from quantkit.runtime.drafts import ModelDraft
from quantkit.runtime.free_memory import free_bytes
from quantkit.runtime.generator import Generator
from quantkit.runtime.page_pool import CacheUse
from quantkit.runtime.page_store import PAGE
from quantkit.runtime.placement import Placement
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request
from quantkit.runtime.scheduler import Limits, Scheduler, Served
from quantkit.runtime.spread import told
from quantkit.settings import GenerateSettings

NUMBER = (int, float)
FIELDS: dict[str, tuple[str, type | tuple[type, ...]]] = {
    "max_new_tokens": ("max_new_tokens", int),
    "temperature": ("temperature", NUMBER),
    "top_k": ("top_k", int),
    "top_p": ("top_p", NUMBER),
    "min_p": ("min_p", NUMBER),
    "typical_p": ("typical_p", NUMBER),
    "repetition_penalty": ("repetition_penalty", NUMBER),
    "frequency_penalty": ("frequency_penalty", NUMBER),
    "presence_penalty": ("presence_penalty", NUMBER),
    "seed": ("seed", int),
    "ignore_eos": ("ignore_eos", bool),
    "stop": ("stops", list),
    "stop_token": ("stop_tokens", list),
    "ban": ("banned", list),
    "lora": ("loras", list),
}
"""Key of a line → field of the settings, and the types that its value may have; of lists all are texts."""
PROMPTS = ("prompt", "chat", "messages")
LARGEST = 2**63
"""No setting has use for a number beyond it, and Python makes no float of the largest whole ones."""


class Line(NamedTuple):
    """One line of the file: its number, what its answer is called, and what it asks for."""

    number: int
    name: Any
    request: Request


@dataclass(frozen=True, slots=True)
class QueueReport:
    """All answers in the order of their lines, each with the `id` of its line, and what they cost together."""

    model: str
    answers: tuple[tuple[Any, Served], ...]
    seconds: float
    load_seconds: float
    passes: int
    preemptions: int
    placement: Placement
    cache: CacheUse
    decode_path: DecodePath
    processes: int = 1

    @property
    def prompt_tokens(self) -> int:
        return sum(served.completion.prompt_tokens for _, served in self.answers)

    @property
    def new_tokens(self) -> int:
        return sum(len(served.completion.token_ids) for _, served in self.answers)

    @property
    def shared_tokens(self) -> int:
        """Of texts that were read, prompts first of all, what another request had read before."""
        return sum(served.shared_tokens for _, served in self.answers)

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        prompts = f"{self.prompt_tokens} prompt tokens, {self.shared_tokens} of them shared"
        return [
            ["requests", f"{len(self.answers)}, {prompts}"],
            ["answers", f"{self.new_tokens} tokens, {self.new_tokens / self.seconds:.1f}/s all together"],
            ["passes", f"{self.passes}, {self.preemptions} requests read again"],
            *cache_rows(self.cache),
            ["loaded in", f"{self.load_seconds:.1f} s"],
            ran_on(self.placement, self.processes),
            *decode_rows(self.decode_path, self.placement),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "answers": [line_of(name, served) for name, served in self.answers],
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "new_tokens": self.new_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.new_tokens / self.seconds,
            "passes": self.passes,
            "preemptions": self.preemptions,
            **asdict(self.cache),
            "load_seconds": self.load_seconds,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
            "decode_path": asdict(self.decode_path),
            "processes": self.processes,
        }


def line_of(name: Any, served: Served) -> dict[str, Any]:
    """One answer, as a line of JSONL has it."""
    done = served.completion
    return {
        "id": name,
        "text": done.text,
        "token_ids": list(done.token_ids),
        "log_probabilities": list(done.log_probabilities),
        "finish_reason": done.finish_reason,
        "stop": done.stop,
        "prompt_tokens": done.prompt_tokens,
        "shared_tokens": served.shared_tokens,
        "draft": None if done.tally is None else done.tally.as_json(),
        "waited_seconds": served.waited_seconds,
        "prefill_seconds": done.prefill_seconds,
        "decode_seconds": done.decode_seconds,
        "preemptions": served.preemptions,
    }


def run(
    settings: GenerateSettings, progress: Progress, on_answer: Callable[[dict[str, Any]], None] = lambda line: None
) -> QueueReport:
    """Answer every line. `on_answer` gets each as `line_of` has it, in the order in which they are finished.

    Raises UsageError for settings, CheckpointError for files, RequestError for a line that cannot be served, naming it.
    """
    start = time.perf_counter()
    for option, value in (("prompt", settings.prompt), ("chat", settings.chat), ("prompt-file", settings.prompt_file)):
        if value is not None:
            raise UsageError(f"`--{option}` beside `--prompts-file`", hint=f"leave out `--{option}`")
    if not 0 < (fraction := settings.cache_fraction) <= 1:
        raise UsageError(f"`--cache-fraction` is {fraction}, expected more than 0 and at most 1", hint="leave it out")
    setup = Setup.open(settings)
    limits = Limits(
        settings.token_budget,
        settings.batch,
        settings.optimistic,
        None if settings.latency_ms is None else settings.latency_ms / 1000,
    )
    lines = _lines(setup)
    generator = setup.load(max(_positions(line.request) for line in lines))
    model = generator.model
    plan = setup.plan
    positions, most = _fit(setup, generator, lines)
    pool = plan.pool(model.config, positions, model.dtype, model.device, most, model.devices)
    prefixes = PrefixCache(pool, model.config) if settings.share_prefixes else None
    scheduler = Scheduler(generator, pool, replace(limits, most_running=most), prefixes)
    names = {scheduler.add(line.request): line.name for line in lines}
    generator.warm_up(lines[0].request)
    load_seconds = time.perf_counter() - start
    for note in filter(None, (*idle_options(settings), *setup.checkpoint.notes, told(model.devices))):
        progress.say(note)
    start = time.perf_counter()
    with progress.task("requests", total=len(lines)) as task:
        for number, delta in scheduler.stream():
            if delta.finish_reason:
                on_answer(line_of(names[number], scheduler.served[number]))
                task.advance()
    seconds = time.perf_counter() - start
    answers = tuple((names[number], scheduler.served[number]) for number in sorted(names))
    counts = (scheduler.passes, scheduler.preemptions)
    return QueueReport(
        *(settings.model, answers, seconds, load_seconds, *counts),
        placement=setup.placement,
        cache=pool.use,
        decode_path=scheduler.decode_path,
        processes=setup.ranks.size,
    )


def _fit(setup: Setup, generator: Generator, lines: list[Line]) -> tuple[int, int]:
    """Positions of the cache, and how many requests run at once.

    In whole pages: for all requests where what one has read can be of use to another, else for the longest of those
    that run at once; but no more than the free memory has room for. A draft model has a cache for each that runs: where
    these leave too little, fewer run. Raises RequestError for a line that the free memory has no room for alone.
    """
    plan, settings, model, most = setup.plan, setup.settings, generator.model, setup.settings.batch
    longest = max(lines, key=lambda line: _positions(line.request))
    pages = sorted((-(-plan.held(_positions(line.request)) // PAGE) for line in lines), reverse=True)
    wanted = sum(pages if settings.share_prefixes else pages[: settings.batch])
    in_host_memory = plan.resident > 0 or model.device.type == "cpu"
    free = free_bytes("cpu") if in_host_memory else _free_beside(model)
    if free is not None and plan.tokens is None:
        free //= setup.ranks.size if in_host_memory else 1  # which the processes of a machine have in common
        page = _page_bytes(model, plan.kv)
        room = int(settings.cache_fraction * free)
        drafts = _draft_bytes(generator, lines, "cpu" if in_host_memory else model.device.type)
        if not in_host_memory:  # they are on the first device, with these layers of the model
            alone = len(model.devices) / max(1, model.devices.count(model.embedding.weight.device))
            drafts = [int(alone * size) for size in drafts]
        while drafts and most > 1 and room < sum(drafts[:most]) + page * sum(pages[:most]):
            most -= 1
        wanted = min(wanted, (room - sum(drafts[:most])) // page)
    wanted, most = setup.ranks.least(wanted), setup.ranks.least(most)
    if wanted < pages[0]:
        request = longest.request
        raise RequestError(
            f"line {longest.number} of `{settings.prompts_file}`: {len(request.ids)} prompt tokens and "
            f"{request.max_new_tokens} new ones need {PAGE * pages[0]} positions of cache, "
            f"{settings.cache_fraction:g} of the free memory has room for {PAGE * max(0, wanted)}",
            hint="ask for fewer `max_new_tokens`, or use a smaller `--kv`, as `--kv q4_0`",
        )
    return PAGE * wanted, most


def _positions(request: Request) -> int:
    return len(request.ids) + request.max_new_tokens


def _free_beside(model: Model) -> int | None:
    """Free memory for a cache of all layers: that of the device which has the least for each layer it holds."""
    layers, held = len(model.devices), Counter(model.devices)
    found = [(free_bytes(device), count) for device, count in held.items()]
    return min((free * layers // count for free, count in found if free is not None), default=None)


def _page_bytes(model: Model, form: str | None) -> int:
    config = model.config
    row = cache_format(form, config.head_dim, model.dtype).row_bytes
    return config.num_layers * config.num_kv_heads * PAGE * row


def _draft_bytes(generator: Generator, lines: list[Line], memory: str) -> list[int]:
    """Of the draft model's cache of each request, the largest first; none where it lies in another memory."""
    draft = generator.draft
    if not isinstance(draft, ModelDraft) or draft.model.device.type != memory:
        return []
    page = _page_bytes(draft.model, None)
    return sorted((page * -(-_positions(line.request) // PAGE) for line in lines), reverse=True)


def _lines(setup: Setup) -> list[Line]:
    """Raises RequestError, UsageError and CheckpointError with the number of the line in front."""
    file = setup.settings.prompts_file
    assert file is not None
    lines = []
    for number, text in enumerate(read_text(file, "--prompts-file").split("\n"), 1):
        if text.strip():
            try:
                lines.append(_line(setup, number, text))
            except QuantkitError as error:
                raise type(error)(f"line {number} of `{file}`: {error.message}", hint=error.hint) from error
    if not lines:
        raise RequestError(f"`{file}` has no requests", hint='each line is an object: {"prompt": "Once upon a time"}')
    return lines


def _line(setup: Setup, number: int, text: str) -> Line:
    line = _object(text)
    unknown = sorted(line.keys() - {"id", *PROMPTS, *FIELDS})
    if unknown:
        raise RequestError(f"unknown key `{unknown[0]}`", hint=f"known are {', '.join(('id', *PROMPTS, *FIELDS))}")
    if isinstance(line.get("id"), dict | list):
        raise RequestError("`id` is an object or a list, expected a text or a number", hint='"id": "a"')
    changes: dict[str, Any] = {}
    for key, (name, types) in FIELDS.items():
        if key in line:
            changes[name] = _value(key, line[key], types)
    if "loras" in changes and setup.settings.merge_lora:
        raise UsageError("`lora` of one line beside `--merge-lora`", hint="leave out `--merge-lora`")
    settings = replace(setup.settings, **changes)
    adapters = setup.adapters
    if "loras" in changes:
        adapters = tuple(open_weighted(adapter, ":", "lora") for adapter in settings.loras)
    own = replace(setup, settings=settings, adapters=adapters)
    return Line(number, line.get("id", number), own.request(_prompt_ids(setup, line)))


def _object(text: str) -> dict[str, Any]:
    try:
        line = parse_line(text)
    except ValueError as error:
        raise RequestError(f"no JSON: {error}", hint='write {"prompt": "Once upon a time"}') from error
    if not isinstance(line, dict):
        raise RequestError("no JSON object", hint='write {"prompt": "Once upon a time"}')
    return line


def _value(key: str, value: Any, types: type | tuple[type, ...]) -> Any:
    """A value of these types; one text stands for a list of it."""
    if types is list:
        value = [value] if isinstance(value, str) else value
        if isinstance(value, list) and all(isinstance(text, str) for text in value):
            return tuple(value)
        raise RequestError(f"`{key}` is {value!r}, expected a text or a list of texts", hint=f'"{key}": ["…"]')
    if isinstance(value, bool) != (types is bool) or not isinstance(value, types):
        expected = "true or false" if types is bool else "a whole number" if types is int else "a number"
        raise RequestError(f"`{key}` is {value!r}, expected {expected}", hint=f"correct `{key}`")
    if isinstance(value, int | float) and abs(value) > LARGEST:
        raise RequestError(f"`{key}` is a number beyond 2^63", hint=f"correct `{key}`")
    return value


def _prompt_ids(setup: Setup, line: dict[str, Any]) -> list[int]:
    given = [key for key in PROMPTS if key in line]
    if len(given) != 1:
        raise RequestError(
            f"{' and '.join(given) or 'no prompt'} given, expected one of {', '.join(PROMPTS)}",
            hint='"prompt": "Once upon a time"',
        )
    (key,) = given
    value, tokenizer = line[key], setup.tokenizer
    if key == "messages":
        if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
            raise RequestError("`messages` is no list of objects", hint='[{"role": "user", "content": "Hello"}]')
        return tokenizer.chat(value)
    if not isinstance(value, str):
        raise RequestError(f"`{key}` is {value!r}, expected a text", hint=f'"{key}": "…"')
    if key == "chat":
        return tokenizer.chat([{"role": "user", "content": value}])
    return tokenizer.encode(value, special=True)
