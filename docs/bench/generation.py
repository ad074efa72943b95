"""Speed of generation as ratios within one run: a queue against one request after another, guesses against none.

    python docs/bench/generation.py queue MODEL --requests 32 --batch 16 --tokens 64
    python docs/bench/generation.py speculative MODEL --draft DIR --draft ngram --draft-tokens 4 --tokens 128
    python docs/bench/generation.py speculative MODEL --draft ngram --repeat

Every comparison checks that the tokens are the same ones. Seconds of the processor tell more than those on the wall
where other programs run.
"""

import argparse
import itertools
import statistics
import time

import torch

SUBJECTS = (
    "a lighthouse keeper and the sea", "how bread is baked", "the moons of Jupiter", "why leaves turn red in autumn",
    "a detective who is afraid of the dark", "the history of the bicycle", "how a transistor works",
    "two brothers who meet again", "the rules of chess", "a village below a volcano", "why the sky is blue",
    "how vaccines are made", "a robot that learns to paint", "the life of bees", "how bridges carry weight",
    "a letter that came too late", "what inflation is", "the first day of school", "how glaciers move",
    "a train in the snow",
)  # fmt: skip
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child. Use simple words, short sentences and one example from everyday life.",
    "Make a list of five facts about {}.",
)


PASSAGE = (
    "The harbour lay still in the early light. Two boats had come in during the night, and their crews were carrying "
    "crates of herring to the market hall, where the auction would begin at six. Nobody spoke of the storm. "
)


def prompts(count: int) -> list[str]:
    """`count` different ones."""
    return [form.format(subject) for form, subject in itertools.islice(itertools.product(FORMS, SUBJECTS), count)]


def open_generator(arguments: argparse.Namespace):
    from quantkit.runtime.generator import Generator
    from quantkit.runtime.load import load
    from quantkit.runtime.tokenizer import Tokenizer

    torch.set_num_threads(arguments.threads)
    return Generator(load(arguments.model), Tokenizer.open(arguments.model))


def requests_for(generator, arguments: argparse.Namespace, count: int) -> list:
    from quantkit.runtime.request import Request

    chat = generator.tokenizer.chat
    if arguments.repeat:  # a text that says the same twice and is about to do so again
        text = generator.tokenizer.encode(2 * PASSAGE + PASSAGE[:41])
        return [Request(text, arguments.tokens)]
    ids = [chat([{"role": "user", "content": text}]) for text in prompts(count)]
    return [Request(prompt, arguments.tokens) for prompt in ids]


def queue(arguments: argparse.Namespace) -> None:
    from quantkit.runtime.scheduler import Limits, Scheduler

    generator = open_generator(arguments)
    requests = requests_for(generator, arguments, arguments.requests)
    generator.warm_up(requests[0])
    start, work = time.perf_counter(), time.process_time()
    alone = [generator.run(request) for request in requests]
    one_by_one, alone_work = time.perf_counter() - start, time.process_time() - work
    pages = sum(sorted(-(-(len(r.ids) + r.max_new_tokens) // 256) for r in requests)[-arguments.batch :])
    scheduler = Scheduler(generator, make_pool(generator, pages), Limits(arguments.budget, arguments.batch))
    start, work = time.perf_counter(), time.process_time()
    numbers = [scheduler.add(request) for request in requests]
    for _ in scheduler.stream():
        pass
    together, queue_work = time.perf_counter() - start, time.process_time() - work
    same = sum(scheduler.served[n].completion.token_ids == a.token_ids for n, a in zip(numbers, alone, strict=True))
    tokens = sum(len(done.token_ids) for done in alone)
    prompt_tokens = sum(done.prompt_tokens for done in alone)
    prefill = prompt_tokens / sum(done.prefill_seconds for done in alone)
    print(f"{len(requests)} requests, {prompt_tokens} prompt tokens, {tokens} new ones; the same answers: {same}")
    for name, wall, busy in (("one after another", one_by_one, alone_work), ("together", together, queue_work)):
        print(f"{name:17} {wall:7.1f} s, {tokens / wall:6.1f} tokens/s; processor {busy:7.1f} s")
    print(f"{arguments.batch} at once, {scheduler.passes} passes: {one_by_one / together:.2f} times as fast, ", end="")
    print(f"{alone_work / queue_work:.2f} by the processor; ", end="")
    print(f"{tokens / together / prefill:.2f} of the prefill rate of {prefill:.1f} tokens/s")


def make_pool(generator, pages: int):
    from quantkit.runtime.cache_format import cache_format
    from quantkit.runtime.page_pool import PagePool

    config = generator.model.config
    return PagePool(config, pages, cache_format(None, config.head_dim, generator.model.dtype))


def speculative(arguments: argparse.Namespace) -> None:
    from quantkit.runtime.drafts import ModelDraft, NgramDraft
    from quantkit.runtime.generator import Generator
    from quantkit.runtime.load import load

    plain = open_generator(arguments)
    requests = requests_for(plain, arguments, arguments.requests)
    plain.warm_up(requests[0])
    plain_work = time.process_time()
    expected = [plain.run(request) for request in requests]
    plain_work = time.process_time() - plain_work
    for name in arguments.draft:
        count = arguments.draft_tokens
        draft = NgramDraft(count) if name == "ngram" else ModelDraft(load(name), count)
        generator = Generator(plain.model, plain.tokenizer, draft=draft)
        work = time.process_time()
        found = [generator.run(request) for request in requests]
        work = time.process_time() - work
        same = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
        tallies = [done.tally for done in found]
        tokens, passes = sum(t.tokens for t in tallies), sum(t.passes for t in tallies)
        accepted, guessed = sum(t.accepted for t in tallies), sum(t.guessed for t in tallies)
        checked = sum(t.checked for t in tallies)
        speed = [a.decode_seconds / b.decode_seconds for a, b in zip(expected, found, strict=True)]
        print(
            f"{name}, {count} at a time: {same} of {len(found)} answers the same; accepted {accepted} of {guessed} "
            f"({accepted / max(1, guessed):.0%}), {accepted / max(1, checked):.2f} at a time; {tokens} tokens in "
            f"{passes} passes, {tokens / passes:.2f} each; decoding {statistics.median(speed):.2f} times as fast, "
            f"all {plain_work / work:.2f} by the processor"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("queue", "speculative"))
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", action="store_true", help="one text that repeats itself, in place of chats")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--draft-tokens", type=int, default=4)
    arguments = parser.parse_args()
    {"queue": queue, "speculative": speculative}[arguments.what](arguments)


if __name__ == "__main__":
    main()
