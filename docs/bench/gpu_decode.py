"""Decode steps of a random model on a device: whether they are right, and how fast they are. `gpu.py` runs it.

The model has no files and its weights mean nothing: only shapes, formats and the way through the kernels matter.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from quantkit.formats.codec import StoredTensor
from quantkit.formats.exl2 import Exl2Tensor
from quantkit.formats.gptq import GptqTensor
from quantkit.kernels.graphs import Recorder
from quantkit.kernels.protocol import Exl2Weight, GptqWeight
from quantkit.kernels.steps import PAGE
from quantkit.models import catalog
from quantkit.models.architecture import HEAD, LinearSpec
from quantkit.models.config import ModelConfig
from quantkit.models.transformer import Model
from quantkit.runtime.cache import CacheView
from quantkit.runtime.cache_format import CacheFormat, cache_format
from quantkit.runtime.cache_sequence import CacheSequence
from quantkit.runtime.decoding import Decoding
from quantkit.runtime.page_pool import PagePool

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
SMALL = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
}
KINDS = ("EXL2 4.0", "GPTQ 4")
# Cache, texts at once, positions of each.
LOADS = ((None, 1, 1024), ("int8", 1, 1024), ("int8", 1, 7936), ("q4_0", 1, 7936), ("int8", 8, 1024))
# Of the largest logit: both ways round to halves between the same operations, and some sums are in another order. What
# is stored in 4 bits may fall on the other side of a rounding.
BOUNDS = {None: 0.02, "int8": 0.02, "k8v4": 0.03, "q4_0": 0.03}


class RandomSource:
    """A `models.source.Source` of random weights, made on the device. `size_bytes`: of all linears made so far."""

    def __init__(self, shape: Mapping[str, Any], kind: str, device: torch.device) -> None:
        self.config, self.architecture = ModelConfig.read(shape), catalog.find(shape)
        self._kind, self._device = kind, device
        config = self.config
        head = LinearSpec(HEAD, config.hidden_size, (config.vocab_size,), ("head",), HEAD)
        self._specs = {spec.name: spec for spec in (*self.architecture.linears(config), head)}
        self._shapes = self.architecture.tensors(config)
        self.size_bytes = 0

    def has(self, name: str) -> bool:
        return name in self._shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Norms of ones; the embedding drawn."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float16, device=self._device)
        return torch.randn(shape, dtype=torch.float16, device=self._device)

    def linear(self, name: str) -> StoredTensor:
        spec = self._specs[name]
        make = self._exl2 if self._kind == KINDS[0] else self._gptq
        stored, parts = make(spec.in_features, spec.out_features)
        self.size_bytes += sum(part.nbytes for part in parts)
        return stored

    def _gptq(self, rows: int, out: int) -> tuple[StoredTensor, tuple[torch.Tensor, ...]]:
        """4 bits in groups of 128."""
        device, groups = self._device, rows // 128
        words = self._words(rows // 8, out)
        scales = (torch.rand(groups, out, device=device) * 2e-3 + 1e-3).to(torch.float16)
        zeros = torch.full((groups, out), 8, dtype=torch.uint8, device=device)
        group = torch.arange(rows, device=device) // 128
        return GptqTensor(GptqWeight(words, scales, zeros, group, 4), {}), (words, scales, zeros)

    def _exl2(self, rows: int, out: int) -> tuple[StoredTensor, tuple[torch.Tensor, ...]]:
        """A quarter of the rows in 5 bits, half in 4, a quarter in 3, in a random order."""
        device, size = self._device, 128 if rows >= 1024 else 32
        widths = ((5, rows // 4), (4, rows // 2), (3, rows // 4))
        groups = tuple((bits, size) for bits, count in widths for _ in range(count // size))
        words = self._words(sum(bits * count // 32 for bits, count in groups), out)
        scale_codes = self._words(len(groups), out // 8)
        scale_max = torch.full((len(groups),), 0.01, dtype=torch.float16, device=device)
        weight = Exl2Weight(words, scale_codes, scale_max, groups, torch.randperm(rows, device=device))
        return Exl2Tensor(weight, {}, out), (words, scale_codes, scale_max)

    def _words(self, rows: int, out: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (rows, out), device=self._device).to(torch.int32)


def random_model(shape: Mapping[str, Any], kind: str, device: torch.device) -> tuple[Model, int]:
    """In float16, and the bytes of its linears, as they are on disk: what one token must read."""
    torch.manual_seed(0)
    source = RandomSource(shape, kind, device)
    return Model.load(source, source.config, source.architecture, torch.float16, device), source.size_bytes


class Twins:
    """Texts of some lengths in two pools, read plainly: the next tokens are then read plainly in one of them, and by
    decode steps in the other."""

    def __init__(self, model: Model, kv: str | None, lengths: tuple[int, ...], recorder: Recorder) -> None:
        form = cache_format(kv, model.config.head_dim, model.dtype)
        self._model = model
        self._pools = [PagePool(model.config, 2 * len(lengths), form, model.device) for _ in range(2)]
        self._texts = [[CacheSequence(pool) for _ in lengths] for pool in self._pools]
        self.decoding = Decoding(model, self._pools[1], recorder)
        for length, *pair in zip(lengths, *self._texts, strict=True):
            ids = torch.randint(0, model.config.vocab_size, (1, length))
            for pool, text in zip(self._pools, pair, strict=True):
                model.hidden(ids, cache=CacheView(pool, [text], [length]))

    def difference(self, tokens: list[list[int]]) -> float:
        """Of the logits, by the largest of them."""
        counts = [len(some) for some in tokens]
        assert self.decoding.takes(counts), self.decoding.path.reason
        ids = torch.tensor([[token for some in tokens for token in some]])
        plain = self._model(ids, cache=CacheView(self._pools[0], self._texts[0], counts))[0]
        found = self.decoding.logits(self._texts[1], tokens)
        error = float((found - plain).abs().max() / plain.abs().max())
        return error if error == error else float("inf")


@torch.inference_mode()
def check_rows(
    recorder: Recorder,
    device: torch.device,
    steps: int = 3,
    kinds: tuple[str, ...] = KINDS,
    caches: tuple[str | None, ...] = tuple(BOUNDS),
) -> Iterator[tuple[list[str], bool]]:
    """Each kind of weight and cache, one text and three, across the end of a page, with guesses: a line, and whether it
    is right."""
    for kind in kinds:
        model, _ = random_model(SMALL, kind, device)
        for kv in caches:
            for lengths in ((PAGE - 2,), (PAGE - 1, 9, 40)):
                twins = Twins(model, kv, lengths, recorder)
                tokens = [[7 + text] for text in range(len(lengths))]
                errors = [twins.difference(tokens) for _ in range(steps)]
                errors.append(twins.difference([[1, 2, 3], *tokens[1:]]))
                right, path = max(errors) <= BOUNDS[kv], twins.decoding.path
                told = f"{path.name} {path.reason}".strip()
                result = [told, f"{max(errors):.1e}", "right" if right else "wrong"]
                yield [kind, kv or "fp16", str(len(lengths)), *result], right


def held_bytes(model: Model, form: CacheFormat, positions: int) -> int:
    """Keys and values of so many positions."""
    return positions * model.config.num_layers * model.config.num_kv_heads * form.row_bytes


@torch.inference_mode()
def decode_rows(
    seconds: Callable[[Callable[[], None]], float],
    bytes_per_second: float,
    device: torch.device,
    shape: Mapping[str, Any] = LLAMA_8B,
    loads: tuple[tuple[str | None, int, int], ...] = LOADS,
) -> Iterator[list[str]]:
    """Tokens of all texts together in a second, the limit that the bytes of weights and cache set at the rate of the
    copy, and the one as a share of the other."""
    for kind in KINDS:
        model, weight_bytes = random_model(shape, kind, device)
        for kv, texts, positions in loads:
            form = cache_format(kv, model.config.head_dim, model.dtype)
            pages = positions // PAGE + 1
            pool = PagePool(model.config, texts * pages, form, device)
            sequences = [CacheSequence(pool, positions + 1) for _ in range(texts)]
            for sequence in sequences:
                sequence.length = positions  # of zeros, as the pool has them
            decoding = Decoding(model, pool, None)
            step = decoding.ready(sequences, [[1]] * texts)
            each = seconds(step.launch_greedily)
            limit = (weight_bytes + held_bytes(model, form, texts * positions)) / bytes_per_second
            told = [f"{texts / each:.1f}", f"{texts / limit:.1f}", f"{limit / each:.0%}"]
            yield [kind, form.name, str(texts), str(positions), *told]
        del model
