import pytest
import torch

from quantkit.errors import CalibrationError, RequestError
from quantkit.evaluators import likelihood
from quantkit.evaluators.likelihood import encode_pair, likelihoods, require_room
from quantkit.evaluators.metrics import answer_metrics
from quantkit.evaluators.tasks import Languages, choose, judge_written, make_task


def plain_likelihood(model, before, after):
    """One pair at a time, from all logits."""
    ids = torch.tensor([[*before, *after]])
    likely = model(ids)[0, :-1].double().log_softmax(-1)
    picked = likely[len(before) - 1 :].gather(-1, ids[0, len(before) :, None])
    return float(picked.sum()), bool((likely[len(before) - 1 :].argmax(-1) == ids[0, len(before) :]).all())


def test_likelihoods_of_many_are_those_of_each_alone(model, tokenizer, monkeypatch):
    monkeypatch.setattr(likelihood, "BATCH_TOKENS", 40)
    texts = [("the end", " of the thing"), ("a", " b"), ("on the sands in the other", " x" * 9), ("the end", " is near")]
    pairs = [encode_pair(tokenizer, *text) for text in texts]
    for pair, found in zip(pairs, likelihoods(model, pairs), strict=True):
        value, greedy = plain_likelihood(model, pair.before, pair.after)
        assert found.value == pytest.approx(value, abs=1e-4) and found.greedy is greedy and found.tokens == len(pair.after)


def test_a_greedy_continuation_is_told(model, tokenizer):
    pair = encode_pair(tokenizer, "the end", " x")
    best = int(model(torch.tensor([pair.before]))[0, -1].argmax())
    (found,) = likelihoods(model, [type(pair)(pair.before, (best,))])
    assert found.greedy


def test_spaces_at_the_end_belong_to_the_answer(tokenizer):
    """As tokens of words begin with their space."""
    plain, moved = encode_pair(tokenizer, "the end", " of"), encode_pair(tokenizer, "the end ", "of")
    assert plain == moved and tokenizer.decode(moved.after) == " of"
    broken = encode_pair(tokenizer, "Goal:\n", " x")
    assert tokenizer.decode(broken.before) == "Goal:" and tokenizer.decode(broken.after) == "\n x"


def test_nothing_before_it_is_the_bos(tokenizer):
    assert encode_pair(tokenizer, "", "the").before == (tokenizer.bos_id,)
    with pytest.raises(RequestError, match="6 and 0 tokens, expected some"):
        encode_pair(tokenizer, "the end", "")


def test_pairs_beyond_the_context_are_refused_not_cut(tokenizer):
    pair = encode_pair(tokenizer, "the end " * 30, "of")
    with pytest.raises(RequestError, match="the model's context has 16"):
        require_room([pair], 16)
    require_room([pair], len(pair.before) + len(pair.after) - 1)


def test_choices_plain_and_by_length(model, tokenizer):
    rows = [
        {"query": "the end of", "choices": ["on", "a long and winding thing of the sands"], "gold": 1},
        {"query": "another", "choices": ["in", "er", "the"], "gold": 0},
    ]
    result = choose(model, make_task("t", rows), tokenizer)
    right = {"choice": [], "choice_by_length": []}
    for row, item in zip(rows, result.items, strict=True):
        values = [plain_likelihood(model, *(lambda p: (p.before, p.after))(encode_pair(tokenizer, row["query"], f" {one}")))[0] for one in row["choices"]]
        assert item["likelihoods"] == pytest.approx(values, abs=1e-4)
        by_length = [value / len(one) for value, one in zip(values, row["choices"], strict=True)]
        assert item["choice"] == max(range(len(values)), key=values.__getitem__)
        assert item["choice_by_length"] == max(range(len(values)), key=by_length.__getitem__)
        for key in right:
            right[key].append(item[key] == row["gold"])
    assert result.figures["accuracy"].value == sum(right["choice"]) / 2
    assert result.figures["accuracy_by_length"].value == sum(right["choice_by_length"]) / 2
    assert result.figures["accuracy"].error is not None and result.count == 2


def test_options_share_what_follows_them(model, tokenizer):
    rows = [{"context_options": ["the end so he", "the end so she"], "continuation": "was on it", "gold": 1}]
    (item,) = choose(model, make_task("t", rows), tokenizer).items
    for value, context in zip(item["likelihoods"], rows[0]["context_options"], strict=True):
        pair = encode_pair(tokenizer, context, " was on it")
        assert value == pytest.approx(plain_likelihood(model, pair.before, pair.after)[0], abs=1e-4)


