"""The plain reader of EXL2 that conversions are held to, held to files that ExLlamaV2 wrote; and the codec to both."""

import os
from pathlib import Path

import numpy as np
import plain_exl2
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors

from quantkit.formats import exl2

SMALL = sorted((Path(__file__).parents[1] / "golden" / "exl2").glob("*_k*.safetensors"))
FULL = sorted((Path(os.environ.get("QUANTKIT_GOLDEN", "none")) / "exl2").glob("*_k*.safetensors"))


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_the_codec_reads_as_the_plain_reader(path: Path) -> None:
    tensors = {name.removeprefix("layer."): tensor for name, tensor in load_file(path).items() if name.startswith("layer.")}
    ours = {name.removeprefix("layer."): tensor for name, tensor in load_tensors(path).items() if name.startswith("layer.")}
    decoded = exl2.decode("m", ours).dequantize().numpy()
    plain = plain_exl2.decode(tensors)[:, : decoded.shape[1]]
    np.testing.assert_array_equal(plain.view(np.uint16), decoded.view(np.uint16))


@pytest.mark.proof
@pytest.mark.skipif(not FULL, reason="QUANTKIT_GOLDEN does not name a folder of golden files")
def test_the_plain_reader_reads_as_exllamav2() -> None:
    for path in FULL:
        tensors = load_file(path)
        plain = plain_exl2.decode({name.removeprefix("layer."): tensors[name] for name in tensors if name.startswith("layer.")})
        np.testing.assert_array_equal(plain.view(np.uint16), tensors["ref.dequant"].view(np.uint16), err_msg=path.stem)
    assert len(FULL) == 20
