"""Parts side by side are the fused linear they stand for."""

import torch

from quantkit.formats.dense import DenseTensor
from quantkit.formats.joined import JoinedTensor


def test_parts_are_one_linear() -> None:
    torch.manual_seed(0)
    q = DenseTensor(torch.randn(6, 8))
    k = DenseTensor(torch.randn(4, 8), torch.randn(4))
    joined = JoinedTensor({"q_proj": q, "k_proj": k})
    x = torch.randn(3, 8)
    assert (joined.in_features, joined.out_features) == (8, 10)
    assert torch.equal(joined.dequantize(), torch.cat([q.weight, k.weight]).T)
    assert joined.bias is not None
    assert torch.equal(joined.bias[:6], torch.zeros(6))
    assert torch.equal(joined.bias[6:], k.bias)
    assert torch.allclose(joined.matmul(x), x @ joined.dequantize() + joined.bias, atol=1e-6)
    assert list(joined.tensors()) == ["q_proj.weight", "k_proj.weight", "k_proj.bias"]
    assert joined.stored_bits == 32 * (48 + 32 + 4)


def test_parts_without_bias_have_none_together() -> None:
    part = DenseTensor(torch.ones(2, 2))
    assert JoinedTensor({"gate_proj": part, "up_proj": part}).bias is None
