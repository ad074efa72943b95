"""Other names under which a linear may lie on disk, as data.

Names are those of Hugging Face everywhere else. GPTQModel writes Phi-3's fused `gate_up_proj` in two, and Mixtral
under the names that transformers has in memory; ExLlamaV2 writes every fused linear in parts. A reader takes them all.
"""

# One module under another name: where the first fits, all of them are replaced.
RENAMED = (
    (".block_sparse_moe.", ".mlp."),
    (".w1", ".gate_proj"),
    (".w3", ".up_proj"),
    (".w2", ".down_proj"),
)
# A fused linear and the parts that it may be in, in the order of their outputs.
SPLIT = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def fused_of(module: str) -> str | None:
    """What readers that run the parts of a fused linear as one call it, by its first part; None for another."""
    before, dot, last = module.rpartition(".")
    return next((before + dot + fused for fused, parts in SPLIT.items() if parts[0] == last), None)


def parts_of(module: str) -> tuple[str, ...]:
    """The last names of the parts that a fused linear may be in, in the order of their outputs; none for another."""
    return SPLIT.get(module.rpartition(".")[2], ())


def on_disk(module: str, suffix: str) -> str:
    """The name of a tensor of a linear. A suffix with a part in front, as joined weights have them, names that part."""
    return f"{module.rpartition('.')[0] if '.' in suffix else module}.{suffix}"


def respelled(name: str) -> str:
    """The other name of a module or tensor; its own where it has no other."""
    if RENAMED[0][0] not in name:
        return name
    for usual, other in RENAMED:
        name = name.replace(usual, other)
    return name


def spellings(module: str) -> list[tuple[str, ...]]:
    """The modules that a linear may be on disk, its own name first: one, or the parts of a fused one."""
    parts = tuple(f"{module.rpartition('.')[0]}.{part}" for part in parts_of(module))
    return [modules for modules in ((module,), (respelled(module),), parts) if modules]
