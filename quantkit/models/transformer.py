"""The transformer: embedding, blocks, head, and the Model made of them.

    embedding = load_embedding(checkpoint, config, architecture, dtype)      # streaming: one block in memory
    rotary = Rotary.at(config.ropes, positions)
    block = load_block(checkpoint, config, architecture, 0, dtype)
    hidden = block.forward(embedding(ids), rotary, observe=collect)

    model = Model.load(checkpoint, config, architecture, dtype)              # all of it
    logits = model(ids)

`dtype` is that of the multiplications. Residual stream, norms, rotation, router and logits are float32 whatever it is,
so that nothing overflows in float16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantkit.errors import RequestError
from quantkit.formats import exl2
from quantkit.formats.dense import DenseTensor
from quantkit.models.architecture import EMBEDDING, FINAL_NORM, HEAD, Architecture, LinearSpec
from quantkit.models.attention import Cache
from quantkit.models.block import Block, load_block
from quantkit.models.config import ModelConfig
from quantkit.models.linear import Linear
from quantkit.models.norm import Norm
from quantkit.models.rope import Rotary
from quantkit.models.source import Device, Source, read_linear, read_tensor
from quantkit.models.streamed import StreamedBlocks

__all__ = ["Block", "Embedding", "Head", "Model", "Rotary", "load_block", "load_embedding", "load_head"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token ids → the residual stream. `weight` is `[vocab, hidden]`; rows and scale are rounded to `dtype` first, as
    the model saw them in training."""

    weight: Tensor
    scale: float
    dtype: torch.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 `[b, s]` → float32 `[b, s, hidden]`. Raises RequestError for an id outside the vocabulary."""
        require_known(ids, self.weight.shape[0])
        rows = F.embedding(ids, self.weight).to(self.dtype).to(torch.float32)
        return rows * torch.tensor(self.scale, dtype=self.dtype).to(torch.float32)


def require_known(ids: Tensor, vocabulary: int) -> None:
    """Raises RequestError for an id outside a vocabulary of so many words."""
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    if outside.numel():
        raise RequestError(
            f"token id {int(outside[0])} is outside the model's vocabulary of {vocabulary}",
            hint="use the tokenizer of this model",
        )


@dataclass(frozen=True, slots=True)
class Head:
    """Residual stream → logits: final norm, output linear, soft cap."""

    norm: Norm
    linear: Linear
    cap: float | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[b, s, hidden]` → float32 `[b, s, vocab]`."""
        logits = self.linear(self.norm(hidden)).to(torch.float32)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model, ready to run."""

    config: ModelConfig
    architecture: Architecture
    dtype: torch.dtype
    device: torch.device
    embedding: Embedding
    blocks: Sequence[Block]
    head: Head

    @classmethod
    def load(
        cls,
        source: Source,
        config: ModelConfig,
        architecture: Architecture,
        dtype: torch.dtype,
        device: Device = "cpu",
        places: Sequence[str] = (),
    ) -> "Model":
        """Reads every tensor once and keeps each weight in one form only: quantized as stored, dense in `dtype`.

        places  the device of each layer where that is not `device`, which keeps embedding and head
        """
        embedding, head = _load_ends(source, config, architecture, dtype, device)
        blocks = []
        for index in range(config.num_layers):
            blocks.append(load_block(source, config, architecture, index, dtype, places[index] if places else device))
            for linear in blocks[-1].linears.values():
                linear.settle()
        return cls(config, architecture, dtype, torch.device(device), embedding, tuple(blocks), head)

    @classmethod
    def stream(
        cls,
        source: Source,
        config: ModelConfig,
        architecture: Architecture,
        dtype: torch.dtype,
        device: Device = "cpu",
    ) -> "Model":
        """The same model with one block in memory at a time: blocks are read anew whenever they run."""
        embedding, head = _load_ends(source, config, architecture, dtype, device)
        blocks = StreamedBlocks(source, config, architecture, dtype, device)
        return cls(config, architecture, dtype, torch.device(device), embedding, blocks, head)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        last_only: bool = False,
        length: int | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """int64 ids `[b, s]` → float32 logits `[b, s, vocab]`, or `[b, 1, vocab]` of the last position only.

        wanted  int64 [n]: the tokens of each row whose logits are asked for, `[b, n, vocab]`

        Other arguments and errors are those of `hidden`.
        """
        hidden = self.hidden(ids, positions, cache, length)
        if wanted is not None:
            hidden = hidden[:, wanted.to(hidden.device)]
        return self.head(hidden[:, -1:] if last_only else hidden)

    __call__ = forward

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cache: Cache | None = None,
        length: int | None = None,
    ) -> Tensor:
        """int64 ids `[b, s]` → the residual stream behind the last block, float32 `[b, s, hidden]`: what `head` reads.

        positions  int64 [b or 1, s]; by default those that follow the cache
        cache      keys and values of the past, to which these positions are added; a batch of several texts has their
                   tokens side by side in one row
        length     positions of the whole text where it is known to be longer than what is read so far; see `rope`

        Raises RequestError for ids of another shape or outside the vocabulary, and where the cache has no room.
        """
        if ids.dim() != 2:
            raise RequestError(f"expected token ids of shape [batch, positions], found {list(ids.shape)}")
        ids = ids.to(self.device)
        lengths: int | Tensor | None = length
        hidden = self.embedding(ids)
        if cache is not None:
            following, known = cache.begin(ids.shape[1])
            if positions is None:
                positions, lengths = following, known if length is None else length
        elif positions is None:
            positions = torch.arange(ids.shape[1])[None]
        rotary = Rotary.at(self.config.ropes, positions.to(self.device), lengths)
        for block in self.blocks:
            rotary = rotary.to(block.device)
            hidden = block.forward(hidden, rotary, cache)
        if cache is not None:
            cache.advance()
        return hidden.to(self.device)

    def must_restart(self, cached: int, length: int) -> bool:
        """Whether a cache of `cached` positions is of no use once the text has `length`: empty it and read the whole
        text again. Only Phi-3 with LongRoPE asks for it, at the one step that leaves the short factors behind."""
        return any(rope.restarts(cached, length) for rope in set(self.config.ropes))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where each layer is."""
        if isinstance(self.blocks, StreamedBlocks):
            return (self.device,) * self.config.num_layers
        return tuple(block.device for block in self.blocks)

    @property
    def linears(self) -> dict[str, Linear]:
        """The quantizable linears of all blocks by Hugging Face module name, in the order they run."""
        return {name: linear for block in self.blocks for name, linear in block.linears.items()}


