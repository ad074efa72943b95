"""What `quantkit generate` opens and checks before any weight is read: folder, tokenizer, adapters, draft, requests."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit import kernels
from quantkit.checkpoint.adapter import Adapter, open_weighted
from quantkit.checkpoint.merged import merge
from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.errors import RequestError, UsageError, in_shell
from quantkit.kernels import multiply
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.decode_path import GRAPHS, KERNELS, PLAIN, DecodePath
from quantkit.runtime.drafts import Draft, ModelDraft, NgramDraft, require_same_vocabulary
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load_model
from quantkit.runtime.page_pool import CacheUse
from quantkit.runtime.parallel import ParallelPlan
from quantkit.runtime.placement import Placement, has_native_bf16
from quantkit.runtime.ranks import Ranks
from quantkit.runtime.request import Callback, Request, check
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.spread import devices_of
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import GenerateSettings

NGRAM = "ngram"


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is known without weights. Make it with `open`."""

    settings: GenerateSettings
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    placement: Placement
    adapters: tuple[tuple[Adapter, float], ...]
    draft: Checkpoint | None
    ranks: Ranks

    @classmethod
    def open(cls, settings: GenerateSettings) -> "Setup":
        """Joins the other processes that `torchrun` started, if any.

        Raises UsageError for settings, CheckpointError for files, RequestError for a draft of other words.
        """
        sampling_of(settings)
        ranks = Ranks.join(settings.device)
        placement = Placement.choose(settings.device, settings.dtype)
        checkpoint = open_checkpoint(settings.model)
        if settings.dtype == "auto" and placement.device == "cpu" and _is_faster_in_bf16(checkpoint):
            placement = replace(placement, dtype=torch.bfloat16)
        if ranks.size > 1:
            _check_shares(settings, checkpoint, ranks)
        cache_format(settings.kv, checkpoint.model_config.head_dim, placement.dtype)
        tokenizer = Tokenizer.open(checkpoint.path)
        adapters = tuple(open_weighted(text, ":", "--lora") for text in settings.loras)
        if settings.merge_lora and not adapters:
            raise UsageError("`--merge-lora` without `--lora`", hint="--lora DIR --merge-lora")
        if settings.merge_lora:
            merge(checkpoint, adapters)
        draft = None
        if settings.draft is not None and settings.draft != NGRAM:
            draft = open_checkpoint(settings.draft)
            require_same_vocabulary(tokenizer, Tokenizer.open(draft.path))
        return cls(settings, checkpoint, tokenizer, placement, adapters, draft, ranks)

    def request(self, ids: list[int], callbacks: tuple[Callback, ...] = ()) -> Request:
        """The request that the settings describe. Raises RequestError and CheckpointError for one that cannot be."""
        settings = self.settings
        if not 0 <= settings.seed < 2**63:
            raise UsageError(f"`--seed` is {settings.seed}, expected 0 to 2^63 - 1", hint="--seed 0")
        if self.adapters and not settings.merge_lora and self.ranks.size > 1:
            raise UsageError(
                f"adapters cannot be applied on the fly to a model shared by {self.ranks.size} processes",
                hint="merge them into a dense model with `--merge-lora`",
            )
        request = Request(
            ids=self.ranks.of_first(ids),
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling_of(settings),
            seed=settings.seed,
            stop_ids=_stop_ids(settings, self.tokenizer),
            stops=settings.stops,
            banned=settings.banned,
            callbacks=callbacks,
            adapters=AdapterSet() if settings.merge_lora else AdapterSet.of(self.adapters),
        )
        checkpoint = self.checkpoint
        check(request, checkpoint.model_config, self.plan, self.draft_tokens)
        request.adapters.check(checkpoint.model_config, checkpoint.architecture, checkpoint.path)
        return request

    @property
    def plan(self) -> CachePlan:
        """The cache that the settings ask for. Raises UsageError for a number out of range."""
        asked = self.settings
        return CachePlan(
            asked.kv, asked.cache_tokens, asked.kv_resident, asked.kv_window, asked.kv_sink, asked.allow_beyond_context
        )

    @property
    def draft_tokens(self) -> int:
        """Tokens guessed at a time at most."""
        return 0 if self.settings.draft is None else self.settings.draft_tokens

    def load(self, positions: int = 0) -> Generator:
        """Reads the weights, those of the draft too, which every process holds whole. `positions` of cache will be
        needed at least, where layers are to find their places on several devices."""
        merged = self.adapters if self.settings.merge_lora else ()
        config, dtype = self.checkpoint.model_config, self.placement.dtype
        cache = self.plan.layer_bytes(config, positions, dtype)
        model = load_model(self.checkpoint, self.placement.device, dtype, merged, self.ranks, cache)
        return Generator(model, self.tokenizer, self.plan, self._load_draft())

    def _load_draft(self) -> Draft | None:
        if self.settings.draft is None:
            return None
        if self.draft is None:
            return NgramDraft(self.settings.draft_tokens)
        model = load_model(self.draft, devices_of(self.placement.device)[0], self.placement.dtype)
        return ModelDraft(model, self.settings.draft_tokens)


def _check_shares(settings: GenerateSettings, checkpoint: Checkpoint, ranks: Ranks) -> None:
    """Raises UsageError for what several processes cannot do together: all of them have to take the same steps."""
    ParallelPlan.make(checkpoint.model_config, ranks.size, checkpoint.quantization is not None)
    if settings.latency_ms is not None:
        raise UsageError(
            f"`--latency-ms` goes by the clock, which is not the same for {ranks.size} processes",
            hint="use a smaller `--token-budget`",
        )


