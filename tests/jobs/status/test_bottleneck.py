from __future__ import annotations

import dataclasses

import pytest

from headrace.jobs.status.bottleneck import Interval, find_bottleneck

DECODING = Interval(
    seconds=10.0,
    num_steps=100,
    num_batched_tokens=6400,
    num_generated_tokens=6400,
    num_preemptions=0,
    host_seconds=0.5,
    wait_seconds=9.0,
    writing_seconds=0.1,
    num_running=64,
    num_waiting=70,
    kv_use=0.5,
    num_ready=1000,
    has_ended=False,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
)


@pytest.mark.parametrize(
    "changes, limit, reason",
    [
        ({}, "decode", "64 of 64 slots decode a token each step"),
        ({"num_batched_tokens": 150_000}, "prefill", "96% of computed tokens are of prompts, steps are 73% full"),
        ({"host_seconds": 9.5}, "host", "51% of a step is spent on planning it"),
        ({"num_running": 20, "kv_use": 0.97}, "cache", "97% of the KV cache is held with 20 of 64 slots busy"),
        ({"num_running": 20, "kv_use": 0.6}, "cache", "60% of the KV cache is held with 20 of 64 slots busy"),
        ({"num_running": 20, "kv_use": 0.6, "num_batched_tokens": 150_000}, "prefill", "steps are 73% full"),
        ({"num_running": 62}, "decode", "62 of 64 slots decode"),
        ({"num_running": 3, "max_num_seqs": 4, "kv_use": 0.2}, "decode", "3 of 4 slots decode"),  # one has just ended
        ({"num_running": 0, "kv_use": 0.0}, "decode", "0 of 64 slots decode"),  # all have
        ({"num_preemptions": 3, "kv_use": 0.99}, "cache", "3 sequences were preempted"),
        ({"num_running": 20, "num_waiting": 0, "num_ready": 3}, "reading", "waits for lines to be read and tokenized"),
        ({"num_running": 20, "num_waiting": 0}, "host", "lines are ready and slots are free"),
        ({"writing_seconds": 4.0}, "disk", "40% of the time goes into writing answers"),
        (
            {"num_running": 5, "num_waiting": 0, "num_ready": 0, "has_ended": True},
            "tail",
            "5 of 64 slots are busy with the last lines",
        ),
        ({"num_steps": 0, "num_batched_tokens": 0, "num_generated_tokens": 0}, "starting", "no step has ended yet"),
    ],
)
def test_each_bottleneck_is_distinguished_from_the_others(changes: dict[str, object], limit: str, reason: str) -> None:
    bottleneck = find_bottleneck(dataclasses.replace(DECODING, **changes))  # type: ignore[arg-type]
    assert bottleneck.limit == limit
    assert reason in bottleneck.reason


def test_a_slow_writer_is_reported_before_what_the_engine_does() -> None:
    """A blocked writer empties the engine's slots as well."""
    blocked = dataclasses.replace(DECODING, writing_seconds=8.0, num_running=0, num_waiting=0, num_steps=0)
    assert find_bottleneck(blocked).limit == "disk"


def test_an_idle_engine_without_lines_is_limited_by_reading() -> None:
    idle = dataclasses.replace(DECODING, num_steps=0, num_running=0, num_waiting=0, num_ready=0)
    assert find_bottleneck(idle).limit == "reading"


def test_full_slots_at_the_end_of_the_input_are_no_tail() -> None:
    full = dataclasses.replace(DECODING, has_ended=True, num_waiting=0, num_ready=0)
    assert find_bottleneck(full).limit == "decode"