def test_last_words(model, tokenizer):
    context = "the end of"
    best = int(model(torch.tensor([tokenizer.encode(context)]))[0, -1].argmax())
    pair = encode_pair(tokenizer, context, " the")
    result = choose(model, make_task("t", [{"context": context, "continuation": "the"}]), tokenizer)
    assert result.kind == "last word"
    assert result.items[0]["right"] is (list(pair.after) == [best])
    assert result.figures["perplexity"].value == pytest.approx(2.718281828 ** -plain_likelihood(model, pair.before, pair.after)[0], rel=1e-4)


def test_written_answers_and_translations():
    rows = [
        {"context": "Paris is large.", "question": "What is large?", "answers": ["Paris"]},
        {"context": "x", "question": "y", "answers": {"text": ["a dog", "dogs"], "answer_start": [0, 1]}},
    ]
    task = make_task("t", rows)
    assert task.kind == "answer" and task.questions[0].contexts == ("Paris is large.\nQuestion: What is large?\nAnswer:",)
    result = judge_written(task, ["Paris.", "cats"], answer_metrics())
    assert result.figures["exact_match"].value == 0.5 and result.items[1]["right"] == ["a dog", "dogs"]
    trivia = make_task("t", [{"context": "Question: who?\nAnswer:", "answer": "me", "aliases": ["me", "myself"]}])
    assert trivia.questions[0].right == ("me", "myself")
    translation = make_task("t", [{"en": "dog", "de": "Hund", "id": 3}], Languages("en", "de"))
    assert translation.kind == "translation" and translation.questions[0].contexts == ("en: dog\nde:",)
    assert judge_written(translation, ["Hund"], {}).figures["chrf"].value == pytest.approx(100)


def test_examples_come_first_and_are_not_asked():
    rows = [{"query": f"q{at}", "choices": ["a", "b"], "gold": at % 2} for at in range(5)]
    task = make_task("t", rows).take(2, 2)
    assert task.shots == "q0 a\n\nq1 b\n\n" and [one.contexts for one in task.questions] == [("q2",), ("q3",)]
    written = make_task("t", [{"context": "c", "question": "q", "answers": ["x"]}] * 2).take(None, 1)
    assert written.shots == "c\nQuestion: q\nAnswer: x\n\n" and len(written.questions) == 1
    with pytest.raises(CalibrationError, match="5 items, 5 of them as examples leave none") as caught:
        make_task("t", rows).take(None, 5)
    assert caught.value.hint == "--shots 4 at most"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "`t` has no items"),
        ([{"prompt": "x", "label": 1}], "has the fields `prompt`, `label`, which make no task: known are `choices`, `gold`, `query`"),
        ([{"query": "x", "choices": ["a", "b"], "gold": 0}, {"query": "x"}], "item 2 of `t` has no field `choices`, `gold`, only `query`"),
        ([{"query": "x", "choices": ["a", "b"], "gold": 2}], "`gold` in item 1 of `t` is 2, expected the number of a choice, 0 to 1"),
        ([{"query": "x", "choices": ["a", "b"], "gold": "b"}], "`gold` in item 1 of `t` is 'b'"),
        ([{"query": "x", "choices": ["a"], "gold": 0}], "`choices` in item 1 of `t` is no list of 2 or more texts"),
        ([{"query": 3, "choices": ["a", "b"], "gold": 0}], "`query` in item 1 of `t` is a int, expected a text"),
        ([{"query": "x", "choices": ["a", " "], "gold": 0}], "`choices` in item 1 of `t` has an empty one"),
        ([{"context_options": ["x", "y"], "continuation": "", "gold": 0}], "`continuation` in item 1 of `t` is empty"),
        ([{"context": "x", "continuation": " "}], "`continuation` in item 1 of `t` is empty"),
        ([{"context": "x", "question": "y", "answers": []}], "`answers` in item 1 of `t` is no list of 1 or more texts"),
    ],
)
def test_what_is_no_task(rows, message):
    with pytest.raises(CalibrationError) as caught:
        make_task("t", rows)
    assert message in caught.value.message


def test_a_language_that_is_not_there():
    with pytest.raises(CalibrationError, match="has no field `fr`, only `en`, `de`"):
        make_task("t", [{"en": "dog", "de": "Hund"}], Languages("en", "fr"))
