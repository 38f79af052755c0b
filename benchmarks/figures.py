"""Draws the figures of README.md and docs/performance.md from the records, as plain SVG.

    python benchmarks/figures.py

The records are offline-h200.jsonl (Headrace, the newest record of each workload) and peers-h200.jsonl (vLLM and SGLang
on the same kind of machine). tests/docs/test_figures.py fails when a figure is older than its records.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.bench.report.panels import Group, GroupBar, Look, Panel, panel_chart
from headrace.bench.report.svg import COLOURS, standalone

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

MODELS = {
    "llama-3.2-1b": "Llama 3.2 1B",
    "llama-3.2-3b": "Llama 3.2 3B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-3.1-8b fp8": "Llama 3.1 8B, FP8",
    "qwen3-8b": "Qwen3 8B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B (MoE)",
}
WORKLOADS = {"chat": "chat", "tree": "prefix tree", "few": "batch 16", "alone": "batch 1"}
LOOK = Look({"headrace": COLOURS[0], "sglang": COLOURS[1], "vllm": COLOURS[-1]}, own="headrace", unit="vllm")


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def newest_peers() -> str:
    """Headrace, SGLang and vLLM of the same month: throughput relative to vLLM."""
    seconds = {
        (row["model"], row["workload"], row["engine"]): row["seconds"]
        for row in read("peers-h200.jsonl")
        if row["suite"] == "2026-11" and row["workload"] in WORKLOADS
    }
    panels = [
        Panel(
            MODELS[model],
            tuple(
                Group(
                    label,
                    tuple(
                        GroupBar(engine, seconds[model, workload, "vllm"] / seconds[model, workload, engine])
                        for engine in ("headrace", "sglang", "vllm")
                    ),
                )
                for workload, label in WORKLOADS.items()
                if (model, workload, "vllm") in seconds
            ),
        )
        for model in ("llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b")
    ]
    return draw(
        panels,
        title="Offline throughput relative to vLLM (higher is better)",
        subtitle="One NVIDIA H200, bf16, the same requests for each engine; the vLLM bar of each workload is 1.0",
        names={"headrace": "Headrace 0.1, defaults", "sglang": "SGLang 0.5.17, tuned", "vllm": "vLLM 0.32.0, tuned"},
    )


def offline() -> str:
    """Headrace's newest records and the best run of vLLM 0.26.0: throughput relative to vLLM."""
    own = {(_with_type(row), row["workload"]): row["seconds"] for row in read("offline-h200.jsonl")}  # the last counts
    peer: dict[tuple[str, str], float] = {}
    for row in read("peers-h200.jsonl"):
        if row["suite"] == "offline":
            key = _with_type(row), row["workload"]
            peer[key] = min(row["seconds"], peer.get(key, row["seconds"]))
    panels = [
        Panel(
            MODELS[model],
            tuple(
                Group(
                    workload,
                    (GroupBar("headrace", peer[model, workload] / own[model, workload]), GroupBar("vllm", 1.0)),
                )
                for workload in ("chat", "decode", "prefill", "prefix")
                if (model, workload) in peer
            ),
        )
        for model in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-8b fp8")
    ]
    return draw(
        panels,
        title="Offline throughput relative to vLLM 0.26.0 (higher is better)",
        subtitle="One NVIDIA H200, the same requests for both engines; vLLM with the best of three configurations",
        names={"headrace": "Headrace, defaults", "vllm": "vLLM 0.26.0, its best"},
    )


def _with_type(row: dict[str, Any]) -> str:
    settings = row.get("settings")
    is_fp8 = row["dtype"] == "fp8" or (isinstance(settings, dict) and settings.get("quantization") == "fp8")
    return f"{row['model']} fp8" if is_fp8 else row["model"]


def draw(panels: Sequence[Panel], *, title: str, subtitle: str, names: dict[str, str]) -> str:
    return standalone(panel_chart(panels, LOOK, title=title, subtitle=subtitle, names=names))


FIGURES = {"throughput.svg": newest_peers, "offline-vllm-0.26.svg": offline}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        path = IMAGES / name
        path.write_text(figure(), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
