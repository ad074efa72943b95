"""Whatever runs beside a request, and however often it loses its pages: it gets the answer that it gets alone."""

import random

import pytest
import tiny
from tiny_lora import write_adapter

from quantkit.checkpoint.adapter import open_adapter
from quantkit.errors import RequestError
from quantkit.runtime.acceptance import Guess
from quantkit.runtime.adapters import AdapterSet
from quantkit.runtime.cache_format import cache_format
from quantkit.runtime.capacity import CachePlan
from quantkit.runtime.drafts import ModelDraft, NgramDraft
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.pace import Pace
from quantkit.runtime.page_pool import PagePool
from quantkit.runtime.prefix_cache import PrefixCache
from quantkit.runtime.request import Request
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import Limits, Scheduler
from quantkit.runtime.tokenizer import Tokenizer

LENGTHS = (1, 5, 40, 3, 260, 17, 2, 90, 255, 256, 8, 300, 1, 64, 120, 30)


def open_generator(path, **options):
    return Generator(load(path), Tokenizer.open(path), **options)


def make_pool(generator, pages):
    config = generator.model.config
    return PagePool(config, pages, cache_format(None, config.head_dim, generator.model.dtype))


def ragged(new_tokens=12, **settings):
    """Sixteen requests of other lengths, on both sides of a page."""
    draw = random.Random(3)
    return [
        Request([draw.randrange(5, 270) for _ in range(length)], new_tokens + index, **settings)
        for index, length in enumerate(LENGTHS)
    ]


def serve(generator, requests, pages=40, share=False, **limits):
    pool = make_pool(generator, pages)
    prefixes = PrefixCache(pool, generator.model.config) if share else None
    scheduler = Scheduler(generator, pool, Limits(**limits), prefixes)
    numbers = [scheduler.add(request) for request in requests]
    texts = dict.fromkeys(numbers, "")
    for number, delta in scheduler.stream():
        texts[number] += delta.text
    assert not scheduler.busy and scheduler.pool.free_pages == pages
    done = [scheduler.served[number].completion for number in numbers]
    assert [texts[number] for number in numbers] == [completion.text for completion in done]
    return [completion.token_ids for completion in done], scheduler


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return open_generator(tiny.write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def alone(generator):
    return [generator.run(request).token_ids for request in ragged()]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("seed", "budget"), [(0, 7), (1, 64), (2, 512)])
def test_in_any_order_and_any_budget(seed, budget, share, generator, alone):
    order = list(range(16))
    random.Random(seed).shuffle(order)
    requests = ragged()
    found, scheduler = serve(generator, [requests[index] for index in order], share=share, token_budget=budget)
    assert found == [alone[index] for index in order] and scheduler.preemptions == 0


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("running", [1, 16])
def test_preempted_requests_read_their_text_again(running, share, generator, alone):
    """Three pages for sixteen requests which need up to two each, admitted by their prompts."""
    requests = ragged(new_tokens=12)
    found, scheduler = serve(generator, requests, 3, share, optimistic=True, most_running=running, token_budget=100)
    assert found == alone
    tight = [Request([7] * 250, 20), Request([9] * 250, 20), Request([11] * 250, 20)]
    found, scheduler = serve(generator, tight, 5, share, optimistic=True)
    assert scheduler.preemptions > 0 and sum(done.preemptions for done in scheduler.served.values()) > 0
    assert found == [generator.run(request).token_ids for request in tight]


@pytest.mark.parametrize("family", ["Gemma2ForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM"])
def test_windows_experts_and_fused_linears(family, tmp_path):
    generator = open_generator(tiny.write_model(tmp_path / "model", family))
    requests = ragged()[:8]
    found, _ = serve(generator, requests, token_budget=50)
    assert found == [generator.run(request).token_ids for request in requests]


