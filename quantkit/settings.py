"""One frozen dataclass for each command. Settings stop at the commands; lower layers take the values they need."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """`quantkit quantize`: what to quantize, to which format, against which text."""

    model: str
    out: Path
    format: str = "gptq"
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False
    group_aware: bool = False
    checkpoint_format: str | None = None
    target: str | None = None
    free_group_size: bool = False
    """With a target: it may choose another group size."""
    free_widths: tuple[int, ...] = ()
    """Widths that linears may have for their damage's sake; with a target it says which, for `--effort best`."""
    free_alone: bool = False
    """Linears that read one input may differ in width."""
    rule: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    lm_head: bool = False
    untie_head: bool = False
    rotate: bool = False
    route_all: bool = False
    hessian_dtype: str = "fp32"
    effort: str = "default"
    calibration: str = "bundled"
    samples: int = 128
    length: int = 512
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    strict: bool = False
    evaluate: bool = True
    judged: bool = False
    """The damage is measured though the result was finished before."""
    bpw: float | None = None
    head_bits: int = 6
    include_head: bool = False
    measurement: Path | None = None
    plan: Path | None = None
    job: Path | None = None
    restart: bool = False
    max_memory: int | None = None
    """Bytes of the whole process; None is no limit."""
    redo: str | None = None
    """Which linears of the result in `out` are to be solved anew, by a pattern for their names."""
    asked: frozenset[str] = frozenset()
    """Options that somebody gave, be it with the value that they have anyway: the others are, in a redo, those of the
    result."""


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """`quantkit measure MODEL -o OUT`: what each EXL2 layout of each linear would do to the model."""

    model: str
    out: Path
    rotate: bool = False
    calibration: str = "bundled"
    samples: int = 128
    length: int = 512
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    overwrite: bool = False
    job: Path | None = None
    restart: bool = False
    max_memory: int | None = None


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """`quantkit plan MEASUREMENT --bpw 4.0 -o OUT`."""

    measurement: Path
    bpw: float
    out: Path
    head_bits: int = 6
    include_head: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ShowMeasurementSettings:
    """`quantkit measurement show MEASUREMENT --plot FILE`."""

    measurement: Path
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class ImportMeasurementSettings:
    """`quantkit measurement import SOURCE MODEL -o OUT`."""

    source: Path
    model: str
    out: Path


@dataclass(frozen=True, slots=True)
class ConvertSettings:
    """`quantkit convert ROUTE IN OUT`, ROUTE as `gguf-to-hf`: what every route reads, then what some do."""

    route: str
    source: Path
    out: Path
    overwrite: bool = False
    bpw: float | None = None
    match: float | None = None
    head_bits: int | None = None
    data_free: bool = False
    original: str | None = None
    measurement: Path | None = None
    bits: int = 4
    group_size: int = 128
    sym: bool = True
    act_order: bool = False
    calibration: str = "bundled"
    samples: int = 128
    length: int = 512
    seed: int = 0
    evaluate: bool = True
    dtype: str = "fp16"
    shard_size: str = "4GiB"
    adapters: tuple[str, ...] = ()
    type: str = "auto"
    job: Path | None = None
    restart: bool = False
    made_by: Mapping[str, str | int | float | bool | None] | None = None
    """What the result will say made it; found by the command itself."""


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Which text is scored, in which windows: shared by all `quantkit eval` commands."""

    dataset: str | None = None
    text: Path | None = None
    length: int = 2048
    windows: int | None = None
    bos: bool = False


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """`quantkit eval perplexity MODEL`."""

    model: str
    text: TextSettings
    device: str = "auto"
    dtype: str = "auto"
    stride: int | None = None


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """`quantkit eval compare REFERENCE CANDIDATE`."""

    reference: str
    candidate: str | None
    text: TextSettings
    device: str = "auto"
    dtype: str = "auto"
    save_reference: Path | None = None
    gate: str | None = None
    kv: str | None = None
    kv_resident: int = 0


@dataclass(frozen=True, slots=True)
class DegenerationSettings:
    """`quantkit eval degeneration MODEL`: without `kv` one cache, in the numbers of the arithmetic."""

    model: str
    reference: str | None = None
    kv: tuple[str, ...] = ()
    kv_resident: int = 0
    quick: bool = False
    tokens: int = 400
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class TasksSettings:
    """`quantkit eval tasks MODEL TASK…`: a task is a `.jsonl` or a data set's name; `fields` rename what it has."""

    model: str
    tasks: tuple[str, ...]
    limit: int | None = None
    shots: int = 0
    fields: tuple[str, ...] = ()
    source: str | None = None
    target: str | None = None
    metrics: tuple[str, ...] = ()
    split: str = "test"
    save_items: Path | None = None
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """`quantkit eval report REFERENCE CANDIDATE… -o OUT`; `probe` runs the quick degeneration probe of each."""

    reference: str
    candidates: tuple[str, ...]
    out: Path
    text: TextSettings
    measurement: Path | None = None
    probe: bool = False
    overwrite: bool = False
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """`quantkit generate MODEL`: one of three prompts, or a file of many, and how to continue it."""

    model: str
    prompt: str | None = None
    chat: str | None = None
    prompt_file: Path | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    stop_tokens: tuple[str, ...] = ()
    banned: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    merge_lora: bool = False
    draft: str | None = None
    draft_tokens: int = 4
    kv: str | None = None
    cache_tokens: int | None = None
    kv_resident: int = 0
    kv_window: int | None = None
    kv_sink: int = 0
    allow_beyond_context: bool = False
    prompts_file: Path | None = None
    batch: int = 16
    token_budget: int = 512
    optimistic: bool = False
    share_prefixes: bool = True
    cache_fraction: float = 0.9
    latency_ms: float | None = None
    ignore_eos: bool = False
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """`quantkit check PATH`."""

    path: Path


@dataclass(frozen=True, slots=True)
class InspectSettings:
    """`quantkit inspect MODEL`."""

    model: str


@dataclass(frozen=True, slots=True)
class RecommendSettings:
    """`quantkit recommend MODEL`: memories in bytes, of a card and of the machine; without `kv` all are looked at."""

    model: Path
    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    kv: str | None = None
    batch: int = 1
    measurement: Path | None = None
