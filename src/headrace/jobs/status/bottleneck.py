"""What a job is limited by, decided from what its engine and its main loop did in an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["starting", "reading", "disk", "host", "cache", "prefill", "decode", "tail"]

WRITING_SHARE = 0.3  # of the time, from which on the disk is the bottleneck
HOST_SHARE = 0.5  # of a step's time
KV_USE = 0.9
MIN_KV_USE = 0.01  # a cache that is empty, as when all sequences ended in the same step, is not short of blocks
FULL_STEP_SHARE = 0.5  # of max_num_batched_tokens: a step below it has room for a waiting prompt
FREE_SLOTS_SHARE = 1 / 16  # a GPU's scheduler lets fewer slots than this stay free for a moment
PROMPT_SHARE = 0.5  # of computed tokens


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What was done in an interval, and the state at its end."""

    seconds: float
    num_steps: int
    num_batched_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    host_seconds: float  # of the engine's planning, for which the device may wait
    wait_seconds: float  # waiting for the device
    writing_seconds: float  # that the main loop spent on writing
    num_running: int  # sequences
    num_waiting: int  # in the engine's queue
    kv_use: float
    num_ready: int  # lines that wait to be submitted
    has_ended: bool  # all of the input was read
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Bottleneck:
    limit: Limit
    reason: str

    def __str__(self) -> str:
        return f"{self.limit}: {self.reason}"


def find_bottleneck(now: Interval) -> Bottleneck:
    """The first that applies. What feeds the engine and takes its results is checked before the engine itself."""
    has_free_slots = now.num_running < now.max_num_seqs
    writing_share = now.writing_seconds / max(1e-9, now.seconds)
    host_share = now.host_seconds / max(1e-9, now.host_seconds + now.wait_seconds)
    prompt_share = 1 - now.num_generated_tokens / max(1, now.num_batched_tokens)
    if writing_share >= WRITING_SHARE:
        return Bottleneck("disk", f"{writing_share:.0%} of the time goes into writing answers")
    if not now.has_ended and has_free_slots and now.num_waiting == 0 and now.num_ready < now.max_num_seqs:
        return Bottleneck("reading", "the engine waits for lines to be read and tokenized")
    if now.has_ended and now.num_ready == 0 and now.num_waiting == 0 and has_free_slots:
        return Bottleneck("tail", f"{now.num_running:,} of {now.max_num_seqs:,} slots are busy with the last lines")
    if now.num_steps == 0:
        return Bottleneck("starting", "no step has ended yet")
    if has_free_slots and now.num_waiting == 0 and now.num_ready > 0:
        return Bottleneck("host", "lines are ready and slots are free: the job's main loop does not keep up")
    if now.num_preemptions or _waits_for_blocks(now):
        return Bottleneck("cache", _cache_reason(now))
    if host_share >= HOST_SHARE:
        return Bottleneck("host", f"{host_share:.0%} of a step is spent on planning it while the device waits")
    if prompt_share >= PROMPT_SHARE:
        filled = now.num_batched_tokens / now.num_steps / now.max_num_batched_tokens
        return Bottleneck(
            "prefill", f"{prompt_share:.0%} of computed tokens are of prompts, steps are {min(1.0, filled):.0%} full"
        )
    return Bottleneck("decode", f"{now.num_running:,} of {now.max_num_seqs:,} slots decode a token each step")


def _waits_for_blocks(now: Interval) -> bool:
    """Whether sequences wait although slots are free and steps have room: then blocks of the cache are missing. They
    may be held for answers that still grow, so the cache need not look full."""
    has_slots = now.max_num_seqs - now.num_running > max(1, FREE_SLOTS_SHARE * now.max_num_seqs)
    is_step_full = now.num_batched_tokens / now.num_steps >= FULL_STEP_SHARE * now.max_num_batched_tokens
    may_be_short = now.kv_use >= KV_USE or (now.kv_use >= MIN_KV_USE and not is_step_full)
    return bool(has_slots and now.num_waiting and may_be_short)


def _cache_reason(now: Interval) -> str:
    preempted = f", {now.num_preemptions:,} sequences were preempted" if now.num_preemptions else ""
    busy = f"{now.num_running:,} of {now.max_num_seqs:,} slots busy"
    return f"{now.kv_use:.0%} of the KV cache is held with {busy}{preempted}"