def test_who_begins_alike_reads_it_once(generator):
    """Twelve requests behind a common beginning of two pages and a bit, four behind another one, all at once."""
    draw = random.Random(5)
    beginnings = [[draw.randrange(5, 270) for _ in range(600)] for _ in range(2)]
    requests = [Request([*beginnings[index % 4 == 3], index + 5, index + 6], 8 + index) for index in range(16)]
    draw.shuffle(requests)
    expected = [generator.run(request).token_ids for request in requests]
    plain, without = serve(generator, requests, 100)
    found, scheduler = serve(generator, requests, 100, share=True)
    assert plain == found == expected
    shared = [done.shared_tokens for done in scheduler.served.values()]
    assert sorted(shared) == [0] * 2 + [512] * 14 and not any(done.shared_tokens for done in without.served.values())
    assert scheduler.prefixes.found_tokens == 14 * 512
    tight, scheduler = serve(generator, requests, 9, share=True, optimistic=True, token_budget=90)
    assert tight == expected


def test_the_next_turn_of_a_conversation_reads_what_is_new(generator):
    pool = make_pool(generator, 12)
    scheduler = Scheduler(generator, pool, prefixes=PrefixCache(pool, generator.model.config))
    first = scheduler.add(Request([9] * 300, 250))
    for _ in scheduler.stream():
        pass
    answer = scheduler.served[first].completion.token_ids
    turn = Request([*[9] * 300, *answer, 6, 5], 10)
    second = scheduler.add(turn)
    for _ in scheduler.stream():
        pass
    assert scheduler.served[second].shared_tokens == 512
    assert scheduler.served[second].completion.token_ids == generator.run(turn).token_ids


def test_adapters_never_share(generator, tmp_path):
    sets = [AdapterSet()]
    for seed in range(2):
        write_adapter(tmp_path / str(seed), {"model.layers.0.mlp.up_proj": (128, 64, 8)}, seed=seed)
        sets.append(AdapterSet.of([(open_adapter(tmp_path / str(seed)), 1.0)]))
    requests = [Request([7] * 600, 10, adapters=sets[index % 3]) for index in range(6)]
    found, scheduler = serve(generator, requests, share=True)
    assert found == [generator.run(request).token_ids for request in requests] and len(set(found)) == 3
    assert sorted(done.shared_tokens for done in scheduler.served.values()) == [0] * 3 + [512] * 3


def test_worst_cases_are_set_aside(generator):
    """Two pages each: of five pages two requests run at once, and none is ever preempted."""
    requests = [Request([7] * 250, 20)] * 4
    scheduler = Scheduler(generator, make_pool(generator, 5))
    for request in requests:
        scheduler.add(request)
    most = 0
    while scheduler.busy:
        scheduler.step()
        most = max(most, len(scheduler._running))
    assert most == 2 and scheduler.preemptions == 0 and len(scheduler.served) == 4


def test_settings_seeds_stops_and_callbacks_are_each_request_s_own(generator):
    seen = []
    requests = [
        Request([5, 40, 17], 20, Sampling(temperature=1.0), seed=1),
        Request([5, 40, 17], 20, Sampling(temperature=1.0), seed=2),
        Request([5, 40, 17], 20, Sampling(repetition_penalty=100.0)),
        Request([5, 40, 17], 20, callbacks=(lambda delta: seen.append(delta) or (delta.ending() if len(seen) == 3 else delta),)),
        Request([5, 40, 17], 20, Sampling(temperature=0.9), seed=1, banned=("a", "e", "t")),
        Request([5, 40, 17], 20, stops=("t", "in")),
    ]
    found, scheduler = serve(generator, requests)
    assert len(seen) == 3 and len(found[3]) == 3 and scheduler.served[3].completion.finish_reason == "callback"
    seen.clear()
    assert found == [generator.run(request).token_ids for request in requests]


@pytest.mark.parametrize("draft", ["model", "ngram"])
@pytest.mark.parametrize("budget", [9, 200])
def test_guesses_in_a_batch(draft, budget, generator, alone, tmp_path):
    other = ModelDraft(generator.model, 3) if draft == "model" else NgramDraft(3)
    drafted = Generator(generator.model, generator.tokenizer, draft=other)
    found, scheduler = serve(drafted, ragged(), token_budget=budget)
    assert found == alone
    if draft == "model":
        assert all(done.completion.tally.passes_saved > 0 for done in scheduler.served.values())
    found, scheduler = serve(drafted, [Request([7] * 250, 20)] * 3, 5, optimistic=True)
    assert found == [generator.run(Request([7] * 250, 20)).token_ids] * 3 and scheduler.preemptions