def _is_faster_in_bf16(checkpoint: Checkpoint) -> bool:
    """Whether this processor multiplies bfloat16, and the bytes that `native_step` makes of it, natively, and the model
    has numbers of 16 bits: one in float32 is run in float32."""
    return (
        kernels.backend("cpu").name == "cpu"
        and multiply.HAS_BYTE_PRODUCTS
        and has_native_bf16()
        and checkpoint.model_config.dtype in ("bfloat16", "float16")
    )


def sampling_of(settings: GenerateSettings) -> Sampling:
    """Raises UsageError for a value out of range."""
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        typical_p=settings.typical_p,
        repetition_penalty=settings.repetition_penalty,
        frequency_penalty=settings.frequency_penalty,
        presence_penalty=settings.presence_penalty,
    )


def idle_options(settings: GenerateSettings) -> list[str]:
    """What was asked for and changes nothing beside the other settings, in words. Requests of a file may have a
    temperature of their own."""
    usual, queued = GenerateSettings(settings.model), settings.prompts_file is not None
    draws, drafts = settings.temperature > 0 or queued, settings.draft is not None
    idle = {
        "without `--temperature` the likeliest token is taken": (
            () if draws else ("top_k", "top_p", "min_p", "typical_p", "seed")
        ),
        "without `--draft` nothing is guessed": () if drafts else ("draft_tokens",),
        "without `--kv-window` every position is seen": ("kv_sink",) if settings.kv_window is None else (),
        "without `--prompts-file` there is one request": (
            ()
            if queued
            else ("batch", "token_budget", "optimistic", "share_prefixes", "cache_fraction", "latency_ms")
        ),
    }
    said = []
    for because, names in idle.items():
        given = [name for name in names if getattr(settings, name) != getattr(usual, name)]
        if given:
            options = ", ".join(f"`--{name.replace('_', '-')}`" for name in given)
            said.append(f"{options}: no effect, {because}")
    return said


def cache_rows(use: CacheUse | None) -> list[list[str]]:
    """What a cache took, for the console."""
    if use is None:
        return []
    told = f"{use.cache_tokens:,} positions in {use.kv_format}, {use.cache_bytes:,} bytes"
    if use.host_bytes:
        told += f" on the device, {use.host_bytes:,} in host memory, {use.pages_streamed:,} pages streamed from there"
    return [["cache", told]]


def ran_on(placement: Placement, processes: int) -> list[str]:
    """Where and how it was computed, for the console."""
    told = f"{placement.device}, {placement.dtype_name}, backend {placement.backend}"
    if processes > 1:
        told += f", {processes} processes, each with its part of weights and cache"
    return ["ran on", told]


def decode_rows(path: DecodePath | None, placement: Placement) -> list[list[str]]:
    """Which way decode steps took, for the console; a GPU alone has more than one."""
    if path is None or placement.backend != "cuda":
        return []
    ways = {
        PLAIN: "one operation at a time: ",
        KERNELS: "kernels, launched one by one: ",
        GRAPHS: "kernels in captured graphs",
    }
    return [["decode steps", ways[path.name] + path.reason]]


def prompt_ids(settings: GenerateSettings, tokenizer: Tokenizer) -> list[int]:
    """The prompt as ids: text with what the tokenizer puts around one, or a chat of one message."""
    given = [
        name
        for name, value in (
            ("--prompt", settings.prompt),
            ("--chat", settings.chat),
            ("--prompt-file", settings.prompt_file),
        )
        if value is not None
    ]
    if len(given) != 1:
        raise UsageError(
            f"{' and '.join(given) or 'no prompt'} given, expected one of `--prompt`, `--chat` and `--prompt-file`",
            hint='--prompt "Once upon a time"',
        )
    if settings.chat is not None:
        return tokenizer.chat([{"role": "user", "content": settings.chat}])
    text = settings.prompt if settings.prompt_file is None else read_text(settings.prompt_file, "--prompt-file")
    return tokenizer.encode(text or "", special=True)


def read_text(file: Path, option: str) -> str:
    """Raises RequestError for a file that cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")  # a byte order mark is no part of the text
    except UnicodeDecodeError as error:
        raise RequestError(
            f"`{file}` is not UTF-8 text: byte {error.start} cannot be decoded",
            hint=f"iconv -t UTF-8 -o prompt.txt {in_shell(file)}",
        ) from error
    except OSError as error:
        raise RequestError(f"`{file}` cannot be read: {error.strerror}", hint=f"check `{option}`") from error


def _stop_ids(settings: GenerateSettings, tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end the answer: end of text, those asked for, and special tokens spelled out as stop strings."""
    ids = set() if settings.ignore_eos else set(tokenizer.eos_ids)
    for token in settings.stop_tokens:
        index = tokenizer.id_of(token)
        if index is None:
            raise RequestError(
                f"the vocabulary of `{settings.model}` has no token `{token}`",
                hint="spell it as tokenizer.json does, give its number, or use `--stop` for a text",
            )
        ids.add(index)
    spelled = [tokenizer.encode(text) for text in settings.stops]
    return frozenset(ids | {found[0] for found in spelled if len(found) == 1 and found[0] in tokenizer.special_ids})
