"""`quantkit generate`: load a model, continue one prompt, and say how fast that went.

Everything that can be refused is refused before the first token: an empty or overlong prompt, a missing chat template,
a setting out of range.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.adapter import open_weighted
from quantkit.checkpoint.merged import merge
from quantkit.checkpoint.reader import open_checkpoint
from quantkit.errors import RequestError, UsageError
from quantkit.progress import Progress, Tqdm
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load_model
from quantkit.runtime.placement import Placement
from quantkit.runtime.request import Completion, Delta, Request, check
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.tokenizer import Tokenizer
from quantkit.settings import GenerateSettings


@dataclass(frozen=True, slots=True)
class GenerateReport:
    """The answer and its cost. `load_seconds` has all that comes before the prompt: reading, repacking, compiling."""

    model: str
    completion: Completion
    load_seconds: float
    placement: Placement

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        done = self.completion
        decode = done.decode_tokens_per_second
        return [
            ["prompt", f"{done.prompt_tokens} tokens, {done.prefill_tokens_per_second:.1f}/s"],
            ["answer", f"{len(done.token_ids)} tokens" + ("" if decode is None else f", {decode:.1f}/s")],
            ["ended by", done.finish_reason if done.stop is None else f"{done.finish_reason}, at `{done.stop}`"],
            ["loaded in", f"{self.load_seconds:.1f} s"],
            ["ran on", f"{self.placement.device}, {self.placement.dtype_name}, backend {self.placement.backend}"],
        ]

    def as_json(self) -> dict[str, Any]:
        done = self.completion
        return {
            "model": self.model,
            "text": done.text,
            "token_ids": list(done.token_ids),
            "log_probabilities": list(done.log_probabilities),
            "finish_reason": done.finish_reason,
            "stop": done.stop,
            "prompt_tokens": done.prompt_tokens,
            "prefill_tokens_per_second": done.prefill_tokens_per_second,
            "decode_tokens_per_second": done.decode_tokens_per_second,
            "load_seconds": self.load_seconds,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
        }


def generate(
    model: str | Path,
    prompt: str | None = None,
    *,
    on_text: Callable[[str], bool] = lambda text: True,
    progress: Progress | None = None,
    **options: Any,
) -> GenerateReport:
    """Continue `prompt` with `model`. Options are the fields of `quantkit.settings.GenerateSettings`; see `run`.

        report = quantkit.generate("models/llama", chat="What is gravity?", max_new_tokens=64)
        print(report.completion.text)
    """
    return run(GenerateSettings(str(model), prompt, **options), progress or Tqdm(), on_text)


def run(
    settings: GenerateSettings, progress: Progress, on_text: Callable[[str], bool] = lambda text: True
) -> GenerateReport:
    """Generate. `on_text` gets the text as it comes, never half a character, and returns whether to go on.

    Raises UsageError for settings, CheckpointError for the model's files, RequestError for a prompt that cannot be
    served, GateError when the model's logits are no finite numbers.
    """
    sampling = Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        min_p=settings.min_p,
        typical_p=settings.typical_p,
        repetition_penalty=settings.repetition_penalty,
        frequency_penalty=settings.frequency_penalty,
        presence_penalty=settings.presence_penalty,
    )
    placement = Placement.choose(settings.device, settings.dtype)
    start = time.perf_counter()
    checkpoint = open_checkpoint(settings.model)
    folder = checkpoint.path
    tokenizer = Tokenizer.open(folder)
    adapters = [open_weighted(text, ":", "--lora") for text in settings.loras]
    if settings.merge_lora and not adapters:
        raise UsageError("`--merge-lora` without `--lora`", hint="--lora DIR --merge-lora")
    if settings.merge_lora:
        merge(checkpoint, adapters)

    def show(delta: Delta) -> Delta:
        return delta if on_text(delta.text) else delta.ending()

    request = Request(
        ids=_prompt_ids(settings, tokenizer),
        max_new_tokens=settings.max_new_tokens,
        sampling=sampling,
        seed=settings.seed,
        stop_ids=_stop_ids(settings, tokenizer),
        stops=settings.stops,
        banned=settings.banned,
        callbacks=(show,),
        adapters=AdapterSet() if settings.merge_lora else AdapterSet.of(adapters),
    )
    check(request, checkpoint.model_config)
    request.adapters.check(checkpoint.model_config, checkpoint.architecture, folder)
    merged = adapters if settings.merge_lora else ()
    generator = Generator(load_model(checkpoint, placement.device, placement.dtype, merged), tokenizer)
    generator.warm_up(request)
    load_seconds = time.perf_counter() - start
    for note in checkpoint.notes:
        progress.say(note)
    if not tokenizer.eos_ids and not settings.ignore_eos:
        progress.say(f"`{folder}` names no end-of-text token: generating all {settings.max_new_tokens} tokens")
    completion = generator.run(request)
    return GenerateReport(settings.model, completion, load_seconds, placement)


def _prompt_ids(settings: GenerateSettings, tokenizer: Tokenizer) -> list[int]:
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
    text = settings.prompt if settings.prompt_file is None else _read(settings.prompt_file)
    return tokenizer.encode(text or "", special=True)


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


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"`{file}` is not UTF-8 text: byte {error.start} cannot be decoded",
            hint=f"iconv -t UTF-8 -o prompt.txt {file.name}",
        ) from error
    except OSError as error:
        raise RequestError(f"`{file}` cannot be read: {error.strerror}", hint="check `--prompt-file`") from error
