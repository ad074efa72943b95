"""`quantkit inspect`: what a model is: format, real bits per weight by part, sizes, tokenizer, who can load it."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quantkit.checkpoint.reader import Checkpoint, open_checkpoint
from quantkit.commands.check import verdict_rows, verdicts_json
from quantkit.commands.inspection.blueprint import Blueprint, has_weights, open_blueprint
from quantkit.commands.inspection.tokenizer import TokenizerFacts, tokenizer_faults
from quantkit.consumers import Verdict, verdicts
from quantkit.inventory import DENSE, EXL2, GPTQ, Inventory, StoredLinear, take
from quantkit.models.architecture import EMBEDDING, HEAD
from quantkit.models.config import ModelConfig
from quantkit.progress import Progress, Tqdm
from quantkit.settings import InspectSettings

LINEARS = ("attention", "mlp", "experts")
ORDER = ("embedding", *LINEARS, "routers", "norms", "head", "other")


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of tensors: how many weights, how many bytes on disk with all side data, and stored as what."""

    name: str
    weights: int
    size_bytes: int
    stored_as: str

    @property
    def bits_per_weight(self) -> float | None:
        return 8 * self.size_bytes / self.weights if self.weights and self.size_bytes else None

    def row(self) -> list[str]:
        bits = "" if self.bits_per_weight is None else f"{self.bits_per_weight:.3f}"
        return [self.name, f"{self.weights:,}", bits, f"{self.size_bytes / 2**20:,.1f}", self.stored_as]


@dataclass(frozen=True, slots=True)
class InspectReport:
    """`linears` sums up what bits per weight are usually quoted of: the linears of the blocks. `size_bytes` is that of
    the weight files, as `quantize` and `convert` have it; parts are data alone, without the headers of files."""

    path: Path
    family: str
    config: ModelConfig
    parameters: int
    method: str
    settings: str
    files: int
    size_bytes: int
    parts: tuple[Part, ...]
    linears: Part
    tokenizer: TokenizerFacts | None
    notes: tuple[str, ...]
    verdicts: tuple[Verdict, ...]

    def rows(self) -> list[list[str]]:
        config = self.config
        heads = f"{config.num_heads} query, {config.num_kv_heads} key/value, {config.head_dim} wide"
        rows = [
            ["family", self.family],
            ["parameters", f"{self.parameters:,}"],
            ["format", self.method if not self.settings else f"{self.method}: {self.settings}"],
        ]
        if self.files:
            rows += [
                ["bits per weight, linears", f"{self.linears.bits_per_weight or 0:.4f}"],
                ["bits per weight, whole model", f"{8 * self.size_bytes / self.parameters:.4f}"],
                ["size", f"{self.size_bytes / 2**20:,.1f} MiB in {self.files} weight file{'s' * (self.files != 1)}"],
            ]
        mlp = f", MLP {config.intermediate_size}" if config.intermediate_size else ""
        rows += [["layers", f"{config.num_layers} × {config.hidden_size}{mlp}"], ["heads", heads]]
        if config.experts is not None:
            sizes = config.experts
            rows.append(["experts", f"{sizes.count}, {sizes.chosen} for each token, {sizes.width} wide"])
        windows = {window for window in config.windows if window is not None}
        rows.append(["context", f"{config.context:,}" + (f", windows of {max(windows):,}" if windows else "")])
        rows.append(["vocabulary", f"{config.vocab_size:,}" + (", head tied" if config.tie_embeddings else "")])
        return rows + (self.tokenizer.rows() if self.tokenizer else [["tokenizer", "none that can be used"]])

    def part_rows(self) -> list[list[str]]:
        return [part.row() for part in self.parts]

    def verdict_rows(self) -> list[list[str]]:
        return verdict_rows(self.verdicts)

    def as_json(self) -> dict[str, Any]:
        config, tokenizer = self.config, self.tokenizer
        return {
            "path": str(self.path),
            "family": self.family,
            "parameters": self.parameters,
            "format": self.method,
            "settings": self.settings,
            "bits_per_weight": self.linears.bits_per_weight,
            "size_bytes": self.size_bytes,
            "files": self.files,
            "parts": [
                {
                    "name": part.name,
                    "weights": part.weights,
                    "bytes": part.size_bytes,
                    "bits_per_weight": part.bits_per_weight,
                    "stored_as": part.stored_as,
                }
                for part in self.parts
            ],
            "config": {
                "layers": config.num_layers,
                "hidden_size": config.hidden_size,
                "heads": config.num_heads,
                "kv_heads": config.num_kv_heads,
                "head_dim": config.head_dim,
                "experts": None if config.experts is None else config.experts.count,
                "context": config.context,
                "vocabulary": config.vocab_size,
                "tied": config.tie_embeddings,
            },
            "tokenizer": None
            if tokenizer is None
            else {
                "vocabulary": tokenizer.vocabulary,
                "bos": tokenizer.bos,
                "eos": list(tokenizer.eos),
                "adds_bos": tokenizer.adds_bos,
                "chat_template": tokenizer.template,
            },
            "notes": list(self.notes),
            "consumers": verdicts_json(self.verdicts),
        }


def inspect(model: str) -> InspectReport:
    """The command for Python."""
    return run(InspectSettings(model), Tqdm())


