"""The share of memory that an engine gets, and what fits into it."""

from __future__ import annotations

from headrace.doctor.estimates import TARGET_KV_USE, batch_gain, has_known_lengths, memory_of, tokens_per_sequence
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import Advice, Finding, Rule
from headrace.doctor.rules.cache import full, narrower_cache, preempting
from headrace.engine.memory_budget import GPU_MEMORY_SHARE
from headrace.engine.setting_warnings import MAX_MEMORY_SHARE

MIN_SHARE, MAX_SHARE = 0.85, MAX_MEMORY_SHARE  # the guides' (A3)
ROOM = 1.0  # of max_num_seqs x length: less cache than this cannot hold all slots


def _share(evidence: Evidence) -> float | None:
    """The memory share, where it decides the size of the cache."""
    share = evidence.number("gpu_memory_utilization")
    sized = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
    if evidence.is_on_cpu or share is None or any(evidence.settings.get(name) is not None for name in sized):
        return None
    return share if 0 < share <= 1 else None


def share_low(evidence: Evidence) -> Finding | None:
    share = _share(evidence)
    if share is None or share >= MIN_SHARE:
        return None
    is_needed = bool(preempting(evidence) or full(evidence)) or not evidence.is_measured
    now, then = memory_of(evidence), memory_of(evidence, share=GPU_MEMORY_SHARE)
    numbers = [("gpu_memory_utilization", f"{share:g} (guides: {MIN_SHARE:g} to {MAX_SHARE:g})")]
    gain = None
    if now is not None and then is not None and now.fits:
        numbers.append(("KV cache", f"{now.cache_tokens:,} tokens; with {GPU_MEMORY_SHARE:g}: {then.cache_tokens:,}"))
        each = tokens_per_sequence(evidence)
        slots = evidence.number("max_num_seqs") or float("inf")
        before, after = (min(slots, float(memory.concurrency(each))) for memory in (now, then))
        gain = batch_gain(evidence, before, after) if is_needed else None
    return Finding(
        severity="problem" if is_needed else "note",
        title="the memory share is low",
        numbers=tuple(numbers),
        why="The rest of the GPU's memory stays empty. "
        + (
            "More of it is more KV cache, and so a larger batch."
            if is_needed
            else "The cache was not full, so nothing is lost under this load."
        ),
        advice=(
            Advice(
                text=f"raise gpu_memory_utilization to {GPU_MEMORY_SHARE:g}, unless another process needs the memory",
                certainty="rule of thumb" if gain is None else "predicted",
                setting="gpu_memory_utilization",
                value=GPU_MEMORY_SHARE,
                gain=gain,
                why="" if gain is None else "the batches that fit, by plan's roofline",
            ),
        ),
    )


def share_high(evidence: Evidence) -> Finding | None:
    share = _share(evidence)
    if share is None or share <= MAX_SHARE:
        return None
    numbers = [("gpu_memory_utilization", f"{share:g} (guides: {MIN_SHARE:g} to {MAX_SHARE:g})")]
    if evidence.gpu is not None:
        left = (1 - share) * evidence.gpu.memory_bytes / 2**30
        numbers.append(("left for everything else", f"{left:.1f} GiB of {evidence.gpu.title}"))
    return Finding(
        severity="problem",
        title="the memory share is high",
        numbers=tuple(numbers),
        why="What is left must hold the CUDA context, fragments and peaks that were not measured at start. An "
        "out-of-memory error under load ends all requests, for a few percent more cache.",
        advice=(
            Advice(
                text=f"lower gpu_memory_utilization to {GPU_MEMORY_SHARE:g}",
                certainty="rule of thumb",
                setting="gpu_memory_utilization",
                value=GPU_MEMORY_SHARE,
            ),
        ),
    )


def does_not_fit(evidence: Evidence) -> Finding | None:
    memory = memory_of(evidence)
    if memory is None:
        return None
    if not memory.fits:
        return Finding(
            severity="mistake",
            title="the model does not fit",
            numbers=(
                ("weights", f"{memory.weights / 2**30:,.1f} GiB per GPU"),
                ("may be used", f"{memory.allowed / 2**30:,.1f} GiB"),
                ("missing", f"{memory.shortfall / 2**30:,.1f} GiB"),
            ),
            why="Weights, the largest step and CUDA graphs need more memory than the engine may use.",
            advice=(Advice(text="'headrace plan' lists formats and GPUs on which it fits", certainty="predicted"),),
        )
    longest = evidence.number("max_model_len")
    if longest is not None and longest > memory.cache_tokens + 1:
        or_fp8 = "" if evidence.has_fp8_cache else ", or use kv_cache_dtype fp8"
        return Finding(
            severity="mistake",
            title="max_model_len is longer than the KV cache",
            numbers=(("max_model_len", f"{longest:,.0f}"), ("KV cache", f"{memory.cache_tokens:,} tokens")),
            why="The engine refuses to start: one sequence of this length could never finish.",
            advice=(
                Advice(
                    text=f"lower max_model_len to {memory.cache_tokens:,} or less{or_fp8}",
                    certainty="predicted",
                    setting="max_model_len",
                    value=memory.cache_tokens,
                ),
            ),
        )
    return None


def slots_over_cache(evidence: Evidence) -> Finding | None:
    slots, memory = evidence.number("max_num_seqs"), memory_of(evidence)
    if slots is None or "max_num_seqs" not in evidence.given or memory is None or not memory.fits:
        return None
    each = tokens_per_sequence(evidence)
    held = memory.concurrency(each)
    if held >= ROOM * slots:
        return None
    value = max(1, int(TARGET_KV_USE * held))
    assumed = "" if has_known_lengths(evidence) else " (assumed; --input-len and --output-len set it)"
    return Finding(
        severity="problem",
        title="max_num_seqs is more than the KV cache holds",
        numbers=(
            ("max_num_seqs", f"{slots:,.0f}"),
            ("KV cache", f"{memory.cache_tokens:,} tokens"),
            ("tokens per sequence", f"{each:,.0f}{assumed}"),
            ("sequences that fit", f"{held:,}"),
        ),
        why="Sequences are started that the cache cannot hold to their end: they are preempted and computed again.",
        advice=(
            Advice(
                text=f"lower max_num_seqs to {value:,}",
                certainty="predicted" if has_known_lengths(evidence) else "rule of thumb",
                setting="max_num_seqs",
                value=value,
            ),
            *narrower_cache(evidence),
        ),
    )


RULES = (
    Rule(
        id="memory-low",
        title="memory share too low",
        guide="A3",
        threshold=f"gpu_memory_utilization under {MIN_SHARE:g}; a problem if the cache is full or nothing runs yet",
        check=share_low,
        needs=("[gpu_memory_utilization]",),
    ),
    Rule(
        id="memory-high",
        title="memory share too high",
        guide="A3",
        threshold=f"gpu_memory_utilization over {MAX_SHARE:g}",
        check=share_high,
        needs=("[gpu_memory_utilization]",),
    ),
    Rule(
        id="fit",
        title="model or context does not fit",
        guide="D1",
        threshold="weights, steps and one sequence against the memory share, by plan",
        check=does_not_fit,
        needs=("model", "gpu"),
        sources=("command",),
    ),
    Rule(
        id="slots-over-cache",
        title="more slots than the cache holds",
        guide="A1, D1",
        threshold="max_num_seqs times tokens per sequence against the cache, by plan",
        check=slots_over_cache,
        needs=("model", "gpu"),
        sources=("command",),
    ),
)
