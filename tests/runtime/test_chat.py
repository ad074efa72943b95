import json

import pytest

from quantkit.errors import CheckpointError, RequestError
from quantkit.runtime import chat
from quantkit.runtime.chat import ChatTemplate, find_template

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me <b>more</b>"}]


def render(source, tmp_path, messages=TURNS, **options):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, tmp_path / "chat_template.jinja", tokens).render(messages, **options)


def test_messages_special_tokens_and_the_answer_prompt_are_seen(tmp_path):
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source, tmp_path) == "<s>[system]Be brief.</s>[user]Tell me <b>more</b></s>[assistant]"
    assert render(source, tmp_path, answer=False).endswith("</s>")


def test_block_lines_leave_no_blank_space(tmp_path):
    source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nuser\n    {% endif %}\n{% endfor %}\n"
    assert render(source, tmp_path) == "user\n"


def test_dialect_of_published_templates(tmp_path):
    """tojson without HTML escapes, loop controls, namespaces, the `generation` tag, dates, string methods."""
    assert render("{{ messages[1] | tojson }}", tmp_path) == json.dumps(TURNS[1])
    assert render("{{ {'a': 1} | tojson(indent=2) }}", tmp_path) == '{\n  "a": 1\n}'
    assert (
        render(
            "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", tmp_path
        )
        == "system"
    )
    assert (
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            tmp_path,
        )
        == "2"
    )
    assert render("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", tmp_path) == "absystemc"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", tmp_path)) == 10
    assert render("{{ messages[0].content.split(' ')[0].upper() }}{{ 2 * 3 }}{{ '-' * 4 }}", tmp_path) == "BE6----"


def test_refusal_of_the_template_is_passed_on(tmp_path):
    with pytest.raises(RequestError, match="refuses these messages: system role not supported") as caught:
        render(
            "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}",
            tmp_path,
        )
    assert "--prompt" in caught.value.hint


def test_template_that_does_not_compile_names_file_and_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja` does not compile: line 2: "):
        render("fine\n{% if %}", tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].role.missing.deeper }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_that_fails_names_the_file(source, tmp_path):
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja` fails: "):
        render(source, tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ 'x' * 99999999999 }}",
        "{{ [0] * 99999999999 }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 400 + "{% endfor %}",
        "{{ 'a' | center(2000000000) }}",
        "{{ '%2000000000d' % 1 }}",
        "{{ '{:{w}d}'.format(1, w=2000000000) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ (1).to_bytes(2000000000, 'big') }}",
        "{% set ns = namespace(a='aaaaaaaaaaaaaaaa') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[messages]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
        "{% set ns = namespace(a=7) %}{% for i in range(40) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set s = 'ab' * 400000 %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
        "{% set s = 'a' * 8000000 %}{% for i in range(99999) %}{% if s == s %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 8000000 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
        "{{ range(999999999) | list | length }}",
        "{{ ','.join(['a' * 10000] * 100000) }}",
        "{{ ('a' * 100000).translate({97: 'b' * 100000}) | length }}",
        "{{ ('€' * 10000000) | urlencode | length }}",
        "{{ ['\"' * 8000000] | map('escape') | first | length }}",
    ],
)
def test_hostile_templates_are_stopped(source, tmp_path):
    with pytest.raises(CheckpointError, match="fails"):
        render(source, tmp_path)


NESTED = (
    "{% set ns = namespace(a=[1], b=[1], t=(1,), u=(1,)) %}{% for i in range(LEVELS) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% set ns.u = (ns.u, ns.u) %}{% endfor %}"
)
LOOKS = [
    "{{ ns.a == ns.b }}",
    "{{ ns.a in [ns.b] }}",
    "{{ ns.a in ([ns.b] | select) }}",
    "{{ ns.a is eq(ns.b) }}",
    "{{ ns.a is in([ns.b]) }}",
    "{{ {ns.t: 1} | length }}",
    "{{ dict([(ns.t, 1)]) | length }}",
    "{{ ns.t in {} }}",
    "{{ {}[ns.t] }}",
    "{{ {}.get(ns.t) }}",
    "{{ [ns.a].count(ns.b) }}",
    "{{ {1: ns.a}.values() == 1 or ns.b in {1: ns.a}.values() }}",
    "{{ [ns.t, ns.u] | unique | list | length }}",
    "{{ [ns.a, ns.b] | sort | length }}",
    "{{ [ns.a, ns.b] | select | min | length }}",
    "{{ [ns.a, ns.b] | max | length }}",
    "{{ [{'k': ns.a}, {'k': ns.b}] | groupby('k') | length }}",
    "{% for i in [1, 2] %}{{ loop.changed(ns.a if i == 1 else ns.b) }}{% endfor %}",
    "{{ {1: ns.a}.values() }}",
    "{{ 'x' | replace('x', ns.a) }}",
    "{{ ns }}",
]