def run(settings: InspectSettings, progress: Progress) -> InspectReport:
    """Reads headers and small tensors, no weight. Raises what opening the folder raises; for a faulty one
    `quantkit check` tells more."""
    local = Path(settings.model)
    if local.exists() and not has_weights(local):
        return _without_weights(open_blueprint(local))
    checkpoint = open_checkpoint(settings.model)
    inventory = take(checkpoint)
    for linear in inventory.linears:
        checkpoint.require_one_form(linear.name)
    config = inventory.config
    faults, notes, facts = tokenizer_faults(checkpoint.path, checkpoint.config, config.vocab_size)
    shapes = checkpoint.architecture.tensors(config).values()
    parts = _parts(checkpoint, inventory)
    linears = [part for part in parts if part.name in LINEARS]
    files = {header.path for header in checkpoint.homes.values()}
    return InspectReport(
        path=checkpoint.path,
        family=inventory.family,
        config=config,
        parameters=sum(map(prod, shapes)),
        method=inventory.method or "unquantized",
        settings=_said(inventory),
        files=len(files),
        size_bytes=sum(file.stat().st_size for file in files),
        parts=tuple(parts),
        linears=Part("linears", sum(part.weights for part in linears), sum(part.size_bytes for part in linears), ""),
        tokenizer=facts,
        notes=(*checkpoint.notes, *(fault.message for fault in faults), *notes),
        verdicts=tuple(verdicts(inventory)),
    )


def _without_weights(blueprint: Blueprint) -> InspectReport:
    """From config.json alone: how many weights each part has, and nothing of how they are stored."""
    routers = {spec.name for spec in blueprint.architecture.linears(blueprint.config) if not spec.quantizable}
    owned = {spec.name for spec in blueprint.architecture.linears(blueprint.config) if spec.quantizable}
    weights: Counter[str] = Counter()
    for name, shape in blueprint.architecture.tensors(blueprint.config).items():
        module, _, suffix = name.rpartition(".")
        if suffix != "bias":
            weights[_part_of(module, owned, routers)] += prod(shape)
    parts = tuple(Part(name, weights[name], 0, "") for name in ORDER if weights[name])
    _, notes, facts = tokenizer_faults(blueprint.path, blueprint.raw, blueprint.config.vocab_size)
    return InspectReport(
        path=blueprint.path,
        family=blueprint.family,
        config=blueprint.config,
        parameters=blueprint.parameters,
        method="no weights here",
        settings="",
        files=0,
        size_bytes=0,
        parts=parts,
        linears=Part("linears", sum(part.weights for part in parts if part.name in LINEARS), 0, ""),
        tokenizer=facts,
        notes=tuple(notes),
        verdicts=(),
    )


def _parts(checkpoint: Checkpoint, inventory: Inventory) -> list[Part]:
    """Every tensor of the files is in exactly one."""
    config, architecture = inventory.config, checkpoint.architecture
    routers = {spec.name for spec in architecture.linears(config) if not spec.quantizable}
    owners = {linear.name: linear for linear in inventory.linears}
    sizes: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    for name, header in checkpoint.homes.items():
        module, entry = name.rpartition(".")[0], header.entries[name]
        part = _part_of(module, owners, routers)
        sizes[part] += entry.size_bytes
        if module not in owners and module != HEAD:
            weights[part] += prod(entry.shape)
            dtypes.setdefault(part, Counter())[entry.dtype.lower()] += 1
    for linear in inventory.linears:
        weights[_part_of(linear.name, owners, routers)] += linear.in_features * linear.out_features
    stored = {part: _stored_as(_of_part(inventory.linears, part, owners, routers)) for part in LINEARS}
    if inventory.head is not None:
        weights["head"] = config.hidden_size * config.vocab_size
        stored["head"] = _stored_as([inventory.head])
    parts = [
        Part(name, weights[name], sizes[name], stored.get(name) or ", ".join(dtypes.get(name, {})))
        for name in ORDER
        if sizes[name]
    ]
    if config.tie_embeddings and inventory.head is None:
        parts.append(Part("head", 0, 0, "the embedding"))
    return parts


def _part_of(module: str, owners: Collection[str], routers: Collection[str]) -> str:
    if module in owners:
        if ".self_attn." in module:
            return "attention"
        return "experts" if "expert" in module else "mlp"
    if module in routers or module.endswith((".mlp.gate", ".block_sparse_moe.gate", ".shared_expert_gate")):
        return "routers"
    if module == EMBEDDING:
        return "embedding"
    if module == HEAD:
        return "head"
    return "norms" if module.endswith("norm") else "other"


def _of_part(
    linears: Iterable[StoredLinear], part: str, owners: Collection[str], routers: Collection[str]
) -> list[StoredLinear]:
    return [linear for linear in linears if _part_of(linear.name, owners, routers) == part]


def _stored_as(linears: list[StoredLinear]) -> str:
    """`gptq 4 bits/128`, and what else there is, most first."""
    counts = Counter(map(_spelled, linears))
    shown = [what if len(counts) == 1 else f"{what} ({count}×)" for what, count in counts.most_common(3)]
    return ", ".join(shown) + (", …" if len(counts) > 3 else "")


def _spelled(linear: StoredLinear) -> str:
    if linear.format == GPTQ and linear.settings is not None:
        return f"gptq {linear.settings.bits} bits/{linear.settings.group_size}"
    if linear.format != DENSE:
        return linear.format
    return f"dense {linear.stored_bits // max(1, linear.in_features * linear.out_features)} bits"


def _said(inventory: Inventory) -> str:
    """The settings in a line."""
    said = inventory.quantization or {}
    if inventory.method == GPTQ:
        words = [
            f"{said.get('bits')} bits, group size {said.get('group_size')}",
            "sym" if said.get("sym", True) else "asym",
            *(["act-order"] if said.get("desc_act") else []),
            str(said.get("checkpoint_format", said.get("format", "gptq"))),
            *(["dynamic rules"] if said.get("dynamic") else []),
        ]
        return ", ".join(words) if said else "no settings, told from the tensors"
    if inventory.method == EXL2:
        head = f", head {said['head_bits']}" if "head_bits" in said else ""
        return f"{said.get('bits', 'unknown')} bits asked for{head}"
    return ""