def test_each_request_has_its_own_adapters(generator, tmp_path):
    modules = {f"model.layers.{layer}.mlp.up_proj": (128, 64, 8) for layer in range(2)}
    sets = [AdapterSet()]
    for seed in range(2):
        write_adapter(tmp_path / str(seed), modules, seed=seed)
        sets.append(AdapterSet.of([(open_adapter(tmp_path / str(seed)), 1.0)]))
    requests = [Request([5, 40, 17], 10, adapters=sets[index % 3]) for index in range(6)]
    found, _ = serve(generator, requests)
    assert found == [generator.run(request).token_ids for request in requests]
    assert len(set(found)) == 3


def test_requests_may_come_while_others_run(generator, alone):
    scheduler = Scheduler(generator, make_pool(generator, 40), Limits(token_budget=64))
    waiting = ragged()
    while scheduler.busy or waiting:
        if waiting:
            scheduler.add(waiting.pop(0))
        scheduler.step()
    assert [scheduler.served[number].completion.token_ids for number in range(16)] == alone


def test_what_never_fits_is_refused_at_once(generator):
    scheduler = Scheduler(generator, make_pool(generator, 2))
    with pytest.raises(RequestError, match="500 prompt tokens and 20 new ones need 520 positions, the cache has 512") as caught:
        scheduler.add(Request([5] * 500, 20))
    assert "`--cache-tokens 768`" in caught.value.hint
    with pytest.raises(RequestError, match="the model's context has 2048"):
        scheduler.add(Request([5] * 2000, 100))
    with pytest.raises(RequestError, match="`--token-budget` is 0"):
        Limits(token_budget=0)


def test_a_pass_has_no_more_tokens_than_its_budget(generator, monkeypatch):
    from quantkit.runtime import scheduler as module

    sizes = []
    real = module.step

    def counting(model, pool, parts, decoding):
        sizes.append(sum(most for _, most in parts))
        return real(model, pool, parts, decoding)

    monkeypatch.setattr(module, "step", counting)
    serve(generator, ragged(), token_budget=48)
    assert max(sizes) == 48
    _, scheduler = serve(generator, [Request([5] * 200, 5), Request([6] * 9, 30)], token_budget=8)
    assert scheduler.served[1].completion.token_ids, "a long prompt does not keep others waiting"


def test_the_pace_follows_the_target():
    pace = Pace(512, 0.1)
    pace.note(512, 0.2)
    assert pace.budget == 358, "no more than a third less at once"
    for _ in range(20):
        pace.note(pace.budget, pace.budget / 1000)
    assert 80 <= pace.budget <= 110, "a thousand tokens a second"
    pace.note(10, 0.01)
    assert pace.budget <= 110, "a pass that was not full says nothing"
    for _ in range(60):
        pace.note(pace.budget, 0.001)
    assert pace.budget == 512
    pace.note(1, 9.0)
    assert Pace(3, None).budget == 3
    for _ in range(30):
        pace.note(pace.budget, 9.0)
    assert pace.budget == 1


def test_windows_asked_for_need_fewer_pages(generator):
    """Texts of four pages in a pool of seven, of which each holds three at once."""
    plan = CachePlan(window=64, sinks=4)
    windowed = Generator(generator.model, generator.tokenizer, plan)
    requests = [Request([seed + 5] * 900, 100) for seed in range(3)]
    pool = plan.pool(generator.model.config, 7 * 256, generator.model.dtype, "cpu", 3)
    scheduler = Scheduler(windowed, pool, Limits(token_budget=300))
    numbers = [scheduler.add(request) for request in requests]
    for _ in scheduler.stream():
        pass
    expected = [windowed.run(request).token_ids for request in requests]
    assert [scheduler.served[number].completion.token_ids for number in numbers] == expected


