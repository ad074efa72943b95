import pytest

from quantkit.formats.patterns import compile_pattern

NAME = "model.layers.11.mlp.experts.7.down_proj"


@pytest.mark.parametrize(
    "text",
    [
        r".*\.11\..*(gate|up|down).*",
        r"model\.layers\.(?:1|2|11)\.mlp\.experts\.\d+\..*_proj",
        r"(?:model\.)?layers\.[0-9]+\..*",
        r"^(?!lm_head).*\.\d{1,3}\..*down_proj$",
        r"(model.layers.){1}11.*",
        "|".join(rf".*\.{layer}\..*" for layer in range(80)),
    ],
)
def test_patterns_of_real_files_are_taken(text: str) -> None:
    assert compile_pattern(text).pattern == text


@pytest.mark.parametrize(
    "text",
    [
        "(a*)*b",
        "(a+)+$",
        "(a|aa)+$",
        "(.*)*",
        "(?:(?:.*a){10}){10}",
        "a?" * 40 + "a" * 40,
        ".*" * 6 + "x",
        "(?=(a*)*b)",
        "(?:a{0,99}){2,99}b",
    ],
)
def test_patterns_that_may_take_forever_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="forever"):
        compile_pattern(text)


@pytest.mark.parametrize("text", ["(", "a{9999999999999999999}", "(" * 5000 + ")" * 5000, "(?P<a>x)(?P<a>y)", "[z-a]"])
def test_what_is_no_pattern_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        compile_pattern(text)
