"""The number of sequences in a step: too few slots, or too few requests."""

from __future__ import annotations

from headrace.doctor.estimates import TARGET_KV_USE, batch_gain, has_known_lengths, tokens_per_sequence
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import MEASURED, Advice, Finding, Rule
from headrace.doctor.rules.cache import is_preempting
from headrace.doctor.rules.load import MIN_LIMITED_SHARE, is_client_bound
from headrace.doctor.rules.prefill import is_prefill_bound
from headrace.engine.resolve_decoder import CPU_FULL_RATE_SEQS, GPU_MIN_FULL_RATE_SEQS

FULL_SLOTS_SHARE = 0.95
LOW_KV_USE = 0.5  # below it, memory is not the reason for waiting
MIN_SLOT_SHARE = 0.25  # of max_num_seqs; below it, the batch is small
MAX_GROWTH = 8.0  # times as many slots are advised at most
MIN_BUSY_SHARE = 0.5  # of the slots of an offline run, on average over all of it: its end leaves some empty
MIN_BATCH_GAIN = 0.05  # predicted, for which more slots are advised to an offline run
MORE_LOAD = 4.0  # times as many sequences: for how many the gain is predicted


def is_backed_up(evidence: Evidence) -> bool | None:
    """Whether requests wait for the engine."""
    if evidence.num_waiting is not None:
        return evidence.num_waiting >= 1
    slots, submitted = evidence.number("max_num_seqs"), num_submitted(evidence)
    return None if submitted is None or not slots else submitted >= 2 * slots


def num_submitted(evidence: Evidence) -> float | None:
    """Requests that the engine has at a time: a job and an offline run submit everything they have."""
    return evidence.num_requests if evidence.source in ("offline", "job") else evidence.num_in_flight


def are_slots_full(evidence: Evidence) -> bool:
    """Gauges are read between two steps, when a slot may have just become free: tokens per step count too, and one
    free slot does not."""
    slots, seen = evidence.number("max_num_seqs"), evidence.mean_batch
    if not slots or seen is None:
        return False
    per_step = evidence.output_tokens / evidence.num_steps if evidence.output_tokens and evidence.num_steps else 0.0
    busy = min(slots, max(seen, per_step))
    return busy >= FULL_SLOTS_SHARE * slots or busy > slots - 1


def slots_full(evidence: Evidence) -> Finding | None:
    slots, batch, use = evidence.number("max_num_seqs"), evidence.mean_batch, evidence.kv_use
    if not slots or batch is None or use is None or not is_backed_up(evidence):
        return None
    if not are_slots_full(evidence) or use >= LOW_KV_USE:
        return None
    value = max(int(slots) + 1, int(slots * min(MAX_GROWTH, TARGET_KV_USE / max(use, 1e-3))))
    gain = batch_gain(evidence, batch, value)
    numbers = [("running", f"{batch:,.0f} of {slots:,.0f} slots"), ("KV cache use", f"{use:.0%}")]
    if evidence.num_waiting is not None:
        numbers.insert(1, ("waiting", f"{evidence.num_waiting:,.0f}"))
    return Finding(
        severity="problem",
        title="the batch is too small: max_num_seqs is the limit, not memory",
        numbers=tuple(numbers),
        why="Requests wait for a slot while more than half of the KV cache is empty. A decode step costs nearly the "
        "same for more sequences until the device is bound by compute.",
        advice=(
            Advice(
                text=f"raise max_num_seqs from {slots:,.0f} to {value:,}, which would use about "
                f"{min(TARGET_KV_USE, use * value / slots):.0%} of the cache",
                certainty="rule of thumb" if gain is None else "predicted",
                setting="max_num_seqs",
                value=value,
                gain=gain,
                why="" if gain is None else "decode steps of both sizes by plan's roofline",
            ),
        ),
    )


