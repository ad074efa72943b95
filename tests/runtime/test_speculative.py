"""Guesses change how many passes an answer takes, and nothing else."""

import pytest
import tiny
import torch

from quantkit.errors import GateError, RequestError
from quantkit.runtime.acceptance import Guess
from quantkit.runtime.drafts import ModelDraft, NgramDraft, follow, require_same_vocabulary
from quantkit.runtime.generator import Generator
from quantkit.runtime.load import load
from quantkit.runtime.request import Request
from quantkit.runtime.sampler import Sampling, distribution
from quantkit.runtime.tokenizer import Tokenizer

PROMPT = [5, 40, 17, 200, 33, 5, 40, 17]


class Oracle:
    """Guesses that are right up to a point: `wrong` of every `wrong` + 1 tokens is not what comes."""

    def __init__(self, expected, count, wrong=None):
        self.expected, self.count, self.wrong = expected, count, wrong

    def begin(self, capacity, vocab):
        return self

    def guess(self, answer, most):
        start = len(answer.ids) - answer.prompt_tokens
        tokens = list(self.expected[start : start + min(most, self.count)])
        return [
            Guess(token if self.wrong is None or (start + index) % (self.wrong + 1) else (token + 1) % 320)
            for index, token in enumerate(tokens)
        ]


def perturbed(path, family, scale, **shape):
    """The same model with noise in its head: a draft that is right now and then."""
    tiny.write_model(path, family, **shape)
    tensors = tiny.make_tensors(tiny.make_config(family, **shape), 0, torch.float32)
    name = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(1))
    tensors[name] = tensors[name] + scale * float(tensors[name].std()) * noise
    tiny.write_tensors(path, tensors)
    return load(path)


