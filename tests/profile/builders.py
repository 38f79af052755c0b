"""Small traces and records for the tests of the analysis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.profile.trace import Ceilings, Event, ModelNumbers, ProfileRecord, StepLine, Trace, Window

MODEL = ModelNumbers(
    num_layers=2,
    hidden_size=64,
    q_size=64,
    kv_size=32,
    mlp_width=128,
    vocab_size=1000,
    active_params=1_000_000,
    weight_bytes=2_000_000,
    head_bytes=128_000,
    kv_token_bytes=256,
    activation_bytes=2,
    logit_bytes=2,
)
CEILINGS = Ceilings(bandwidth=1e12, gemm_rate=1e14)


def kernel(name: str, start: float, us: float) -> Event:
    return Event(name=name, ph="X", cat="kernel", ts=start, dur=us, tid=7)


def ranged(name: str, start: float, us: float, *, tid: int = 1, cat: str = "user_annotation") -> Event:
    return Event(name=name, ph="X", cat=cat, ts=start, dur=us, tid=tid)


def operation(name: str, start: float, us: float, *, tid: int = 1) -> Event:
    return ranged(name, start, us, tid=tid, cat="cpu_op")


def trace_of(*events: Event) -> Trace:
    return Trace(list(events), 0)


def step(number: int = 0, *, at: float = 0.0, seconds: float = 1e-3, **changes: Any) -> StepLine:
    """A decode step of 8 sequences that starts at `at` seconds."""
    fields: dict[str, Any] = {
        "step": number,
        "started_at": at,
        "planned_at": at + 0.25 * seconds,
        "collected_at": at + 0.75 * seconds,
        "ended_at": at + seconds,
        "host_s": 0.5 * seconds,
        "wait_s": 0.5 * seconds,
        "num_tokens": 8,
        "num_seqs": 8,
        "num_decodes": 8,
        "num_samples": 8,
        "kv_tokens": 800.0,
        "pairs": 0.0,
        "is_last": False,
    }
    return StepLine(**fields | changes)


def record_of(steps: Sequence[StepLine], **changes: Any) -> ProfileRecord:
    fields: dict[str, Any] = {
        "trace": "",
        "device": "cuda",
        "device_name": "a GPU",
        "window": Window(1.0, len(steps)),
        "model": MODEL,
        "ceilings": CEILINGS,
        "steps": list(steps),
        "model_name": "tiny",
    }
    return ProfileRecord(**fields | changes)
