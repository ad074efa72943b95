"""The `quantization_config` of EXL2 checkpoints, as ExLlamaV2 writes it and TabbyAPI looks for it.

Readers need none of it but `quant_method`: every tensor says by itself how it is stored.
"""

from typing import Any

from quantkit.version import VERSION

DENSE_HEAD_BITS = 16


def write(
    *,
    bits: float,
    bits_per_weight: float,
    head_bits: int,
    rows: int,
    length: int,
    dataset: str,
    head_bits_per_weight: float | None = None,
) -> dict[str, Any]:
    """The object that stands in config.json under `quantization_config`.

    bits             what was asked for, on the average of the decoder's linears
    bits_per_weight  what was reached, all side data included
    head_bits        the width asked for the head; DENSE_HEAD_BITS where it is not quantized
    rows, length     calibration: rows of so many tokens
    dataset          its name, without a folder
    """
    config: dict[str, Any] = {
        "quant_method": "exl2",
        "version": VERSION,
        "bits": bits,
        "head_bits": head_bits,
        "calibration": {"rows": rows, "length": length, "dataset": dataset},
        "bits_per_weight": round(bits_per_weight, 6),
        "meta": {"quantizer": [f"quantkit:{VERSION}"]},
    }
    if head_bits_per_weight is not None:
        config["head_bits_per_weight"] = round(head_bits_per_weight, 6)
    return config