def _load_ends(
    source: Source, config: ModelConfig, architecture: Architecture, dtype: torch.dtype, device: Device
) -> tuple[Embedding, Head]:
    """Embedding and head for good: in a tied model they share one weight."""
    head = load_head(source, config, architecture, dtype, device)
    head.linear.settle()
    if config.tie_embeddings and not has_head_of_its_own(source):
        return Embedding(head.linear.stored.tensors()["weight"], config.embedding_scale, dtype), head
    return load_embedding(source, config, architecture, dtype, device), head


def has_head_of_its_own(source: Source) -> bool:
    """Whether a tied model has an output linear all the same: writers of EXL2 add it and leave the config as it was."""
    return source.has(f"{HEAD}.{exl2.MARK}")


def load_embedding(
    source: Source, config: ModelConfig, architecture: Architecture, dtype: torch.dtype, device: Device = "cpu"
) -> Embedding:
    """The embedding, in its stored dtype. Raises CheckpointError for an absent or misshapen tensor."""
    weight = read_tensor(source, f"{EMBEDDING}.weight", (config.vocab_size, config.hidden_size)).to(device)
    return Embedding(weight, config.embedding_scale, dtype)


def load_head(
    source: Source, config: ModelConfig, architecture: Architecture, dtype: torch.dtype, device: Device = "cpu"
) -> Head:
    """Final norm and output linear. Tied models read the embedding for it, unless the source has it in EXL2 form."""
    norm = Norm.read(source, FINAL_NORM, config.hidden_size, architecture.norm_offset, config.norm_eps, device)
    if config.tie_embeddings and not has_head_of_its_own(source):
        weight = read_tensor(source, f"{EMBEDDING}.weight", (config.vocab_size, config.hidden_size))
        linear = Linear(HEAD, DenseTensor(weight), dtype, device)
    else:
        spec = LinearSpec(HEAD, config.hidden_size, (config.vocab_size,), ("head",), HEAD)
        linear = read_linear(source, spec, dtype, device)
    return Head(norm, linear, config.logit_cap)
