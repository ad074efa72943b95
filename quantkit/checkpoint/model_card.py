"""README.md of an imported model: the licence and origin that travel with its weights."""

import json

from quantkit.checkpoint.gguf_header import Metadata

# Front matter key of a Hugging Face model card → GGUF metadata.
FRONT_MATTER = {
    "license": "general.license",
    "license_name": "general.license.name",
    "license_link": "general.license.link",
    "language": "general.languages",
    "base_model": "general.source.huggingface.repository",
}
ORIGIN = {"Author": "general.author", "Organization": "general.organization", "Source": "general.source.url"}


def from_gguf(metadata: Metadata, file_name: str) -> str:
    """The card as Markdown. Values are written as JSON, which YAML includes, so that no text can leave its line."""
    front = {name: metadata[key] for name, key in FRONT_MATTER.items() if key in metadata}
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in front.items()]
    lines = ["---", *lines, "---", ""] if lines else []
    title = _line(metadata.get("general.name", file_name))
    lines += [f"# {title}", "", f"Weights of `{file_name}`, dequantized to float16.", ""]
    lines += [f"- {label}: {_line(metadata[key])}" for label, key in ORIGIN.items() if key in metadata]
    return "\n".join(lines).rstrip() + "\n"


def _line(value: object) -> str:
    return " ".join(str(value).split())
