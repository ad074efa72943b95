import pytest

from quantkit.commands.quantization.job import choose_placement
from quantkit.errors import BackendError, UsageError


@pytest.mark.parametrize("device", ["x", "mps", "meta", "", "CPU"])
def test_a_device_that_there_is_not_is_refused_whatever_torch_makes_of_it(device):
    with pytest.raises(BackendError, match=f"unknown device `{device}`"):
        choose_placement(device, "auto")


def test_a_numbered_cpu_is_the_cpu():
    assert choose_placement("cpu:0", "auto").dtype == choose_placement("cpu", "auto").dtype


def test_several_devices_are_refused():
    with pytest.raises(UsageError, match="several devices"):
        choose_placement("cpu,cpu", "auto")
