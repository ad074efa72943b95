"""What is quantized, what stays dense and why, in how many bits: all of it before any work."""

import pytest

from quantkit.errors import OWN_FAULT, FormatError, GateError
from quantkit.formats.gptq import GptqCodec
from quantkit.models.architecture import LinearSpec
from quantkit.plan import kind_of, uniform

BF16 = 16


def plan_of(shapes: dict[str, tuple[int, int]], group_size: int = 32, biased: tuple[str, ...] = ()):
    specs = [LinearSpec(name, rows, (columns,), (), "", name in biased) for name, (rows, columns) in shapes.items()]
    return uniform(
        specs, GptqCodec(4, group_size), {name: rows * columns * BF16 for name, (rows, columns) in shapes.items()}
    )


def test_bits_per_weight_count_everything_on_disk() -> None:
    plan = plan_of({"model.layers.0.a": (64, 96)}, biased=("model.layers.0.a",))
    codes, scales, zeros, g_idx, bias = 64 * 96 * 4, 2 * 96 * 16, 2 * 96 * 4, 64 * 32, 96 * 16
    assert plan.stored_bits == codes + scales + zeros + g_idx + bias
    assert plan.bits_per_weight == plan.stored_bits / (64 * 96)


def test_a_linear_that_the_format_cannot_hold_stays_dense_and_counts_with_its_own_bits() -> None:
    plan = plan_of({"model.layers.0.a": (64, 96), "model.layers.0.b": (64, 60), "model.layers.1.b": (64, 60)})
    assert [linear.name for linear in plan.quantized] == ["model.layers.0.a"]
    assert [linear.name for linear in plan.dense] == ["model.layers.0.b", "model.layers.1.b"]
    assert plan.stored_bits == plan.quantized[0].stored_bits + 2 * 64 * 60 * BF16
    assert plan.remarks() == [
        "`b` (2×) stays dense: 60 output features are not a multiple of 32, as GPTQ's packed words need"
    ]
    with pytest.raises(FormatError, match=r"`model.layers.0.b` cannot be quantized: 60 output features"):
        plan.require_regular()


def test_a_short_last_group_is_legal_unless_strict() -> None:
    plan = plan_of({"model.layers.0.a": (576, 64), "model.layers.0.b": (1536, 64)}, group_size=128)
    assert len(plan.quantized) == 2
    assert plan.remarks() == ["`a` (1×) the last group has 64 rows, the others 128"]
    with pytest.raises(FormatError, match=r"576 input rows, which group size 128 does not divide") as caught:
        plan.require_regular()
    assert "--group-size 64" in (caught.value.hint or "")


def test_one_group_is_never_short() -> None:
    plan = plan_of({"model.layers.0.a": (576, 64)}, group_size=-1)
    plan.require_regular()
    assert plan.remarks() == []


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (["model.layers.0.a"], "`model.layers.1.a` was planned but not quantized"),
        (
            ["model.layers.0.a", "model.layers.1.a", "model.layers.1.b"],
            "`model.layers.1.b` was quantized but not planned",
        ),
    ],
)
def test_what_was_done_must_be_what_was_planned(done: list[str], words: str) -> None:
    plan = plan_of({"model.layers.0.a": (64, 64), "model.layers.1.a": (64, 64), "model.layers.1.b": (64, 60)})
    plan.check_done(["model.layers.1.a", "model.layers.0.a"])
    with pytest.raises(GateError, match=words) as caught:
        plan.check_done(done)
    assert caught.value.hint == OWN_FAULT


def test_json_lists_what_is_not_regular() -> None:
    listed = plan_of({"model.layers.0.a": (80, 64), "model.layers.0.b": (96, 64)}, group_size=64).as_json()
    assert [entry["name"] for entry in listed["dense"]] == ["model.layers.0.a"]
    assert listed["short_groups"] == [{"name": "model.layers.0.b", "rows": 32, "group_size": 64}]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.down_proj", "mlp.down_proj"),
        ("model.layers.12.mlp.experts.7.up_proj", "mlp.experts.up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_kind_is_the_name_without_numbers(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_routers_are_not_planned() -> None:
    router = LinearSpec("model.layers.0.mlp.gate", 64, (4,), ("router",), "", quantizable=False)
    assert uniform([router], GptqCodec(4, 32), {}).linears == ()
