"""The routes of `quantkit convert` as data: what each keeps, what it needs, where its code is. Nothing heavy."""

from dataclasses import dataclass

EXACT, EXACT_OR_REFUSED, ROUNDED, REQUANTIZED = "exact", "exact or refused", "rounded", "re-quantized"


@dataclass(frozen=True, slots=True)
class Route:
    """One way from a format to another.

    name         as on the command line
    summary      what it does, one sentence
    kept         EXACT: every dequantized weight is equal, and that is asserted; EXACT_OR_REFUSED: the same, where the
                 formats allow it; ROUNDED: each weight to the nearest that the target holds; REQUANTIZED: solved anew
    calibration  whether text is needed, in words
    options      the fields of `ConvertSettings` that it reads, besides those that every route reads
    home         `module:function` below `quantkit.commands`, of type (ConvertSettings, Progress) → report
    """

    name: str
    summary: str
    kept: str
    home: str
    options: tuple[str, ...] = ()
    calibration: str = "no"


TEXT = ("calibration", "samples", "length", "seed")

ROUTES: tuple[Route, ...] = (
    Route(
        "gptq-to-exl2",
        "Re-quantize a GPTQ model to EXL2, close to the GPTQ model or, with --original, to the unquantized one.",
        REQUANTIZED,
        "convert_to_exl2:gptq_to_exl2",
        ("bpw", "match", "head_bits", "data_free", "original", "measurement", *TEXT, "evaluate"),
        "unless --data-free",
    ),
    Route(
        "gguf-to-hf",
        "Dequantize a GGUF file into a Hugging Face folder: float16 weights, config and tokenizer.",
        ROUNDED,
        "convert_gguf_to_hf:gguf_to_hf",
    ),
)


def find(name: str) -> Route | None:
    return next((route for route in ROUTES if route.name == name), None)


def table() -> tuple[list[str], list[list[str]]]:
    """Columns and rows of `quantkit convert --list`."""
    return ["route", "weights", "calibration"], [[route.name, route.kept, route.calibration] for route in ROUTES]
