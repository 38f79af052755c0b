"""The table of families as Markdown, as shown in docs/models.md."""

from __future__ import annotations

from headrace.models.encoder_config import ENCODERS
from headrace.models.families import FAMILIES

_HEAD = "| models | architecture in config.json | in GGUF files |\n| --- | --- | --- |\n"


def table() -> str:
    return (
        _HEAD
        + "".join(
            f"| {family.models} | {_code(family.architectures)} | {_code(family.gguf_architectures)} |\n"
            for family in FAMILIES
        )
        + "".join(
            f"| {family.models} | {_code(family.architectures)} | {_code(family.gguf_architectures)} |\n"
            for family in ENCODERS
        )
    )


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
