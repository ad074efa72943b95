"""Decode steps by kernels against the plain forward: on the CPU executor, and with tapes in place of CUDA graphs."""

import pytest
import tiny
import tiny_exl2
import tiny_gptq
import torch
from cuda_on_cpu import compiler
from cuda_on_cpu.graphs import TapeLauncher, TapeRecorder
from twin_texts import TwinTexts

from quantkit import kernels
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.steps import PAGE
from quantkit.models.transformer import Model
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decode_path import GRAPHS, KERNELS
from quantkit.runtime.decode_step import DecodeStep
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.load import load

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler: the CUDA sources cannot be run on the CPU")
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 288}  # heads of 32
FORMATS = (None, "int8", "k8v4", "q4_0")
# Of the largest logit. Both ways round to bf16 (2^-8) between the same operations, some sums in another order; up to
# 0.009 was seen.
BOUND = dict.fromkeys(FORMATS, 0.02)
MODELS = {
    "gptq": lambda path: tiny_gptq.write_model(path, bits=4, dtype="bfloat16", **SMALL),
    "gptq 3 bits, act-order, biases": lambda path: tiny_gptq.write_model(
        path, bits=3, act_order=True, sym=False, family="Qwen2ForCausalLM", **SMALL
    ),
    "exl2": lambda path: tiny_exl2.write_model(path, head=True, **SMALL),
    "dense, head norms": lambda path: tiny.write_model(path, "Qwen3ForCausalLM", dtype="bfloat16", **SMALL),
    "dense, window": lambda path: tiny.write_model(
        path, "MistralForCausalLM", dtype="bfloat16", **{**SMALL, "sliding_window": 20}
    ),
}


@pytest.fixture(scope="module")
def launcher() -> TapeLauncher:
    return TapeLauncher()


@pytest.fixture(autouse=True)
def cuda(launcher, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "backend", lambda *_: CudaBackend(launcher))


@pytest.fixture(scope="module")
def models(launcher, tmp_path_factory):
    made: dict[str, Model] = {}

    def of(name: str) -> Model:
        if name not in made:
            made[name] = load(MODELS[name](tmp_path_factory.mktemp("model") / "m"), dtype=torch.bfloat16)
        return made[name]

    return of


class Twins(TwinTexts):
    """One pool is read by kernels. What is stored is compared too."""

    def __init__(self, model: Model, kv: str | None, lengths: list[int], recorder=None, pages: int = 6) -> None:
        super().__init__(model, lengths, kv, lambda model, pool: Decoding(model, pool, recorder), pages)

    def check(self, tokens: list[list[int]], bound: float) -> torch.Tensor:
        plain = super().check(tokens, bound)
        self._check_pages()
        return plain

    def _check_pages(self) -> None:
        """Every position of every text has the same keys and values, but for a code here and there: attention alone
        would hardly show one that is missing among hundreds."""
        for layer in range(self.model.config.num_layers):
            for pair in zip(*self.texts, strict=True):
                assert pair[0].length == pair[1].length
                rows = [
                    pool.read(layer, pool.sources(text.pages, 0, text.length), torch.float32)
                    for pool, text in zip(self.pools, pair, strict=True)
                ]
                for plain, found in zip(*rows, strict=True):
                    off = (found - plain).norm(dim=-1) / plain.norm(dim=-1)
                    assert float(off.max()) < 0.15, f"layer {layer}, position {int(off.amax(0).argmax())}"


@pytest.mark.parametrize("kv", FORMATS)
@pytest.mark.parametrize("name", ["gptq", "exl2"])
def test_one_text_across_the_end_of_a_page(models, launcher, name, kv) -> None:
    """Greedily, each token that which the plain forward likes best."""
    recorder = TapeRecorder(launcher)
    twins = Twins(models(name), kv, [PAGE - 2], recorder)
    token = 3
    for _ in range(3):
        token = int(twins.check([[token]], BOUND[kv])[0].argmax())
    assert (twins.decoding.path.reason, twins.decoding.path.name) == ("", GRAPHS)
    assert (recorder.recorded, recorder.replayed) == (2, 1), "one graph for a page, one for two"
    assert twins.texts[1][0].length == PAGE + 1


@pytest.mark.parametrize("name", MODELS)
def test_three_texts_of_other_lengths(models, launcher, name) -> None:
    twins = Twins(models(name), "int8" if name == "exl2" else None, [40, 5, PAGE - 1], TapeRecorder(launcher))
    for tokens in ([[1], [2], [3]], [[4], [5], [6]]):
        twins.check(tokens, BOUND[None])
    launched = {kernel for kernel, _ in launcher.launched}
    assert {"rms_norm", "rope_append", "attend", "silu_mul"} <= launched


@pytest.mark.parametrize("kv", FORMATS[1:])
@pytest.mark.parametrize("name", ["gptq", "exl2"])
def test_three_texts_in_every_cache(models, launcher, name, kv) -> None:
    twins = Twins(models(name), kv, [40, 5, PAGE], TapeRecorder(launcher))
    twins.check([[1], [2], [3]], BOUND[kv])
    assert "turn_heads" in {kernel for kernel, _ in launcher.launched}


