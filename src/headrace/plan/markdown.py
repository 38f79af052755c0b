"""Tables of docs/plan.md that are made from the code and from the record of its accuracy: `make tables`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.plan.gpus import GIB, GPUS

_WORKLOADS = {"few": "16 sequences of 512 in, 512 out", "alone": "one sequence of 512 in, 512 out"}
_WORKLOADS |= {f"short {count}": f"{count} of 64 in, 256 out" for count in (1, 4, 16)}
_FORMATS = {"bfloat16": "bf16", "fp8": "FP8", "fp8 weights": "FP8, cache bf16", "int8": "INT8", "int4": "INT4"}


def accuracy_table(record: Mapping[str, Any]) -> str:
    """Predicted against measured seconds: held-out records first."""
    rows = sorted(record["rows"], key=lambda row: (row["used"] != "held out", row["model"], row["dtype"]))
    return _table(
        ("model", "workload", "format", "measured, s", "predicted, s", "error", "used"),
        [
            (
                row["model"],
                _WORKLOADS.get(row["workload"], row["workload"]),
                _FORMATS[row["dtype"]],
                f"{row['measured_s']:.2f}",
                f"{row['predicted_s']:.2f}",
                f"{row['error']:+.1%}".replace("%", " %"),
                "**held out**" if row["used"] == "held out" else "fitted",
            )
            for row in rows
        ],
    )


def serving_table(record: Mapping[str, Any]) -> str:
    """Closed loops of the server, which the fit does not use."""
    return _table(
        ("model", "clients", "measured tokens/s", "predicted tokens/s", "error"),
        [
            (
                row["model"],
                f"{row['concurrency']}",
                f"{row['measured_out_tok_s']:,}",
                f"{row['predicted_out_tok_s']:,}",
                f"{row['error']:+.1%}".replace("%", " %"),
            )
            for row in record["serving"]
        ],
    )


def gpu_table() -> str:
    return _table(
        ("GPU", "memory, GiB", "TB/s", "bf16 TFLOP/s", "FP8 TFLOP/s", "link, GB/s", "$/h, assumed"),
        [
            (
                gpu.name,
                f"{gpu.memory_bytes / GIB:.1f}",
                f"{gpu.bandwidth / 1e12:.2f}",
                f"{gpu.bf16_rate / 1e12:,.0f}",
                "" if gpu.fp8_rate is None else f"{gpu.fp8_rate / 1e12:,.0f}",
                f"{gpu.link} {gpu.link_bandwidth / 1e9:.0f}",
                f"{gpu.price:.2f}",
            )
            for gpu in GPUS
        ],
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
