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


def respelled(name: str) -> str:
    """The other name of a module or tensor; its own where it has no other."""
    if RENAMED[0][0] not in name:
        return name
    for usual, other in RENAMED:
        name = name.replace(usual, other)
    return name


def spellings(module: str) -> list[tuple[str, ...]]:
    """The modules that a linear may be on disk, its own name first: one, or the parts of a fused one."""
    parent, _, last = module.rpartition(".")
    parts = tuple(f"{parent}.{part}" for part in SPLIT.get(last, ()))
    return [modules for modules in ((module,), (respelled(module),), parts) if modules]
