"""The import of a real model: weights, logits, token ids and answers of SmolLM2-135M-Instruct, against other witnesses."""

import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import smollm2
import torch

from quantkit.commands import convert
from quantkit.progress import Silent
from quantkit.settings import ConvertSettings

pytestmark = pytest.mark.proof

CORPUS = Path(__file__).parents[2] / "calibration" / "data"
NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEADS = {"attn_q": 9, "attn_k": 3}


@pytest.fixture(scope="module")
def source() -> Path:
    return smollm2.for_test(gguf=True)


@pytest.fixture(scope="module")
def folder(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "model"
    report = convert.run(ConvertSettings("gguf-to-hf", source, out), Silent())
    assert report.types == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert report.rounding_error < 4.2e-4
    return out


def stored_weight(tensor) -> np.ndarray:
    """float32 `[out, in]` from the bytes of Q4_1 and Q8_0 blocks, without the library's code for them."""
    if tensor.tensor_type.name == "Q4_1":
        blocks = tensor.data.reshape(-1, 20)
        scale, least = (blocks[:, place : place + 2].copy().view(np.float16).astype(np.float32) for place in (0, 2))
        weight = scale * np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1) + least
    elif tensor.tensor_type.name == "Q8_0":
        blocks = tensor.data.reshape(-1, 34)
        weight = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].copy().view(np.int8)
    else:
        weight = np.array(tensor.data, np.float32)
    return weight.astype(np.float32).reshape(tensor.shape[::-1].tolist())


@pytest.fixture(scope="module")
def independent(source) -> dict[str, torch.Tensor]:
    """Every weight by its Hugging Face name, rounded to float16, read with the `gguf` library's own reader."""
    weights = {}
    for tensor in gguf.GGUFReader(source).tensors:
        parts = tensor.name.split(".")
        weight, kind = stored_weight(tensor), parts[-2]
        if kind in HEADS:
            weight = weight.reshape(HEADS[kind], 32, 2, 576).swapaxes(1, 2).reshape(weight.shape)
        block = f"layers.{parts[1]}." if parts[0] == "blk" else ""
        weights[f"model.{block}{NAMES[kind]}.weight"] = torch.from_numpy(np.ascontiguousarray(weight)).half()
    return weights


def test_transformers_computes_equal_logits_from_the_folder(folder, independent) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(loaded, transformers.LlamaForCausalLM)
    state = loaded.state_dict()
    assert set(state) == {*independent, "lm_head.weight"}
    for name, weight in independent.items():
        assert torch.equal(state[name], weight.float()), name

    # The same model from its published numbers and the independent weights.
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config).eval()
    other.load_state_dict({name: weight.float() for name, weight in independent.items()}, strict=False)
    ids = torch.randint(0, 49152, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, other(ids).logits)


class PlainBPE:
    """Byte-level BPE as it is defined: cut, then join the neighbours of lowest merge rank until none is left."""

    def __init__(self, source: Path) -> None:
        regex = pytest.importorskip("regex")
        fields = gguf.GGUFReader(source).fields
        self.ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
        self.ranks = {
            tuple(merge.split(" ")): rank for rank, merge in enumerate(fields["tokenizer.ggml.merges"].contents())
        }
        self.cuts = regex.compile(r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
        self.digits = regex.compile(r"(\p{N})")
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
        self.join = cache(self.join)

    def encode(self, text: str) -> list[int]:
        # Digits are cut off first, so that a run of spaces ends where a digit begins.
        pieces = [piece for part in self.digits.split(text) for piece in self.cuts.findall(part)]
        assert "".join(pieces) == text
        return [self.ids[token] for piece in pieces for token in self.join(piece)]

    def join(self, piece: str) -> list[str]:
        tokens = [self.letters[byte] for byte in piece.encode()]
        while len(tokens) > 1:
            best = min(pairwise(tokens), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            joined, place = [], 0
            while place < len(tokens):
                found = tuple(tokens[place : place + 2]) == best
                joined.append("".join(best) if found else tokens[place])
                place += 2 if found else 1
            tokens = joined
        return tokens


@pytest.mark.parametrize("part", sorted(path.name for path in CORPUS.glob("*.txt")))
def test_token_ids_are_those_of_plain_bpe(part, folder, source) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    text = (CORPUS / part).read_text(encoding="utf-8")[:40_000] + "  42,  7 \n   1é²½\t 3"
    ids = tokenizer(text)["input_ids"]
    assert ids == PlainBPE(source).encode(text)
    assert tokenizer.decode(ids) == text


def test_token_ids_of_wikitext2(folder) -> None:
    """The published count and start for the test split, rows joined by blank lines: 8 more without single digits."""
    rows = os.environ.get("QUANTKIT_WIKITEXT2")
    if not rows:
        pytest.skip("QUANTKIT_WIKITEXT2 does not name the parquet file of the WikiText-2 raw test split")
    parquet = pytest.importorskip("pyarrow.parquet")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    ids = tokenizer("\n\n".join(parquet.read_table(rows)["text"].to_pylist()))["input_ids"]
    assert len(ids) == 304_978
    assert ids[:8] == [1116, 446, 6356, 389, 9226, 352, 446, 38028]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("The capital of France is", " Paris.\n\nThe answer is: 2018-01-22 12:12:53.<|im_end|>"),
        (
            [{"role": "user", "content": "What is gravity? Answer in two sentences."}],
            "Gravity is a fundamental concept in physics that describes the force of gravity, which is a result of the "
            "curvature of spacetime caused by the presence of mass.<|im_end|>",
        ),
    ],
)
def test_greedy_answers_in_transformers(prompt, answer, folder) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    ids = model.generate(**inputs, max_new_tokens=80, do_sample=False)[0]
    assert tokenizer.decode(ids[inputs["input_ids"].shape[1] :]) == answer
