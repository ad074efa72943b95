import pytest
import torch

from quantkit import kernels
from quantkit.errors import BackendError, UsageError
from quantkit.runtime.placement import Placement


def test_a_cpu_computes_in_float32_unless_told_otherwise():
    assert Placement.choose("cpu").dtype == torch.float32
    assert Placement.choose("cpu:0").dtype == torch.float32
    assert Placement.choose("cpu", "bf16").dtype == torch.bfloat16
    assert [Placement.choose("cpu", name).dtype_name for name in ("fp32", "bf16", "fp16")] == ["fp32", "bf16", "fp16"]


def test_the_backend_and_its_reason_are_those_of_the_kernels():
    placement = Placement.choose("cpu")
    assert (placement.backend, placement.reason) == (kernels.backend("cpu").name, kernels.backend("cpu").reason)


def test_unknown_words_are_refused():
    with pytest.raises(UsageError, match="unknown dtype `fp8`") as caught:
        Placement.choose("cpu", "fp8")
    assert caught.value.hint == "--dtype auto, fp32, bf16, fp16"
    with pytest.raises(BackendError, match="unknown device `tpu`"):
        Placement.choose("tpu")
