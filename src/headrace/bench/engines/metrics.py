"""Reads a server's /metrics: counters under common names, and the settings in the labels of its info series.

Headrace, vLLM and SGLang export different names for the same counts. What a server does not export is left out.
"""

from __future__ import annotations

from headrace.bench.engines.base import SettingInForce
from headrace.scrape.names import COUNTERS, common_names
from headrace.scrape.page import Sample, samples

__all__ = ["COUNTERS", "INFO", "Sample", "common_names", "counters", "samples", "settings"]

# The time of Headrace's engine loop, by its label: computing on the host, and waiting for the device.
ENGINE_TIME = "headrace:engine_seconds_total"
_PARTS = {"host": "host_seconds", "wait": "wait_seconds"}
INFO = ("headrace:cache_config_info", "vllm:cache_config_info", "headrace:config_info", "sglang:cache_config_info")
_ENGINE_LABELS = ("engine", "model_name", "engine_index", "engine_type")


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
