"""Which way decode steps take: over the pages of the pool by kernels or in one call, or the model's plain forward.

    path = decode_path(model, pool)
    path.name, path.reason          # `plain`, "the model has a mixture of experts"

This is the one place that decides; `decode_step` has what the kernels cover, `native_step` what the CPU does.
"""

from dataclasses import dataclass

import torch

from quantkit import kernels
from quantkit.formats.codec import StoredTensor
from quantkit.formats.dense import DenseTensor
from quantkit.formats.exl2 import Exl2Tensor
from quantkit.formats.gptq import GptqTensor
from quantkit.formats.repacked import RepackedTensor, same_device
from quantkit.kernels.cuda import CudaBackend
from quantkit.kernels.cuda_steps import FORMAT_NAMES, HALF_NAMES, WIDEST_HEAD
from quantkit.kernels.planes import Planes
from quantkit.kernels.protocol import Backend
from quantkit.kernels.steps import GROUP
from quantkit.models.block import Block
from quantkit.models.feedforward import ACTIVATIONS, Mixture
from quantkit.models.linear import Linear
from quantkit.models.streamed import StreamedBlocks
from quantkit.models.transformer import Embedding, Model
from quantkit.runtime.page_pool import PagePool

PLAIN, KERNELS, GRAPHS, NATIVE = "plain", "kernels", "graphs", "native"


@dataclass(frozen=True, slots=True)
class DecodePath:
    """`plain`: the model's forward, an operation at a time. On a GPU, `kernels`: a few launches for each layer, and
    `graphs`: the same launches, captured and replayed. On the CPU, `native`: one call for all layers. `reason` says in
    words why it is not the next better one; "" for `graphs` and `native`."""

    name: str
    reason: str


def decode_path(model: Model, pool: PagePool) -> DecodePath:
    """`plain`, `native` or `kernels`; whether launches can be captured shows when it is tried."""
    backend = kernels.backend(model.device.type)
    if isinstance(backend, CudaBackend):
        reason = _whole(model) or _card(model, backend) or _cache(model, pool) or _pages(model, pool) or _model(model)
        return DecodePath(PLAIN, reason) if reason else DecodePath(KERNELS, "nothing was captured yet")
    reason = _whole(model) or _processor(model, backend) or _cache(model, pool) or _model(model) or _native(model, pool)
    return DecodePath(PLAIN if reason else NATIVE, reason)


def _whole(model: Model) -> str:
    if isinstance(model.blocks, StreamedBlocks):
        return "the blocks of the model are read anew whenever they run"
    if type(model.embedding) is not Embedding:
        return "several processes share the model"
    if any(device != model.embedding.weight.device for device in model.devices):
        return "the layers of the model are on several devices"
    return ""


def _card(model: Model, backend: CudaBackend) -> str:
    if not backend.reaches(model.embedding.weight):
        return f"the kernels do not reach tensors on `{model.device}`"
    if model.dtype not in HALF_NAMES:
        return "the kernels compute in fp16 and bf16, the model in fp32"
    if not backend.multiplies(model.dtype, model.device):
        return "this card is too old for products in bf16, fp16 is faster there"
    return ""


def _processor(model: Model, backend: Backend) -> str:
    if backend.name != "cpu":
        return f"the backend `{backend.name}` has no kernels for decode steps"
    from quantkit.kernels import multiply  # Numba need not be there for a GPU

    if not multiply.HAS_BYTE_PRODUCTS:
        return "this processor has no instruction for products of bytes (AVX-512 VNNI)"
    if model.dtype != torch.bfloat16:
        return "one call for all layers is made for bf16, the model computes in another dtype"
    return ""


def _cache(model: Model, pool: PagePool) -> str:
    if pool.resident:
        return "a part of the cache is in host memory"
    if pool.window is not None:
        return "the cache has a window of its own"
    if not all(same_device(device, model.embedding.weight.device) for device in pool.devices):
        return "the cache is on another device than the model"
    return ""


def _pages(model: Model, pool: PagePool) -> str:
    form, head_dim = pool.form, model.config.head_dim
    if head_dim > WIDEST_HEAD or head_dim % GROUP:
        return f"heads have {head_dim} elements, the kernels take multiples of {GROUP} up to {WIDEST_HEAD}"
    if (form.keys.bits, form.values.bits) not in FORMAT_NAMES:
        return f"no kernel reads a cache in {form.name}"
    if any(side.bits == 16 and side.dtype != model.dtype for side in (form.keys, form.values)):
        return f"the cache is in {form.name}, which is not what the model computes in"
    return ""


def _model(model: Model) -> str:
    if any(rope.depends_on_length for rope in model.config.ropes):
        return "the rotation depends on the length of the text"
    reasons = (_block(block, model.dtype) for block in model.blocks)
    return next(filter(None, reasons), "") or _linear(model.head.linear, model.dtype)


def _block(block: Block, dtype: torch.dtype) -> str:
    if isinstance(block.mlp, Mixture):
        return "the model has a mixture of experts"
    if block.mlp.activation is not ACTIVATIONS["silu"]:
        return "the activation is not silu"
    if block.after_attention or block.after_mlp:
        return "the model normalises what joins the residual stream"
    if any(len(fan.linears) != len(fan.widths) for fan in block.fans):
        return "several linears of the model are stored as one"
    return next(filter(None, (_linear(linear, dtype) for linear in block.linears.values())), "")


def _linear(linear: Linear, dtype: torch.dtype) -> str:
    stored: StoredTensor = linear.stored
    if linear.is_adapted:
        return "adapters are applied while the model runs"
    if not isinstance(stored, DenseTensor | GptqTensor | Exl2Tensor):
        return f"`{linear.name}` is stored in parts"
    if isinstance(stored, DenseTensor) and stored.weight.dtype != dtype:
        return f"`{linear.name}` is not held in the dtype of the multiplications"
    return ""


def _native(model: Model, pool: PagePool) -> str:
    """What one call on the CPU does not cover beside that."""
    head_dim, sides = model.config.head_dim, (pool.form.keys, pool.form.values)
    if any(side.bits >= 16 and side.dtype != model.dtype for side in sides):
        return f"the cache is in {pool.form.name}, which is not what the model computes in"
    if head_dim % GROUP and any(side.bits < 16 for side in sides):
        return f"heads have {head_dim} elements, a cache in {pool.form.name} is read in groups of {GROUP}"
    if any(block.attention.cap is not None for block in model.blocks):
        return "the scores of attention are capped"
    for linear in (*model.linears.values(), model.head.linear):
        if isinstance(linear.stored, RepackedTensor) and not isinstance(linear.stored.repacked, Planes):
            return f"the groups of `{linear.name}` do not fit the layout that the processor reads"
    return ""