@pytest.mark.parametrize("look", LOOKS)
def test_nested_values_cost_what_is_reached_in_them(look, tmp_path):
    """21 levels, that a missing price shows as a rendering that succeeds rather than one that never ends."""
    render(NESTED.replace("LEVELS", "3") + look, tmp_path)
    with pytest.raises(CheckpointError, match="fails: it takes more than"):
        render(NESTED.replace("LEVELS", "21") + look, tmp_path)


@pytest.mark.parametrize("again", ["loop(l)", "loop(iterable=l)"])
def test_recursive_loops_pay_for_their_items(again, tmp_path):
    source = (
        "{% set l = [0] * 200000 %}{% for x in [1] recursive %}{% if x %}" + "{{ AGAIN }}" * 2 + "{% endif %}{% endfor %}"
    ).replace("AGAIN", again)
    assert render(source, tmp_path) == ""
    with pytest.raises(CheckpointError, match="fails: it takes more than"):
        render(source * 11, tmp_path)
    tree = [{"role": "a", "content": [{"role": "b", "content": []}]}]
    walk = "{% for m in messages recursive %}{{ m.role }}({{ loop(m.content) }}){% endfor %}"
    assert render(walk, tmp_path, tree) == "a(b())"


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(100000) %}{% for i in range(30) %}{% if 0.5 is in(r) %}{% endif %}{% endfor %}",
        "{% set l = [0] * 400000 %}{% for i in range(200) %}{{ l.count(1) }}{% endfor %}",
        "{% set l = [0] * 400000 %}{% for i in range(200) %}{% set m = l.copy() %}{% endfor %}",
        "{% set l = [''] * 6000 %}{% set l = [l] * 6000 %}{{ l }}",
        "{% set l = ['a' * 100000] * 100 %}{% for i in range(9) %}{% set m = l | select | join %}{% endfor %}",
    ],
)
def test_values_read_at_length_are_paid_for(source, tmp_path):
    with pytest.raises(CheckpointError, match="fails: it takes more than"):
        render(source, tmp_path)


def test_looking_at_types_and_keys_costs_little_however_long_the_values(tmp_path):
    turns = [{"role": "user", "content": "word " * 400}] * 1500
    source = (
        "{% for m in messages %}{% if 'tools' in m or m.content is not string or m['content'] is none %}{% endif %}"
        "{% if messages | length == loop.index %}{{ m.get('role') }}{% endif %}{% endfor %}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    )
    assert render(source, tmp_path, turns) == "user1500"


def test_templates_that_nest_without_end_do_not_compile(tmp_path):
    for source in ("{% if a %}" * 500 + "{% endif %}" * 500, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"):
        with pytest.raises(CheckpointError, match="does not compile"):
            render(source, tmp_path)


def test_long_conversations_are_within_the_budget(tmp_path):
    turns = [{"role": "user", "content": "word " * 400}] * 1500
    source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + eos_token }}{% endfor %}"
    assert len(render(source, tmp_path, turns)) > 2_900_000


def test_overlong_template_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="characters, more than the"):
        render("x" * (chat.MAX_SOURCE_CHARS + 1), tmp_path)


def test_loop_budget_is_per_rendering(tmp_path):
    template = ChatTemplate("{% for i in range(600000) %}{% endfor %}", tmp_path / "f", {})
    assert template.render(TURNS) == template.render(TURNS) == ""


def test_files_are_searched_newest_spelling_first(tmp_path):
    config = {"chat_template": "from config"}
    assert find_template(tmp_path, {}) is None
    assert find_template(tmp_path, config) == ("from config", tmp_path / "tokenizer_config.json")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert find_template(tmp_path, config) == ("from json", tmp_path / "chat_template.json")
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert find_template(tmp_path, config) == ("from jinja", tmp_path / "chat_template.jinja")


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
    assert find_template(tmp_path, {"chat_template": named})[0] == "D"
    assert find_template(tmp_path, {"chat_template": named}, "rag")[0] == "R"
    assert find_template(tmp_path, {"chat_template": named[1:]})[0] == "R"
    with pytest.raises(CheckpointError, match="no template `tools`, only 'default', 'rag'"):
        find_template(tmp_path, {"chat_template": named}, "tools")
    with pytest.raises(CheckpointError, match="neither a text nor a list"):
        find_template(tmp_path, {"chat_template": 7})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("T")
    assert find_template(tmp_path, {"chat_template": named}, "tools")[0] == "T"


def test_damaged_side_file_is_named(tmp_path):
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"chat_template\.json` cannot be read as JSON"):
        find_template(tmp_path, {})
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a JSON list, not an object"):
        find_template(tmp_path, {})
    (tmp_path / "chat_template.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        find_template(tmp_path, {})
    (tmp_path / "chat_template.json").write_text(LFS_POINTER)
    with pytest.raises(CheckpointError, match="is a git-LFS pointer") as caught:
        find_template(tmp_path, {})
    assert "git lfs pull" in caught.value.hint
    for said in (1, [{"name": "default"}], {"name": 1}):
        with pytest.raises(CheckpointError, match="neither a text nor a list") as caught:
            find_template(tmp_path / "other", {"chat_template": said})
        assert caught.value.hint