def test_guesses_are_checked_and_taken_back(models, launcher) -> None:
    twins = Twins(models("gptq"), "k8v4", [PAGE - 3, 9], TapeRecorder(launcher))
    twins.check([[1, 2, 3, 4, 5], [7]], BOUND["k8v4"])
    for texts in twins.texts:
        texts[0].truncate(PAGE - 1)
    twins.check([[9], [8]], BOUND["k8v4"])
    for texts in twins.texts:
        texts[0].truncate(PAGE - 2)
    twins.check([[9, 10], [8]], BOUND["k8v4"])


def test_pages_of_a_prefix_stay_as_they_are(models, launcher) -> None:
    """A text that begins with pages of another, and goes back into them, gets pages of its own before it writes."""
    twins = Twins(models("exl2"), "int8", [PAGE + 1], TapeRecorder(launcher))
    for pool, texts in zip(twins.pools, twins.texts, strict=True):
        first = texts[0].pages[0]
        texts.append(CacheSequence(pool, shared=[first]))
        assert first.users == 2
    twins.check([[1], [2]], BOUND["int8"])
    for pool, texts in zip(twins.pools, twins.texts, strict=True):
        texts.append(CacheSequence(pool, shared=[texts[0].pages[0]]))
        texts[2].truncate(PAGE - 2)
    twins.check([[3], [4], [5]], BOUND["int8"])
    assert twins.texts[1][2].pages[0] is not twins.texts[1][0].pages[0]
    twins.check([[6], [7], [8]], BOUND["int8"])


def test_replays_read_the_buffers_alone_and_leave_logits_in_theirs(models, launcher) -> None:
    """Python does not run any more: only what lies in the buffers differs."""
    recorder = TapeRecorder(launcher)
    twins = Twins(models("gptq"), None, [5], recorder)
    logits = [twins.read([[token]])[1] for token in (1, 2, 3)]
    ((key, step),) = twins.decoding._steps.items()
    assert key == (1, 1) and (recorder.recorded, recorder.replayed) == (1, 2)
    assert torch.equal(step.logits, logits[2])
    assert not torch.equal(logits[1], logits[2]), "what was given out is not overwritten"
    before = step.logits.data_ptr()
    with torch.inference_mode():
        step.ids[0] = 77
        recorder._play(recorder.tapes[0])
    assert step.logits.data_ptr() == before and not torch.equal(step.logits, logits[2])


class Planted(DecodeStep):
    """A step with a mistake that only captured launches have."""

    def launch(self) -> None:
        super().launch()
        self.mistake()


def planted(monkeypatch, mistake) -> None:
    monkeypatch.setattr(Planted, "mistake", mistake, raising=False)
    monkeypatch.setattr("quantkit.runtime.decoding.DecodeStep", Planted)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda step: step.logits.copy_(step.logits * 1), "`aten::mul` makes memory while launches are recorded"),
        (lambda step: step.logits.mul_(float(step.logits.isfinite().all())), "makes memory"),
        (lambda step: step.logits.mul_(step.ids[0].item() * 0 + 1), "the host reads a number"),
        (
            lambda step: step._weights.workspace.empty((step.rows, 1 << 20), torch.uint8, torch.device("cpu"))
            if step._weights.workspace._sealed
            else None,
            "bytes are asked for in `ends` by launches that are being recorded",
        ),
    ],
    ids=["memory of torch", "a mask", "a number read by the host", "memory of a kernel"],
)
def test_what_cannot_be_captured_is_launched_one_by_one(models, launcher, monkeypatch, mistake, told) -> None:
    planted(monkeypatch, mistake)
    recorder = TapeRecorder(launcher)
    twins = Twins(models("gptq"), None, [5], recorder)
    for token in (1, 2):
        twins.check([[token]], BOUND[None])
    assert twins.decoding.path.name == KERNELS
    assert told in twins.decoding.path.reason
    assert recorder.replayed == 0


def test_a_buffer_that_is_not_filled_anew_is_seen(models, launcher, monkeypatch) -> None:
    """The comparison with the plain forward is what finds it: a step that reads its positions where none are put."""

    def mistake(step: Planted) -> None:
        step._positions = step._positions.clone() if step._positions.data_ptr() == step._longs[1].data_ptr() else step._positions

    monkeypatch.setattr(DecodeStep, "fill", _filling_copies(DecodeStep.fill, mistake))
    twins = Twins(models("gptq"), None, [5], TapeRecorder(launcher))
    with pytest.raises(AssertionError):
        for token in range(12):
            twins.check([[token]], BOUND[None])


def _filling_copies(fill, mistake):
    def filled(step: DecodeStep, *arguments) -> None:
        fill(step, *arguments)
        mistake(step)

    return filled


def test_the_greedy_loop_feeds_itself(models, launcher) -> None:
    twins = Twins(models("gptq"), None, [5], TapeRecorder(launcher))
    _, logits = twins.read([[1]])
    (step,) = twins.decoding._steps.values()
    with torch.inference_mode():
        step.ids[0] = 1
        step.launch_greedily()
    assert step.ids.tolist() == logits.argmax(-1).tolist()


def test_a_piece_of_a_prompt_is_none(models) -> None:
    decoding = Twins(models("gptq"), None, [5]).decoding
    assert decoding.takes([8] * 8) and decoding.takes([1] * 64)
    assert not decoding.takes([9]) and not decoding.takes([1] * 65)
