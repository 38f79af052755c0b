"""Reads a server's /metrics: counters under common names, and the settings in the labels of its info series.

Headrace, vLLM and SGLang export different names for the same counts. What a server does not export is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from headrace.bench.engines.base import SettingInForce

# Common name: the series that hold it, by preference. The suffix _total of counters is added.
COUNTERS: dict[str, tuple[str, ...]] = {
    "num_preemptions": ("headrace:num_preemptions", "vllm:num_preemptions", "sglang:num_retracted_requests"),
    "num_prompt_tokens": ("headrace:prompt_tokens", "vllm:prompt_tokens", "sglang:prompt_tokens"),
    "num_generated_tokens": ("headrace:generation_tokens", "vllm:generation_tokens", "sglang:generation_tokens"),
    "prefix_queried_tokens": (
        "headrace:prefix_cache_queries",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries",
        "sglang:prompt_tokens",
    ),
    "prefix_hit_tokens": (
        "headrace:prefix_cache_hits",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits",
        "sglang:cached_tokens",
    ),
    "num_recomputed_tokens": ("headrace:recomputed_tokens",),
    "num_steps": ("headrace:steps", "vllm:iteration_tokens_total_count"),
    "num_refused": ("headrace:requests_refused", "vllm:admission_rejections"),
}
# The time of Headrace's engine loop, by its label: computing on the host, and waiting for the device.
ENGINE_TIME = "headrace:engine_seconds_total"
_PARTS = {"host": "host_seconds", "wait": "wait_seconds"}
INFO = ("headrace:cache_config_info", "vllm:cache_config_info", "headrace:config_info", "sglang:cache_config_info")
_ENGINE_LABELS = ("engine", "model_name", "engine_index", "engine_type")

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The samples of a page in Prometheus' text format. Lines that are none are skipped."""
    for line in text.splitlines():
        found = _LINE.match(line)
        if line.startswith("#") or found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)


def counters(text: str) -> dict[str, float]:
    """Counters under common names, summed over the engines of a server."""
    sums: dict[str, float] = {}
    times: dict[str, float] = {}
    for sample in samples(text):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        part = _PARTS.get(sample.labels.get("part", "")) if sample.name == ENGINE_TIME else None
        if part is not None:
            times[part] = times.get(part, 0.0) + sample.value
    return common_names(sums) | times


def common_names(sums: Mapping[str, float]) -> dict[str, float]:
    """Counters of an engine, by its own names, under the common ones."""
    found = {}
    for name, series in COUNTERS.items():
        for each in series:
            key = next((key for key in (f"{each}_total", each) if key in sums), None)
            if key is not None:
                found[name] = sums[key]
                break
    return found


def settings(text: str) -> dict[str, SettingInForce]:
    """Settings in the labels of info series, as the server reports them."""
    found: dict[str, SettingInForce] = {}
    for sample in samples(text):
        if sample.name in INFO:
            for name, value in sample.labels.items():
                if name not in _ENGINE_LABELS and name not in found and not name.startswith("_"):
                    found[name] = SettingInForce(_typed(value), "reported", sample.name)
    return found


def _typed(text: str) -> str | int | float | bool | None:
    known: dict[str, bool | None] = {"True": True, "False": False, "None": None}
    if text in known:
        return known[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
