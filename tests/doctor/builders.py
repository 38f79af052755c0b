"""Evidence and summaries for tests, healthy unless changed."""

from __future__ import annotations

from typing import Any

from headrace.doctor.evidence import ClientCost, Evidence
from headrace.doctor.readers.command_line import read_command
from headrace.plan.gpus import find_gpu
from headrace.plan.source import find_shape

SETTINGS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "gpu_memory_utilization": 0.92,
    "tensor_parallel_size": 1,
    "block_size": 16,
    "quantization": None,
}
ON_H200 = {"model": find_shape("llama-3.1-8b"), "gpu": find_gpu("H200")}


def live(**changes: Any) -> Evidence:
    """A healthy server under load: 200 of 256 slots decode, half of the prefixes hit, no request waits."""
    facts: dict[str, Any] = {
        "source": "live",
        "origin": "http://x",
        "engine": "headrace",
        "seconds": 10.0,
        "num_steps": 500.0,
        "num_requests": 400.0,
        "prompt_tokens": 100_000.0,
        "output_tokens": 100_000.0,
        "num_running": 200.0,
        "num_waiting": 0.0,
        "kv_use": 0.6,
        "num_preemptions": 0.0,
        "recomputed_tokens": 0.0,
        "prefix_queried_tokens": 100_000.0,
        "prefix_hit_tokens": 50_000.0,
        "evicted_tokens": 0.0,
        "tokens_per_step": 300.0,
        "host_seconds": 1.0,
        "wait_seconds": 9.0,
        "prompt_len": 600.0,
        "longest_prompts": 900.0,
        "output_len": 250.0,
        "token_gap_p50_s": 0.02,
        "token_gap_p99_s": 0.05,
        "event_loop_lag_p95_s": 0.001,
        "num_answered": 400.0,
        "num_refused": 0.0,
        "num_failed": 0.0,
        "draft_tokens": 0.0,
        "accepted_tokens": 0.0,
        "is_on_cpu": False,
    }
    settings = {**SETTINGS, **changes.pop("settings", {})}
    return Evidence(**{**facts, "settings": settings, **changes})


def online(**changes: Any) -> Evidence:
    changes = {"source": "online", "num_running": None, "num_waiting": None, "kv_use": None, **changes}
    return live(**{"client": ClientCost(cpu_share=0.3, loop_lag_p99_ms=1.0), **changes})


def job(**changes: Any) -> Evidence:
    return live(source="job", num_running=None, num_waiting=None, **changes)


def offline(**changes: Any) -> Evidence:
    return live(source="offline", num_running=None, num_waiting=None, kv_use=None, **changes)


def planned(text: str, **options: Any) -> Evidence:
    flags = ("--max-num-seqs", "--model", "--max-num-batched-tokens", "--gpu-memory-utilization")
    return read_command([text], headrace_flags=lambda action: flags, **options)


COUNTERS = {
    "num_steps": 500,
    "num_preemptions": 40,
    "num_prompt_tokens": 30_000,
    "num_generated_tokens": 40_000,
    "num_recomputed_tokens": 8_000,
    "prefix_queried_tokens": 30_000,
    "prefix_hit_tokens": 10_000,
    "host_ms_per_step": 6.0,
    "wait_ms_per_step": 2.0,
}


def job_summary(**changes: Any) -> dict[str, Any]:
    """The fields of a --json-summary that doctor reads."""
    return {
        "outcome": "finished",
        "model": "smollm2",
        "answered": 1000,
        "prompt_tokens": 200_000,
        "completion_tokens": 100_000,
        "seconds": 100.0,
        "prefix_hit_share": 0.25,
        "kv_use_peak": 0.7,
        "preemptions": 0,
        "recomputed_tokens": 0,
        "steps": 2_000,
        "tokens_per_step": 120.0,
        "host_seconds_per_step": 0.001,
        "wait_seconds_per_step": 0.03,
        "limited_by_seconds": {"decode": 95.0, "tail": 5.0},
        "settings": {
            "max_num_seqs": {"value": 64, "source": "automatic", "reason": ""},
            "device": {"value": "cpu", "source": "automatic", "reason": ""},
        },
        "machine": {"gpus": []},
        **changes,
    }