@pytest.mark.parametrize(
    ("family", "count"),
    [("LlamaForCausalLM", 1), ("LlamaForCausalLM", 6), ("Gemma2ForCausalLM", 4), ("MixtralForCausalLM", 3)],
)
def test_greedy_answers_are_those_without_a_draft(family, count, tmp_path, tokenizer):
    """40 tokens reach beyond windows of 16; the guesses of a model, of its own shadow, and of n-grams."""
    model = load(tiny.write_model(tmp_path / "model", family))
    plain = Generator(model, tokenizer).run(Request(PROMPT, 40))
    shadow = perturbed(tmp_path / "shadow", family, 0.5)
    other = load(tiny.write_model(tmp_path / "other", seed=9))
    for draft in (ModelDraft(model, count), ModelDraft(shadow, count), ModelDraft(other, count), NgramDraft(count)):
        found = Generator(model, tokenizer, draft=draft).run(Request(PROMPT, 40))
        assert found.token_ids == plain.token_ids and found.text == plain.text
        assert found.log_probabilities == pytest.approx(plain.log_probabilities, abs=1e-4)
        tally = found.tally
        assert tally.tokens == 40 == tally.passes + tally.passes_saved and tally.accepted <= tally.guessed
        assert tally.accepted == tally.passes_saved
    assert plain.tally is None


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("wrong", [None, 0, 1, 3])
def test_guesses_that_are_always_never_or_sometimes_right(count, wrong, model, tokenizer):
    plain = Generator(model, tokenizer).run(Request(PROMPT, 30)).token_ids
    found = Generator(model, tokenizer, draft=Oracle(plain, count, wrong)).run(Request(PROMPT, 30))
    assert found.token_ids == plain
    if wrong is None:
        assert found.tally.accepted == found.tally.guessed and found.tally.passes == -(-30 // (count + 1))
        assert found.tally.accepted_length > count - 1
    if wrong == 0:
        assert found.tally.accepted == 0 and found.tally.passes == 30


def test_a_draft_of_the_same_model_is_always_right_also_when_drawn(model, tokenizer):
    sampling = Sampling(temperature=1.5, top_k=50, frequency_penalty=0.5)
    found = Generator(model, tokenizer, draft=ModelDraft(model, 4)).run(Request(PROMPT, 40, sampling, seed=5))
    assert found.tally.accepted == found.tally.guessed and found.tally.passes == 8


def test_stop_tokens_stop_strings_banned_strings_and_callbacks(model, tokenizer):
    plain = Generator(model, tokenizer).run(Request(PROMPT, 40))
    stop = plain.text[8:10]
    seen = []

    def callback(delta):
        seen.append(delta.token_id)
        return delta.ending() if len(seen) % 7 == 0 else delta

    for settings in (
        {"stop_ids": frozenset({plain.token_ids[11]})},
        {"stops": (stop,)},
        {"banned": (stop, plain.text[20:22])},
        {"callbacks": (callback,)},
        {"sampling": Sampling(repetition_penalty=2.0)},
    ):
        expected = Generator(model, tokenizer).run(Request(PROMPT, 40, **settings))
        for draft in (ModelDraft(model, 4), Oracle(plain.token_ids, 5), NgramDraft(3)):
            found = Generator(model, tokenizer, draft=draft).run(Request(PROMPT, 40, **settings))
            assert [d.token_id for d in found.deltas] == [d.token_id for d in expected.deltas], settings
            assert (found.text, found.finish_reason, found.stop) == (expected.text, expected.finish_reason, expected.stop)


def test_a_rope_that_changes_on_the_way(tmp_path, tokenizer):
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    shape = {"rope_scaling": scaling, "original_max_position_embeddings": 20, "max_position_embeddings": 80}
    model = load(tiny.write_model(tmp_path / "model", "Phi3ForCausalLM", **shape))
    plain = Generator(model, tokenizer).run(Request(PROMPT, 40)).token_ids
    for draft in (Oracle(plain, 6), ModelDraft(model, 3)):
        found = Generator(model, tokenizer, draft=draft).run(Request(PROMPT, 40))
        assert found.token_ids == plain and found.tally.accepted > 0


def test_the_last_position_can_be_used(tmp_path, tokenizer):
    model = load(tiny.write_model(tmp_path / "model", max_position_embeddings=64))
    request = Request(PROMPT, 64 - len(PROMPT))
    assert len(Generator(model, tokenizer, draft=ModelDraft(model, 8)).run(request).token_ids) == 56


def test_drawn_tokens_are_distributed_as_without_a_draft(tmp_path, tokenizer):
    """The second token, summed over the first, against what the model says of each first one."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_key_value_heads": 4}
    model = load(tiny.write_model(tmp_path / "model", **shape))
    draft = ModelDraft(perturbed(tmp_path / "draft", "LlamaForCausalLM", 0.7, **shape), 2)
    sampling = Sampling(temperature=1.5, top_k=6)
    generator = Generator(model, tokenizer, draft=draft)
    draws, counts = 500, torch.zeros(320, dtype=torch.float64)
    accepted = 0
    for seed in range(draws):
        completion = generator.run(Request([5], 2, sampling, seed=seed))
        counts[completion.token_ids[1]] += 1
        accepted += completion.tally.accepted
    first = distribution(model(torch.tensor([[5]]))[0, -1], torch.tensor([5]), sampling)
    expected = torch.zeros(320, dtype=torch.float64)
    for token in first.nonzero()[:, 0].tolist():
        logits = model(torch.tensor([[5, token]]))[0, -1]
        expected += first[token] * distribution(logits, torch.tensor([5, token]), sampling)
    assert 0 < accepted < draws, "some guesses stood and some did not"
    assert bool((counts[expected == 0] == 0).all())
    order = expected.argsort(descending=True)
    likely, rest = order[:10], order[10:]
    observed, predicted = (torch.cat((each[likely], each[rest].sum()[None])) for each in (counts, draws * expected))
    assert float(((observed - predicted) ** 2 / predicted).sum()) < 29.6  # 10 degrees, once in a thousand


def test_what_followed_the_same_end_before():
    assert follow([1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert follow([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8], "the latest place"
    assert follow([4, 1, 2, 7, 0, 1, 2, 8, 4, 1, 2], 1) == [7], "the longest end"
    assert follow([3, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1], "a text that repeats itself goes on doing so"
    assert follow([1, 2, 3], 4) == follow([1], 4) == follow([1, 1], 3) == []


def test_vocabularies_must_be_the_same(tmp_path, folder):
    tiny.write_tokenizer(tmp_path)
    require_same_vocabulary(Tokenizer.open(folder), Tokenizer.open(tmp_path))
    text = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|end|>"), encoding="utf-8")
    with pytest.raises(RequestError, match=r"vocabularies differ, in `<\|"):
        require_same_vocabulary(Tokenizer.open(folder), Tokenizer.open(tmp_path))


def test_a_draft_with_a_wider_or_narrower_embedding(model, tokenizer, tmp_path):
    """Rows beyond the vocabulary are padding; ids that a draft has no row for cannot be read by it."""
    for vocab in (290, 340):
        draft = ModelDraft(load(tiny.write_model(tmp_path / str(vocab), vocab_size=vocab)), 3)
        for sampling in (Sampling(), Sampling(temperature=3.0)):
            found = Generator(model, tokenizer, draft=draft).run(Request(PROMPT, 40, sampling, seed=2))
            assert len(found.token_ids) == 40 and found.tally.guessed > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_whose_logits_are_no_numbers_is_named(temperature, tmp_path, tokenizer):
    model = load(tiny.write_model(tmp_path / "model"))
    folder = tiny.write_model(tmp_path / "draft")
    tensors = tiny.make_tensors(tiny.make_config("LlamaForCausalLM"), 0, torch.float32)
    tensors["model.layers.1.mlp.down_proj.weight"][3] = float("nan")
    tiny.write_tensors(folder, tensors)
    generator = Generator(model, tokenizer, draft=ModelDraft(load(folder), 3))
    with pytest.raises(GateError, match=r"the draft model: .* not finite numbers: the first come from block 1") as caught:
        generator.run(Request(PROMPT, 20, Sampling(temperature)))
    assert "--draft" in caught.value.hint
