"""`quantkit generate`: options → settings → `commands.generate.run` → text as it comes, or JSON."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import GenerateDtype, RunDevice
from quantkit.settings import GenerateSettings


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a model, or a hub id.")],
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", help="A message to answer, put into the model's chat template.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="UTF-8 file with the text to continue.")
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens", help="Stop after this many; prompt and these must fit the model's context.", min=1
        ),
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option("--temperature", help="0 takes the likeliest token; 1 draws as the model says; more is wilder."),
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest tokens only; 0 is all.")] = 0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Draw from the likeliest tokens that together have this probability; 1 is all."),
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Leave out tokens less likely than this times the likeliest; 0 is all.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 makes what was said before less likely; 1 is none.")
    ] = 1.0,
    typical_p: Annotated[
        float,
        typer.Option("--typical-p", help="Draw from tokens of about expected surprise, of this probability; 1 is all."),
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="Taken off a token's logit each time the answer has it.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Taken off a token's logit once the answer has it.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed draws the same text.", min=0, max=2**63 - 1)] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")
    ] = None,
    stop_token: Annotated[
        list[str] | None, typer.Option("--stop-token", help="End at this token too, spelled or numbered.")
    ] = None,
    ban: Annotated[
        list[str] | None, typer.Option("--ban", help="Text that the answer must not contain; goes around it.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora", metavar="DIR[:WEIGHT]", help="A PEFT adapter to apply; several add up, each with its weight."
        ),
    ] = None,
    merge_lora: Annotated[
        bool, typer.Option("--merge-lora", help="Merge the adapters into the weights of a dense model at load.")
    ] = False,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft", metavar="DIR|ngram", help="Guess tokens by a smaller model, or by what the text said before."
        ),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option("--draft-tokens", help="Tokens guessed at a time, which one pass then checks.", min=1, max=64)
    ] = 4,
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts-file", help="JSONL, a request on each line; answers come as JSONL too."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Requests of a file that run at once.", min=1)] = 16,
    token_budget: Annotated[
        int, typer.Option("--token-budget", help="Tokens in a pass of the model, of all requests together.", min=1)
    ] = 512,
    optimistic: Annotated[
        bool,
        typer.Option("--optimistic", help="Admit requests by their prompts; the youngest waits when pages run out."),
    ] = False,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes/--no-share-prefixes", help="Read what requests of a file begin with in common once only."
        ),
    ] = True,
    cache_fraction: Annotated[
        float, typer.Option("--cache-fraction", help="Share of the free memory that the cache of a file may take.")
    ] = 0.9,
    latency_ms: Annotated[
        float | None, typer.Option("--latency-ms", help="Make passes smaller until they take no longer.", min=1)
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option("--cache-tokens", help="Positions of the cache; what is needed if not given.", min=1)
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            "--kv", help="Format of the cache: fp16, int8, k8v4 or q4_0; that of the arithmetic if not given."
        ),
    ] = None,
    kv_resident: Annotated[
        int,
        typer.Option(
            "--kv-resident", help="Newest positions that stay on the device, others in host memory; 0 is all.", min=0
        ),
    ] = 0,
    kv_window: Annotated[
        int | None, typer.Option("--kv-window", help="Positions that a token sees; all if not given.", min=1)
    ] = None,
    kv_sink: Annotated[
        int, typer.Option("--kv-sink", help="First positions that it sees beside the window.", min=0)
    ] = 0,
    allow_beyond_context: Annotated[
        bool, typer.Option("--allow-beyond-context", help="Let a text outgrow the context of the model.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    device: RunDevice = "auto",
    dtype: GenerateDtype = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Continue a prompt with MODEL, or a file of them; the text appears as it is made.

    Under `torchrun` several processes share the model, and the first one speaks.
    """
    settings = GenerateSettings(
        model=model,
        prompt=prompt,
        chat=chat,
        prompt_file=prompt_file,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        stops=tuple(stop or ()),
        stop_tokens=tuple(stop_token or ()),
        banned=tuple(ban or ()),
        loras=tuple(lora or ()),
        merge_lora=merge_lora,
        draft=draft,
        draft_tokens=draft_tokens,
        kv=kv,
        cache_tokens=cache_tokens,
        kv_resident=kv_resident,
        kv_window=kv_window,
        kv_sink=kv_sink,
        allow_beyond_context=allow_beyond_context,
        prompts_file=prompts_file,
        batch=batch,
        token_budget=token_budget,
        optimistic=optimistic,
        share_prefixes=share_prefixes,
        cache_fraction=cache_fraction,
        latency_ms=latency_ms,
        ignore_eos=ignore_eos,
        device=device,
        dtype=dtype,
    )
    from quantkit import console
    from quantkit.commands.generate import run
    from quantkit.commands.generation import queue
    from quantkit.progress import Silent
    from quantkit.runtime.ranks import is_first

    if not is_first():
        run(settings, Silent())
        return

    def show(text: str) -> bool:
        console.print_text(text, end="")
        return True

    if as_json:
        console.print_json(run(settings, console.Bars()).as_json())
        return
    if prompts_file is not None:
        rows = queue.run(settings, console.Bars(), console.print_json).rows()
    else:
        rows = run(settings, console.Bars(), show).rows()
        console.print_text("")
    for name, figure in rows:
        console.say(f"{name} {figure}")
