"""Generates the table of server options in docs/serving-operations.md."""

from __future__ import annotations

from headrace.cli.engine_flags import flag_of
from headrace.cli.serve import option_groups


def table() -> str:
    text = "| option | default | |\n| --- | --- | --- |\n"
    for title, about, fields in option_groups():
        text += f"| **{title}** | | {about} |\n"
        for field in fields:
            help, _, said = str(field.metadata["help"]).partition("; default: ")
            text += f"| `{flag_of(field.name)}` | {said or _shown(field.default)} | {help} |\n"
    return text


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"