def recorded_slots_full(evidence: Evidence) -> Finding | None:
    """A record has no gauges. If more is submitted than there are slots, they are full until the end of the run, unless
    blocks or prompts hold it back."""
    slots, batch, size = evidence.number("max_num_seqs"), evidence.mean_batch, evidence.cache_tokens
    submitted = num_submitted(evidence)
    if not slots or batch is None or not size or submitted is None or not has_known_lengths(evidence):
        return None
    need = tokens_per_sequence(evidence) / size  # of the cache, one sequence at its end
    is_busy = batch >= MIN_BUSY_SHARE * slots or batch > slots - 1
    if submitted < 2 * slots or not is_busy or slots * need >= LOW_KV_USE:
        return None
    if is_preempting(evidence) or is_prefill_bound(evidence):
        return None
    # As many as are submitted, as the cache holds, and as the device computes at its full rate.
    full_rate = CPU_FULL_RATE_SEQS if evidence.is_on_cpu else GPU_MIN_FULL_RATE_SEQS
    value = int(min(submitted, MAX_GROWTH * slots, TARGET_KV_USE / need, full_rate))
    gain = batch_gain(evidence, batch, batch * value / slots)
    if value <= slots or (gain is not None and gain < MIN_BATCH_GAIN):
        return None
    return Finding(
        severity="problem",
        title="the batch is too small: max_num_seqs is the limit, not memory",
        numbers=(
            ("sequences per step", f"{batch:,.1f} of {slots:,.0f} slots"),
            ("requests submitted at a time", f"{submitted:,.0f}"),
            ("cache that full slots need at their end", f"{slots * need:.0%}"),
        ),
        why="Requests wait for a slot while more than half of the KV cache is empty. A decode step costs nearly the "
        "same for more sequences until the device is bound by compute.",
        advice=(
            Advice(
                text=f"raise max_num_seqs from {slots:,.0f} to {value:,}, or leave it out: it is then chosen by device "
                "and memory",
                certainty="rule of thumb" if gain is None else "predicted",
                setting="max_num_seqs",
                value=value,
                gain=gain,
                why="" if gain is None else "decode steps of both sizes by plan's roofline",
            ),
        ),
    )


def too_few_requests(evidence: Evidence) -> Finding | None:
    slots, batch = evidence.number("max_num_seqs"), evidence.mean_batch
    if not slots or batch is None or batch <= 0 or batch >= MIN_SLOT_SHARE * slots or is_backed_up(evidence):
        return None
    if is_client_bound(evidence) or _is_starved(evidence):
        return None  # the small batch is a consequence
    if evidence.num_running is None and is_prefill_bound(evidence):
        return None  # steps that are full of prompts sample few tokens
    larger = min(slots, MORE_LOAD * batch)
    gain = batch_gain(evidence, batch, larger)
    return Finding(
        severity="problem" if evidence.source in ("offline", "job") else "limit",
        title="the load is too small to fill a batch",
        numbers=(("sequences per step", f"{batch:,.1f} of {slots:,.0f} slots"),),
        why="No request waits and most slots are empty: the engine could do more than it is asked for. These figures "
        "say little about its throughput.",
        advice=(
            Advice(
                text=f"send more at once: {larger:,.0f} sequences in flight instead of {batch:,.0f}",
                certainty="rule of thumb" if gain is None else "predicted",
                gain=gain,
                why="" if gain is None else "decode steps of both sizes by plan's roofline",
            ),
        ),
    )


def _is_starved(evidence: Evidence) -> bool:
    """Whether the job itself says that something else keeps the slots empty."""
    seconds = evidence.limited_by_seconds or {}
    other = sum(seconds.get(limit, 0.0) for limit in ("reading", "disk", "host", "cache"))
    return other >= MIN_LIMITED_SHARE * max(1e-9, sum(seconds.values()))


RULES = (
    Rule(
        id="slots-full",
        title="too small a batch: slots",
        guide="A1, B4",
        threshold=f"{FULL_SLOTS_SHARE:.0%} or all but one of the slots busy, requests waiting, cache use under "
        f"{LOW_KV_USE:.0%}",
        check=slots_full,
        needs=("mean_batch", "kv_use", "[max_num_seqs]"),
        sources=("live", "job"),
        limit="slots",
    ),
    Rule(
        id="slots-recorded",
        title="too small a batch: slots of a benchmark",
        guide="A1, B4",
        threshold=f"2 requests at a time per slot or more, {MIN_BUSY_SHARE:.0%} or all but one of the slots busy, "
        f"which need under {LOW_KV_USE:.0%} of the cache at their end; fewer than {CPU_FULL_RATE_SEQS} slots on a CPU, "
        f"{GPU_MIN_FULL_RATE_SEQS} on a GPU",
        check=recorded_slots_full,
        needs=("mean_batch", "[max_num_seqs]"),
        sources=("offline", "online"),
        limit="slots",
    ),
    Rule(
        id="small-load",
        title="too small a batch: load",
        guide="B2, B4",
        threshold=f"under {MIN_SLOT_SHARE:.0%} of slots busy and nothing waiting",
        check=too_few_requests,
        needs=("mean_batch", "[max_num_seqs]"),
        sources=MEASURED,
        limit="load",
    ),
)
