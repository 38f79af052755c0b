"""Generates the table of server options in docs/serving-operations.md, and the counts of docs/coming-from-vllm.md."""

from __future__ import annotations

from headrace.cli.engine_flags import flag_of
from headrace.cli.serve import build_parser, option_groups
from headrace.doctor.readers.vllm_flags import VLLM_FLAGS, VLLM_VERSION
from headrace.other_settings import find_other


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


def counts_table() -> str:
    """How many of the long flags of `vllm serve` are the same here, ignored and refused."""
    names = {flag for flag in VLLM_FLAGS if flag.startswith("--")}
    others = names - set(build_parser().flags)
    outcomes = [found.other.outcome for found in map(find_other, others) if found is not None]
    return (
        f"| flags of `vllm serve` {VLLM_VERSION} | number |\n| --- | ---: |\n"
        f"| the same here | {len(names) - len(others)} |\n"
        f"| ignored, with a line that says why | {outcomes.count('ignored')} |\n"
        f"| refused, with the reason and what to use instead | {outcomes.count('refused')} |\n"
        f"| all | {len(names)} |\n"
    )
