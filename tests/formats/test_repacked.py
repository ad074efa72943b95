"""Where a quantized weight is: `.to` gives the weight itself only where it need not move."""

import pytest
import torch

from quantkit.formats.exl2 import Exl2Tensor
from quantkit.formats.gptq import GptqTensor
from quantkit.formats.repacked import same_device


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("cpu", "cpu", True),
        ("cpu", "cuda:0", False),
        ("cuda:0", "cuda:0", True),
        ("cuda:0", "cuda:1", False),
        ("cuda:1", "cuda", True),
        ("cuda", "cuda:1", True),
    ],
)
def test_devices_are_told_apart_by_their_index_too(one, other, same):
    assert same_device(torch.device(one), torch.device(other)) == same


@pytest.mark.parametrize("form", [GptqTensor, Exl2Tensor])
def test_a_weight_of_one_gpu_is_not_on_another(form):
    """Only its place is asked for, so that no GPU is needed."""
    weight = form.__new__(form)
    weight._place = torch.device("cuda:0")
    assert weight.to("cuda") is weight and weight.to("cuda:0") is weight
    with pytest.raises(AttributeError, match="_weight"):  # it sets out to move what it does not have here
        weight.to("cuda:1")
