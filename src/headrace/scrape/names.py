"""Names of series: Headrace, vLLM and SGLang export different names for the same counts."""

from __future__ import annotations

from collections.abc import Mapping

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