def test_a_ban_that_goes_back_over_a_dropped_page_reads_the_text_again(generator):
    """The pages of positions before 512 go when the query at 575 comes; the banned text begins before it."""
    windowed = Generator(generator.model, generator.tokenizer, CachePlan(window=64))
    prompt = [draw % 250 + 5 for draw in range(0, 5600, 10)]
    plain = windowed.run(Request(prompt, 30)).token_ids
    decode = generator.tokenizer.decode
    banned = decode(plain)[len(decode(plain[:12])) : len(decode(plain[:22]))]
    request = Request(prompt, 60, banned=(banned,))
    answer = windowed.run(request)
    assert banned and banned not in answer.text and answer.token_ids[:10] == plain[:10]
    again = windowed.run(Request([*prompt, *answer.token_ids[:30]], 30, banned=(banned,)))
    assert again.token_ids == answer.token_ids[30:]
    pool = windowed.cache.pool(generator.model.config, 6 * 256, generator.model.dtype, "cpu", 2)
    scheduler = Scheduler(windowed, pool, prefixes=PrefixCache(pool, generator.model.config))
    numbers = [scheduler.add(request), scheduler.add(Request([9] * 500, 90))]
    for _ in scheduler.stream():
        pass
    assert scheduler.served[numbers[0]].completion.token_ids == answer.token_ids
    assert scheduler.pool.free_pages == 6


def long_rope(path, original):
    shape = {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}}
    shape |= {"original_max_position_embeddings": original, "max_position_embeddings": 2048}
    return open_generator(tiny.write_model(path, "Phi3ForCausalLM", **shape))


@pytest.mark.parametrize("budget", [50, 512])
def test_a_text_that_is_read_again_in_a_full_cache(budget, tmp_path):
    """Its first page is kept for others when it crosses the change of its rope, and must not be written into."""
    generator = long_rope(tmp_path / "model", 300)
    request = Request([draw % 250 + 5 for draw in range(0, 2900, 10)], 40)
    expected = [generator.run(request).token_ids] * 2
    assert serve(generator, [request], 2, share=True, token_budget=budget)[0] == expected[:1]
    for optimistic in (False, True):
        found, _ = serve(generator, [request] * 2, 4, share=True, token_budget=budget, optimistic=optimistic)
        assert found == expected


def test_a_prompt_beyond_the_change_of_its_rope_is_read_in_pieces(tmp_path):
    generator = long_rope(tmp_path / "model", 300)
    request = Request([draw % 250 + 5 for draw in range(0, 4000, 10)], 5)
    scheduler = Scheduler(generator, make_pool(generator, 2), Limits(token_budget=100))
    scheduler.add(request)
    for _ in range(10):
        scheduler.step()
    assert not scheduler.busy
    assert scheduler.served[0].completion.token_ids == generator.run(request).token_ids


def test_guesses_that_did_not_stand_are_not_kept_for_others(generator):
    """254 of 300 guesses stand: position 255 was read under another token than the text has there."""
    answer = list(generator.run(Request([7], 300)).token_ids)
    guesses = [*answer[:254], (answer[254] + 1) % 250 + 5, *answer[255:]]
    drafted = Generator(generator.model, generator.tokenizer, draft=_Told(guesses))
    pool = make_pool(generator, 4)
    scheduler = Scheduler(drafted, pool, prefixes=PrefixCache(pool, generator.model.config))
    scheduler.add(Request([7], 300))
    scheduler.step()
    (entry,) = scheduler._running
    assert len(entry.running.answer.ids) == 256 and len(scheduler.prefixes) == 0


class _Told:
    count = 300

    def __init__(self, tokens):
        self.tokens = tokens

    def begin(self, capacity, vocab):
        return self

    def guess(self, answer, most):
        return [Guess(token) for token in self.tokens[len(answer.ids) - answer.prompt_tokens :][:most]]


def test_what_a_request_finds_of_itself_is_not_shared(generator):
    requests = [Request([seed] * 300, 250) for seed in (7, 9)]
    _, scheduler = serve(generator, requests, 5, share=True, optimistic=True)
    assert scheduler.preemptions and not any(done.shared_tokens for done in scheduler.served.values())
    assert scheduler.prefixes.found_tokens
