"""What limits a job now, decided from what its engine and its own loop did between two looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["starting", "reading", "disk", "host", "cache", "prefill", "decode", "tail"]

WRITING_SHARE = 0.3  # of the time, before the disk is said to limit
HOST_SHARE = 0.5  # of a step's time
KV_USE = 0.9
PROMPT_SHARE = 0.5  # of computed tokens


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What was done between two looks, and how things stand at the second."""

    seconds: float
    num_steps: int
    num_batched_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    host_seconds: float  # the engine's own, for which a device may wait
    wait_seconds: float  # waiting for the device
    writing_seconds: float  # in which the job's loop wrote and did nothing else
    num_running: int  # sequences
    num_waiting: int  # in the engine's queue
    kv_use: float
    num_ready: int  # lines that wait to be submitted
    has_ended: bool  # all of the input was read
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    limit: Limit
    reason: str

    def __str__(self) -> str:
        return f"{self.limit}: {self.reason}"


def limits_now(now: Interval) -> Verdict:
    """The first that applies, from the outside in: who feeds and empties the engine before what it does itself."""
    has_free_rows = now.num_running < now.max_num_seqs
    writing_share = now.writing_seconds / max(1e-9, now.seconds)
    host_share = now.host_seconds / max(1e-9, now.host_seconds + now.wait_seconds)
    prompt_share = 1 - now.num_generated_tokens / max(1, now.num_batched_tokens)
    if writing_share >= WRITING_SHARE:
        return Verdict("disk", f"{writing_share:.0%} of the time goes into writing answers")
    if not now.has_ended and has_free_rows and now.num_waiting == 0 and now.num_ready < now.max_num_seqs:
        return Verdict("reading", "the engine waits for lines to be read and tokenized")
    if now.has_ended and now.num_ready == 0 and now.num_waiting == 0 and has_free_rows:
        return Verdict("tail", f"the last {now.num_running:,} of {now.max_num_seqs:,} rows are busy, nothing is left")
    if now.num_steps == 0:
        return Verdict("starting", "no step has ended yet")
    if has_free_rows and now.num_waiting == 0 and now.num_ready > 0:
        return Verdict("host", "lines are ready and rows are free: the job's own loop does not keep up")
    if now.num_preemptions or (has_free_rows and now.num_waiting and now.kv_use >= KV_USE):
        return Verdict("cache", _cache_reason(now))
    if host_share >= HOST_SHARE:
        return Verdict("host", f"{host_share:.0%} of a step is spent on planning it, the device waits")
    if prompt_share >= PROMPT_SHARE:
        filled = now.num_batched_tokens / now.num_steps / now.max_num_batched_tokens
        return Verdict(
            "prefill", f"{prompt_share:.0%} of computed tokens are of prompts, steps are {min(1.0, filled):.0%} full"
        )
    return Verdict("decode", f"{now.num_running:,} of {now.max_num_seqs:,} rows draw a token each step")


def _cache_reason(now: Interval) -> str:
    given_way = f", {now.num_preemptions:,} sequences had to give way" if now.num_preemptions else ""
    return f"{now.kv_use:.0%} of the KV cache is held with {now.num_running:,} of {now.max_num_seqs:,} rows{given_way}"
