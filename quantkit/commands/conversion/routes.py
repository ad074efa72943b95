"""The routes of `quantkit convert` as data: what each keeps, what it needs, where its code is. Nothing heavy."""

from dataclasses import dataclass

EXACT, EXACT_OR_REFUSED, ROUNDED, REQUANTIZED = "exact", "exact or refused", "rounded", "re-quantized"
UNLESS_BF16, UNLESS_TYPE = "exact, unless bf16", "exact, unless --type"


@dataclass(frozen=True, slots=True)
class Route:
    """One way from a format to another.

    name         as on the command line
    summary      what it does, one sentence
    kept         EXACT: every dequantized weight is equal, and that is asserted; EXACT_OR_REFUSED: the same, where the
                 formats allow it; UNLESS_BF16 and UNLESS_TYPE: the same, unless another dtype or type is
                 asked for; ROUNDED: each weight to the nearest that the target holds; REQUANTIZED: solved anew
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

    def as_json(self) -> dict[str, str | list[str]]:
        return {
            "route": self.name,
            "summary": self.summary,
            "weights": self.kept,
            "calibration": self.calibration,
            "settings": list(self.options),
        }


TEXT = ("calibration", "samples", "length", "seed")
JOB = ("job", "restart")

ROUTES: tuple[Route, ...] = (
    Route(
        "gptq-to-exl2",
        "Re-quantize a GPTQ model to EXL2, close to the GPTQ model or, with --original, to the unquantized one.",
        REQUANTIZED,
        "conversion.to_exl2:gptq_to_exl2",
        ("bpw", "match", "head_bits", "data_free", "original", "measurement", *TEXT, "evaluate", *JOB),
        "unless --data-free",
    ),
    Route(
        "exl2-to-gptq",
        "Re-quantize an EXL2 model to GPTQ.",
        REQUANTIZED,
        "conversion.to_gptq:exl2_to_gptq",
        ("bits", "group_size", "sym", "act_order", "data_free", *TEXT, "evaluate", *JOB),
        "unless --data-free",
    ),
    Route(
        "gptq-to-hf",
        "Dequantize a GPTQ model into a dense one.",
        UNLESS_BF16,
        "conversion.to_hf:gptq_to_hf",
        ("dtype",),
    ),
    Route(
        "exl2-to-hf",
        "Dequantize an EXL2 model into a dense one.",
        UNLESS_BF16,
        "conversion.to_hf:exl2_to_hf",
        ("dtype",),
    ),
    Route(
        "gptq-to-gptq-v2",
        "Store the zero points of a GPTQ model as they are, as format gptq_v2 has them.",
        EXACT,
        "conversion.gptq_zeros:to_v2",
    ),
    Route(
        "gptq-v2-to-gptq",
        "Store the zero points of a GPTQ model less one, as format gptq has them and every reader takes them.",
        EXACT_OR_REFUSED,
        "conversion.gptq_zeros:to_v1",
    ),
    Route(
        "awq-to-gptq",
        "Pack the codes, zero points and scales of an AWQ model as GPTQ packs them.",
        EXACT_OR_REFUSED,
        "conversion.awq:awq_to_gptq",
    ),
    Route(
        "shard", "Write a model into files of a bounded size.", EXACT, "conversion.shards:shard", ("shard_size",)
    ),
    Route("unshard", "Write a model into one file.", EXACT, "conversion.shards:unshard"),
    Route(
        "pickle-to-safetensors",
        "Read pickled weights, nothing but tensors allowed, and write them as safetensors.",
        EXACT,
        "conversion.pickle:pickle_to_safetensors",
    ),
    Route(
        "merge-lora",
        "Fold PEFT LoRA adapters into the weights of a model.",
        ROUNDED,
        "conversion.lora:merge_lora",
        ("adapters",),
    ),
    Route(
        "hf-to-gguf",
        "Write a dense model as one GGUF file for llama.cpp.",
        ROUNDED,
        "conversion.to_gguf:hf_to_gguf",
        ("type",),
    ),
    Route(
        "gptq-to-gguf",
        "Write a GPTQ model as one GGUF file: exact unless a type is asked for whose grid is another.",
        UNLESS_TYPE,
        "conversion.to_gguf:gptq_to_gguf",
        ("type",),
    ),
    Route(
        "gguf-to-hf",
        "Dequantize a GGUF file into a Hugging Face folder: float16 weights, config and tokenizer.",
        ROUNDED,
        "conversion.gguf_to_hf:gguf_to_hf",
    ),
)


def find(name: str) -> Route | None:
    return next((route for route in ROUTES if route.name == name), None)


def idle_options(route: str) -> tuple[str, ...]:
    """What is read for nothing when the weights alone are looked at: text, and a job where it is one go."""
    return (*TEXT, "job") if route == "gptq-to-exl2" else TEXT


def table() -> tuple[list[str], list[list[str]]]:
    """Columns and rows of `quantkit convert --list`."""
    return ["route", "weights", "calibration"], [[route.name, route.kept, route.calibration] for route in ROUTES]
