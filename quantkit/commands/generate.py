"""`quantkit generate`: load a model, continue one prompt, and say how fast that went.

Everything that can be refused is refused before the first token: an empty or overlong prompt, a missing chat template,
a setting out of range.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.commands.generation import queue
from quantkit.commands.generation.queue import QueueReport
from quantkit.commands.generation.setup import Setup, cache_rows, decode_rows, idle_options, prompt_ids, ran_on
from quantkit.progress import Progress, Tqdm
from quantkit.runtime.placement import Placement
from quantkit.runtime.request import Completion, Delta, Tally
from quantkit.runtime.spread import told
from quantkit.settings import GenerateSettings


@dataclass(frozen=True, slots=True)
class GenerateReport:
    """The answer and its cost. `load_seconds` has all that comes before the prompt: reading, repacking, compiling."""

    model: str
    completion: Completion
    load_seconds: float
    placement: Placement
    processes: int = 1

    def rows(self) -> list[list[str]]:
        """Name and figure, for the console."""
        done = self.completion
        decode = done.decode_tokens_per_second
        return [
            ["prompt", f"{done.prompt_tokens} tokens, {done.prefill_tokens_per_second:.1f}/s"],
            ["answer", f"{len(done.token_ids)} tokens" + ("" if decode is None else f", {decode:.1f}/s")],
            ["ended by", done.finish_reason if done.stop is None else f"{done.finish_reason}, at `{done.stop}`"],
            *_drafted(done.tally),
            *cache_rows(done.cache),
            ["loaded in", f"{self.load_seconds:.1f} s"],
            ran_on(self.placement, self.processes),
            *decode_rows(done.decode_path, self.placement),
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
            "draft": None if done.tally is None else done.tally.as_json(),
            **({} if done.cache is None else asdict(done.cache)),
            "load_seconds": self.load_seconds,
            "dtype": self.placement.dtype_name,
            "device": self.placement.device,
            "backend": self.placement.backend,
            "decode_path": None if done.decode_path is None else asdict(done.decode_path),
            "processes": self.processes,
        }


def generate(
    model: str | Path,
    prompt: str | None = None,
    *,
    on_text: Callable[[str], bool] = lambda text: True,
    progress: Progress | None = None,
    **options: Any,
) -> GenerateReport | QueueReport:
    """Continue `prompt` with `model`. Options are the fields of `quantkit.settings.GenerateSettings`; see `run`.

        report = quantkit.generate("models/llama", chat="What is gravity?", max_new_tokens=64)
        print(report.completion.text)
    """
    return run(GenerateSettings(str(model), prompt, **options), progress or Tqdm(), on_text)


def run(
    settings: GenerateSettings, progress: Progress, on_text: Callable[[str], bool] = lambda text: True
) -> GenerateReport | QueueReport:
    """Generate; a file of prompts is answered as `generation.queue` does. `on_text` gets the text of a single answer as
    it comes, never half a character, and returns whether to go on.

    Raises UsageError for settings, CheckpointError for the model's files, RequestError for a prompt that cannot be
    served, GateError when the model's logits are no finite numbers.
    """
    if settings.prompts_file is not None:
        return queue.run(settings, progress)
    start = time.perf_counter()
    setup = Setup.open(settings)

    def show(delta: Delta) -> Delta:
        return delta if on_text(delta.text) else delta.ending()

    request = setup.request(prompt_ids(settings, setup.tokenizer), (show,))
    generator = setup.load(len(request.ids) + request.max_new_tokens + setup.draft_tokens)
    generator.warm_up(request)
    load_seconds = time.perf_counter() - start
    for note in filter(None, (*idle_options(settings), *setup.checkpoint.notes, told(generator.model.devices))):
        progress.say(note)
    beyond = len(request.ids) + request.max_new_tokens - setup.checkpoint.model_config.context
    if beyond > 0:
        progress.say(f"the text may grow {beyond} positions beyond the model's context, where it was never tried")
    if not setup.tokenizer.eos_ids and not settings.ignore_eos:
        folder = setup.checkpoint.path
        progress.say(f"`{folder}` names no end-of-text token: generating all {settings.max_new_tokens} tokens")
    return GenerateReport(settings.model, generator.run(request), load_seconds, setup.placement, setup.ranks.size)


def _drafted(tally: Tally | None) -> list[list[str]]:
    if tally is None:
        return []
    told = f"{tally.accepted} of {tally.guessed} guesses stood, {tally.accepted_length:.2f} at a time; "
    return [["draft", told + f"{tally.passes} passes of the model for {tally.tokens} tokens"]]
