"""The memory that a model takes, from its architecture alone: weights at any rate, KV cache in any format, the rest.

    weights = weights_at(Rate("exl2", 4.0, head_bits=6), config, architecture)
    total = need(config, weights, KV_FORMATS["int8"], context=32768).total

All sizes are bytes. What is assumed of a cache stands in `KvFormat` alone, so that a cache can be held against it.
"""

from dataclasses import dataclass
from math import prod

from quantkit.formats import exl2_layout, exl2_mix
from quantkit.formats.exl2_config import DENSE_HEAD_BITS
from quantkit.formats.gptq import GptqCodec
from quantkit.models.architecture import Architecture
from quantkit.models.attention import PIECE
from quantkit.models.config import ModelConfig

PAGE_TOKENS = 256
"""A cache consists of whole pages of so many positions."""
SCALE_ROWS, SCALE_BYTES = 32, 2
"""A quantized key or value has a float16 scale for each so many of its numbers."""
HALF = 2
PREFILL_TOKENS = 2048
"""A prompt is read in pieces of at most so many tokens."""
DEVICE_OVERHEAD = 768 << 20
"""Taken before the first weight: the CUDA context, its libraries and their workspace. An assumption."""
HOST_OVERHEAD = 384 << 20
"""A process that has imported torch."""


