"""Draws the figures of README.md and docs/performance.md from the records, as plain SVG.

    python benchmarks/figures.py

The records are offline-h200.jsonl (Headrace, the newest record of each workload) and peers-h200.jsonl (vLLM and SGLang
on the same kind of machine). tests/docs/test_figures.py fails when a figure is older than its records.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

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
# Each colour has a contrast of at least 3 to the background of both colour schemes.
COLOURS = {"headrace": "#0d9488", "sglang": "#d97706", "vllm": "#7c8aa0"}
STYLE = """
  text { font-family: system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif; fill: #1f2937 }
  .card { fill: #ffffff; stroke: #d1d5db }
  .title { font-size: 20px; font-weight: 600 }
  .quiet { font-size: 13px; fill: #5b6472 }
  .panel { font-size: 15px; font-weight: 600 }
  .label { font-size: 13px }
  .value { font-size: 10.5px }
  .own { font-weight: 700 }
  .grid { stroke: #e5e7eb }
  .base { stroke: #9ca3af }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb }
    .card { fill: #1b2029; stroke: #3b4352 }
    .quiet { fill: #a3acba }
    .grid { stroke: #333a47 }
    .base { stroke: #6b7280 }
  }
"""

WIDTH, MARGIN, GAP = 980, 28, 20
TOP, PLOT_HEIGHT, BOTTOM = 122, 230, 62
LABEL_LINE = 12  # height of a value's label


@dataclass(frozen=True, slots=True)
class Bar:
    engine: str
    value: float


@dataclass(frozen=True, slots=True)
class Group:
    """The bars of one workload."""

    label: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """The workloads of one model."""

    title: str
    groups: tuple[Group, ...]


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
                        Bar(engine, seconds[model, workload, "vllm"] / seconds[model, workload, engine])
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
                    (Bar("headrace", peer[model, workload] / own[model, workload]), Bar("vllm", 1.0)),
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
    """Panels side by side over one scale, each as wide as its number of groups asks for."""
    most = max(bar.value for panel in panels for group in panel.groups for bar in group.bars)
    top_value = int(most) + 1
    height = TOP + PLOT_HEIGHT + BOTTOM
    num_groups = sum(len(panel.groups) for panel in panels)
    group_width = (WIDTH - 2 * MARGIN - 24 - GAP * (len(panels) - 1)) / num_groups
    base = TOP + PLOT_HEIGHT
    parts = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        _text(MARGIN, 38, title, "title"),
        _text(MARGIN, 60, subtitle, "quiet"),
        *_legend(names),
    ]
    for value in range(top_value + 1):
        y = base - PLOT_HEIGHT * value / top_value
        kind = "base" if value == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{MARGIN + 24}" x2="{WIDTH - MARGIN}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(MARGIN + 16, y + 4, str(value), "quiet", anchor="end"))
    left = MARGIN + 24.0
    for panel in panels:
        width = group_width * len(panel.groups)
        parts.append(_text(left + width / 2, base + 46, panel.title, "panel", anchor="middle"))
        for place, group in enumerate(panel.groups):
            parts += _group(group, left + place * group_width, group_width, base, PLOT_HEIGHT / top_value)
        left += width + GAP
    body = "\n".join(f"  {part}" for part in parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _group(group: Group, left: float, width: float, base: float, unit: float) -> Iterable[str]:
    bar_width = min(28.0, (width - 5) / len(group.bars))
    start = left + (width - bar_width * len(group.bars)) / 2
    for place, bar in enumerate(group.bars):
        x, height = start + place * bar_width, bar.value * unit
        yield (
            f'<rect x="{x + 1:.1f}" y="{base - height:.1f}" width="{bar_width - 2:.1f}" height="{height:.1f}" rx="2" '
            f'fill="{COLOURS[bar.engine]}"/>'
        )
    labelled = [(place, bar) for place, bar in enumerate(group.bars) if bar.engine != "vllm"]
    heights = _label_heights([bar.value * unit + 5 for _, bar in labelled])
    for (place, bar), height in zip(labelled, heights, strict=True):
        kind = "value own" if bar.engine == "headrace" else "value"
        yield _text(start + (place + 0.5) * bar_width, base - height, _shown(bar.value), kind, anchor="middle")
    yield _text(left + width / 2, base + 20, group.label, "label", anchor="middle")


def _label_heights(heights: Sequence[float]) -> list[float]:
    """Labels are wider than bars: of two neighbours at nearly the same height, the higher one moves up a line."""
    moved = list(heights)
    for i in range(1, len(moved)):
        low, high = sorted((i - 1, i), key=lambda place: moved[place])
        moved[high] = max(moved[high], moved[low] + LABEL_LINE)
    return moved


def _shown(value: float) -> str:
    return f"{value:.1f}" if value >= 2 else f"{value:.2f}"  # near 1 the second digit matters


def _legend(names: dict[str, str]) -> Iterable[str]:
    x = float(MARGIN)
    for engine, name in names.items():
        yield f'<rect x="{x:.1f}" y="78" width="13" height="13" rx="2" fill="{COLOURS[engine]}"/>'
        yield _text(x + 19, 89, name, "label")
        x += 19 + 7.2 * len(name) + 26


def _text(x: float, y: float, text: str, kind: str, *, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


FIGURES = {"throughput.svg": newest_peers, "offline-vllm-0.26.svg": offline}


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        path = IMAGES / name
        path.write_text(figure(), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