@dataclass(frozen=True, slots=True)
class KvFormat:
    """One format of the cache: bits of a number in keys and in values; 16 is float16, without scales.

    Keys and values of a position are rows of `head_dim` numbers for each key/value head and layer: codes, `bits` each,
    and beside them a scale for each 32 of them, begun anew with every row. Keys of `int8` have a ninth bit.
    """

    name: str
    key_bits: int
    value_bits: int

    def bytes_per_token(self, config: ModelConfig) -> int:
        """Of one position in all layers. Layers with a window keep all positions too."""
        row = _row_bytes(config.head_dim, self.key_bits) + _row_bytes(config.head_dim, self.value_bits)
        return config.num_layers * config.num_kv_heads * row

    def cache_bytes(self, config: ModelConfig, tokens: int, batch: int = 1) -> int:
        """Of `batch` sequences of `tokens` positions, each in whole pages."""
        return batch * -(-tokens // PAGE_TOKENS) * PAGE_TOKENS * self.bytes_per_token(config)


KV_FORMATS = {
    kv.name: kv
    for kv in (KvFormat("fp16", 16, 16), KvFormat("int8", 9, 8), KvFormat("k8v4", 8, 4), KvFormat("q4_0", 4, 4))
}
"""From the most faithful to the smallest."""


def _row_bytes(width: int, bits: int) -> int:
    if bits == 16:
        return HALF * width
    return -(-width * bits // 8) + SCALE_BYTES * -(-width // SCALE_ROWS)


@dataclass(frozen=True, slots=True)
class Rate:
    """How the weights are stored: `gptq` with `bits` and `group_size`, `exl2` at `bits` on average, or `dense`.

    head_bits  of a quantized head, EXL2 only; 16 leaves it as it is
    """

    format: str
    bits: float
    group_size: int = 128
    head_bits: int = DENSE_HEAD_BITS

    @property
    def name(self) -> str:
        if self.format == "gptq":
            return f"gptq {self.bits:g}/{self.group_size}"
        return "unquantized" if self.format == "dense" else f"exl2 {self.bits:g}"


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the tensors, side data included: what the files of this rate hold, without their headers.

    linear_weights  numbers in the linears of the blocks; `rest` are norms, routers and biases of dense linears
    """

    embedding: int
    linears: int
    head: int
    rest: int
    linear_weights: int

    @property
    def total(self) -> int:
        return self.embedding + self.linears + self.head + self.rest

    @property
    def bits_per_weight(self) -> float:
        """Of the linears of the blocks."""
        return 8 * self.linears / self.linear_weights


def weights_at(rate: Rate, config: ModelConfig, architecture: Architecture, dense_bytes: int = HALF) -> Weights:
    """The weights at a rate. `dense_bytes`: of a number that is not quantized.

    EXL2 fills its budget to within half a percent, of which the whole is counted; GPTQ is exact. A head that is tied to
    the embedding takes nothing, but where EXL2 quantizes it, it stands beside it.
    """
    specs = [spec for spec in architecture.linears(config) if spec.quantizable]
    count = sum(spec.in_features * spec.out_features for spec in specs)
    biases = sum(spec.out_features for spec in specs if spec.bias)
    if rate.format == "gptq":
        codec = GptqCodec(int(rate.bits), rate.group_size)
        bits = 0
        for spec in specs:
            rows, columns = spec.in_features, spec.out_features
            dense = 8 * dense_bytes * (rows * columns + columns * spec.bias)
            held = codec.refusal(rows, columns) is None
            bits += codec.stored_bits(rows, columns, spec.bias) if held else dense
        linears = -(-bits // 8)
    elif rate.format == "exl2":
        linears = int(rate.bits * count / 8)
    else:
        linears = dense_bytes * (count + biases)
    names = {f"{spec.name}.{suffix}" for spec in specs for suffix in ("weight", "bias")}
    shapes = architecture.tensors(config)
    table = config.vocab_size * config.hidden_size
    rest = sum(prod(shape) for name, shape in shapes.items() if name not in names and not _is_end(name))
    return Weights(dense_bytes * table, linears, _head(rate, config, dense_bytes), dense_bytes * rest, count)


def _is_end(name: str) -> bool:
    return name in ("model.embed_tokens.weight", "lm_head.weight")


def _head(rate: Rate, config: ModelConfig, dense_bytes: int) -> int:
    quantized = rate.head_bits != DENSE_HEAD_BITS
    layout = exl2_mix.head_layout(rate.head_bits, config.hidden_size) if quantized else None
    if layout is None:
        return 0 if config.tie_embeddings else dense_bytes * config.vocab_size * config.hidden_size
    return exl2_layout.stored_bits(layout, config.vocab_size, bias=False) // 8


@dataclass(frozen=True, slots=True)
class Need:
    """What is in memory at the worst moment; `overhead` is what the process takes without a model."""

    weights: int
    cache: int
    activations: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.activations + self.overhead


def need(
    config: ModelConfig,
    weights: Weights,
    kv: KvFormat,
    context: int,
    batch: int = 1,
    *,
    compute_bytes: int = HALF,
    overhead: int = DEVICE_OVERHEAD,
    prefill: int = PREFILL_TOKENS,
) -> Need:
    """Of `batch` sequences of `context` positions. `compute_bytes`: of a number in the multiplications."""
    activations = activation_bytes(config, min(prefill, context), context, batch, compute_bytes)
    return Need(weights.total, kv.cache_bytes(config, context, batch), activations, overhead)


def activation_bytes(config: ModelConfig, tokens: int, context: int, batch: int, compute_bytes: int = HALF) -> int:
    """The most that lives at once while `tokens` of one sequence are read and all of the batch are answered.

    The residual stream, its sum and its norm are float32. The widest moment of a block is one of two: in the MLP gate,
    up and their product, in a mixture for the tokens of the expert that all of them chose; or in attention q, k and v
    with the rotated ones in float32. A soft cap writes scores out, float32 and three times, for a piece of the queries.
    """
    width = config.hidden_size
    stream = tokens * width * (3 * 4 + compute_bytes)
    widest = max(config.intermediate_size, 0 if config.experts is None else _expert_width(config))
    mlp = 4 * tokens * widest * compute_bytes
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = tokens * ((2 * queries + 2 * keys) * compute_bytes + (queries + keys) * 4)
    if config.attention_cap is not None:
        attention += config.num_heads * min(tokens, PIECE) * context * (3 * 4 + compute_bytes)
    logits = batch * config.vocab_size * (4 + compute_bytes)
    return stream + max(mlp, attention) + logits


def _expert_width(config: ModelConfig) -> int:
    assert config.experts is not None
    return max(config.experts.width, config.experts.shared_width)
