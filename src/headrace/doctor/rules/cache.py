"""The KV cache: full and preempting, or full and holding requests back."""

from __future__ import annotations

from math import ceil

from headrace.doctor.estimates import TARGET_KV_USE, batch_gain, has_known_lengths, tokens_per_sequence
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import MEASURED, Advice, Finding, Rule
from headrace.doctor.rules.load import MIN_LIMITED_SHARE, limited_share
from headrace.doctor.rules.prefill import FULL_STEP_SHARE, step_fill
from headrace.engine.memory_budget import GPU_MEMORY_SHARE
from headrace.jobs.status.bottleneck import KV_USE

MIN_RECOMPUTED_SHARE = 0.01  # of computed tokens
MIN_PREEMPTED_SHARE = 0.01  # preemptions per request, where tokens computed again are not counted
HELD_KV_USE = 0.5  # from which on an engine may hold requests back: it keeps the rest for answers that still grow
MAX_HELD_SLOT_SHARE = 0.75  # of the slots; the end of an offline run leaves some empty too
MIN_WAITING_SHARE = 0.05  # of the slots: fewer may have just arrived
MIN_EVICTED_TOKENS = 10_000
MIN_EVICTED_SHARE = 0.5  # of the prompt tokens computed: the cache is full, and each new prompt evicts another
MAX_EVICTED_HIT_SHARE = 0.8  # with more hits there is little left to gain
MIN_PREEMPTIONS_PER_S = 0.1  # where requests are not counted either; the guides' stricter alert


def narrower_cache(evidence: Evidence) -> tuple[Advice, ...]:
    """A cache in FP8, unless it is in FP8 already."""
    if evidence.has_fp8_cache:
        return ()
    times = "four times" if evidence.cache_dtype == "float32" else "twice"
    text = f"kv_cache_dtype fp8 holds {times} as many tokens; answers change slightly (A9)"
    return (Advice(text=text, certainty="certain", setting="kv_cache_dtype", value="fp8"),)


def is_preempting(evidence: Evidence) -> bool:
    return _preemption_numbers(evidence) is not None


def _preemption_numbers(evidence: Evidence) -> tuple[tuple[str, str], float | None] | None:
    """What shows that preemptions matter, and the share of work that they cost if it is known."""
    count = evidence.num_preemptions
    if not count:
        return None
    computed = (evidence.computed_prompt_tokens or 0.0) + (evidence.output_tokens or 0.0)
    if evidence.recomputed_tokens is not None and computed:
        share = evidence.recomputed_tokens / (computed + evidence.recomputed_tokens)
        shown = ("tokens computed again", f"{evidence.recomputed_tokens:,.0f} ({share:.1%} of all computed)")
        return (shown, share) if share >= MIN_RECOMPUTED_SHARE else None
    if evidence.num_requests:
        each = count / evidence.num_requests
        return (("preemptions per request", f"{each:.2f}"), None) if each >= MIN_PREEMPTED_SHARE else None
    if evidence.seconds:
        rate = count / evidence.seconds
        return (("preemptions per second", f"{rate:.2f}"), None) if rate >= MIN_PREEMPTIONS_PER_S else None
    return None


def preempting(evidence: Evidence) -> Finding | None:
    found = _preemption_numbers(evidence)
    if found is None:
        return None
    shown, share = found
    numbers = [("preemptions", f"{evidence.num_preemptions:,.0f}"), shown]
    if evidence.kv_use is not None:
        numbers.append(("KV cache use", f"{evidence.kv_use:.0%}"))
    if evidence.num_running is not None:
        numbers.append(("running", f"{evidence.num_running:,.0f}"))
    gain = None if share is None else share / (1 - share)
    return Finding(
        severity="problem",
        title="the KV cache is full and sequences are preempted",
        numbers=tuple(numbers),
        why="More sequences were started than the cache holds to their end. The newest are thrown out and computed "
        "again later: that work is lost, and their clients wait.",
        advice=(*_fewer(evidence, gain), *_more_cache(evidence)),
    )


def _fewer(evidence: Evidence, gain: float | None) -> list[Advice]:
    """As many sequences as the cache holds to their end."""
    value = None
    if evidence.cache_tokens is not None and evidence.mean_context is not None:
        value = int(TARGET_KV_USE * evidence.cache_tokens / tokens_per_sequence(evidence))
    elif evidence.mean_batch is not None:
        value = int(TARGET_KV_USE * evidence.mean_batch)
    slots = evidence.number("max_num_seqs")
    why = "at most: nothing would be computed twice" if gain is not None else ""
    advice = []
    if value and (slots is None or value < slots):
        advice.append(
            Advice(
                text=f"lower max_num_seqs to {value:,}",
                certainty="bound" if gain is not None else "rule of thumb",
                setting="max_num_seqs",
                value=value,
                gain=gain,
                why=why,
            )
        )
    if evidence.engine == "headrace" and evidence.settings.get("capacity_policy") != "guaranteed_no_evict":
        advice.append(
            Advice(
                text="capacity_policy guaranteed_no_evict starts only what can finish (A11)",
                certainty="bound" if gain is not None else "certain",
                setting="capacity_policy",
                value="guaranteed_no_evict",
                gain=gain,
                why=why,
            )
        )
    return advice


def _more_cache(evidence: Evidence) -> list[Advice]:
    advice = []
    num_blocks = evidence.number("num_gpu_blocks_override")
    if num_blocks:
        advice.append(
            Advice(
                text=f"raise num_gpu_blocks_override from {num_blocks:,.0f} to {2 * num_blocks:,.0f}, or leave it out: "
                "the cache is then sized by memory",
                certainty="certain",
                setting="num_gpu_blocks_override",
                value=int(2 * num_blocks),
            )
        )
    share = evidence.number("gpu_memory_utilization")
    if not evidence.is_on_cpu and share is not None and share < GPU_MEMORY_SHARE:
        advice.append(
            Advice(
                text=f"raise gpu_memory_utilization from {share:g} to {GPU_MEMORY_SHARE:g}: more cache (A3). The "
                "guides lower it when memory overflows, which is right for out-of-memory errors and wrong here",
                certainty="rule of thumb",
                setting="gpu_memory_utilization",
                value=GPU_MEMORY_SHARE,
            )
        )
    advice.extend(narrower_cache(evidence))
    return advice


def full(evidence: Evidence) -> Finding | None:
    """Full, without preemptions: requests wait although slots are free."""
    use, waiting, batch = evidence.kv_use, evidence.num_waiting, evidence.mean_batch
    if use is None or not waiting or is_preempting(evidence) or (use < KV_USE and not _holds_back(evidence)):
        return None
    slots = evidence.number("max_num_seqs")
    if slots is not None and batch is not None and batch >= 0.95 * slots:
        return None  # slots are as full as the cache
    numbers = [("KV cache use", f"{use:.0%}"), ("waiting", f"{waiting:,.0f}")]
    if batch is not None:
        numbers.append(("running", f"{batch:,.0f}" + (f" of {slots:,.0f} slots" if slots else "")))
    at_end = _share_at_end(evidence)
    if at_end is not None:
        numbers.append(("cache that these need at their end", f"{at_end:.0%}"))
    advice = _more_cache(evidence)
    gain = None if batch is None else batch_gain(evidence, batch, min(2 * batch, slots or 2 * batch))
    if gain is not None and advice:
        last = advice[-1]
        if last.setting == "kv_cache_dtype":
            why = f"decode with {ceil(2 * (batch or 0)):,} sequences, by plan's roofline"
            advice[-1] = Advice(
                text=last.text, certainty="predicted", setting=last.setting, value=last.value, gain=gain, why=why
            )
    return Finding(
        severity="problem",
        title="the KV cache limits the batch",
        numbers=tuple(numbers),
        why="Requests wait for cache blocks while slots are free. More slots would not help.",
        advice=(
            *advice,
            Advice(text="a smaller max_model_len does not help; shorter prompts and answers do", certainty="certain"),
        ),
    )


def _holds_back(evidence: Evidence) -> bool:
    """Whether requests can only wait for blocks that are kept for running ones: slots are free, steps are not full."""
    slots, filled = evidence.number("max_num_seqs"), step_fill(evidence)
    if slots is None or filled is None or filled >= FULL_STEP_SHARE:
        return False
    is_waiting = (evidence.num_waiting or 0.0) >= max(1.0, MIN_WAITING_SHARE * slots)
    return is_waiting and max(evidence.kv_use or 0.0, _share_at_end(evidence) or 0.0) >= HELD_KV_USE


def _share_at_end(evidence: Evidence) -> float | None:
    """The share of the cache that running sequences need at their end. Use between two steps may be far below it."""
    batch, size = evidence.mean_batch, evidence.cache_tokens
    if batch is None or not size or not has_known_lengths(evidence):
        return None
    return batch * tokens_per_sequence(evidence) / size


def offline_full(evidence: Evidence) -> Finding | None:
    """An offline run submits all it has: slots that stay empty wait for something, and here for blocks."""
    slots, batch, at_end = evidence.number("max_num_seqs"), evidence.mean_batch, _share_at_end(evidence)
    if not slots or batch is None or at_end is None or evidence.num_requests is None or is_preempting(evidence):
        return None
    is_backed_up = evidence.num_requests >= 2 * slots
    is_full = (step_fill(evidence) or 0.0) >= FULL_STEP_SHARE
    if not is_backed_up or is_full or batch >= MAX_HELD_SLOT_SHARE * slots or at_end < HELD_KV_USE:
        return None
    return Finding(
        severity="problem",
        title="the KV cache limits the batch",
        numbers=(
            ("sequences per step", f"{batch:,.1f} of {slots:,.0f} slots"),
            ("requests", f"{evidence.num_requests:,.0f}, all submitted at once"),
            ("cache that these need at their end", f"{at_end:.0%}"),
        ),
        why="Requests wait for cache blocks while slots are free. More slots would not help.",
        advice=tuple(_more_cache(evidence)),
    )


def job_full(evidence: Evidence) -> Finding | None:
    """A job knows for how long its cache was the bottleneck, also if its forecast avoided preemptions."""
    share = limited_share(evidence, "cache")
    if share < MIN_LIMITED_SHARE or is_preempting(evidence):
        return None
    numbers = [("time limited by the cache", f"{share:.0%}")]
    if evidence.kv_use is not None:
        numbers.append(("KV cache use, peak", f"{evidence.kv_use:.0%}"))
    return Finding(
        severity="problem",
        title="the KV cache limits the job's batch",
        numbers=tuple(numbers),
        why="Lines wait for cache blocks while slots are free. More slots would not help.",
        advice=tuple(_more_cache(evidence)),
    )


def evicting(evidence: Evidence) -> Finding | None:
    """Cached prefixes are evicted as fast as prompts are computed: later prompts may miss what was there."""
    evicted, share, computed = evidence.evicted_tokens, evidence.prefix_hit_share, evidence.computed_prompt_tokens
    if evicted is None or share is None or computed is None or evidence.settings.get("kv_offload_gib"):
        return None
    if evicted < MIN_EVICTED_TOKENS or evicted < MIN_EVICTED_SHARE * computed or share >= MAX_EVICTED_HIT_SHARE:
        return None
    host = Advice(
        text="set kv_offload_gib to host memory that can be spared, such as 16: evicted prefixes come back from there",
        certainty="rule of thumb",
        setting="kv_offload_gib",
        value=16,
    )
    disk = Advice(
        text="kv_offload_path keeps them on a local disk too, and over a restart; it helps where the disk reads faster "
        "than the model computes",
        certainty="rule of thumb",
    )
    return Finding(
        severity="note",
        title="cached prefixes are evicted",
        numbers=(
            ("tokens evicted", f"{evicted:,.0f}, {evicted / max(1.0, computed):.0%} of the prompt tokens computed"),
            ("prefix cache hits", f"{share:.0%} of prompt tokens"),
        ),
        why="The KV cache is smaller than the prefixes of this traffic. A prompt whose prefix was evicted computes it "
        "again. If prefixes never come back, nothing is lost.",
        advice=(disk,) if evidence.is_on_cpu else (host, disk),
    )


RULES = (
    Rule(
        id="cache-preempting",
        title="cache full and preempting",
        guide="C3, D1",
        threshold=f"{MIN_RECOMPUTED_SHARE:.0%} of tokens computed again, or {MIN_PREEMPTED_SHARE:.0%} of requests "
        f"preempted, or {MIN_PREEMPTIONS_PER_S:g} preemptions/s",
        check=preempting,
        needs=("num_preemptions",),
        sources=MEASURED,
        limit="cache",
        is_essential=True,
    ),
    Rule(
        id="cache-full",
        title="cache full, requests wait",
        guide="C2",
        threshold=f"requests waiting and slots free, with a cache use of {KV_USE:.0%}, or {HELD_KV_USE:.0%} (now, "
        f"or when running ones end) in steps under {FULL_STEP_SHARE:.0%} full",
        check=full,
        needs=("kv_use", "num_waiting"),
        sources=("live",),
        limit="cache",
    ),
    Rule(
        id="offline-cache",
        title="offline run limited by its cache",
        guide="C2",
        threshold=f"2 requests per slot or more, {MAX_HELD_SLOT_SHARE:.0%} of slots busy or less, which need "
        f"{HELD_KV_USE:.0%} of the cache at their end, in steps under {FULL_STEP_SHARE:.0%} full",
        check=offline_full,
        needs=("mean_batch", "[max_num_seqs]"),
        sources=("offline",),
        limit="cache",
    ),
    Rule(
        id="cache-evicting",
        title="cached prefixes are evicted",
        guide="",
        threshold=f"{MIN_EVICTED_TOKENS:,} tokens evicted or more, {MIN_EVICTED_SHARE:.0%} of the prompt tokens "
        f"computed, with hits under {MAX_EVICTED_HIT_SHARE:.0%}, and no tiers",
        check=evicting,
        needs=("evicted_tokens", "prefix_hit_share"),
        is_moot=lambda evidence: evidence.engine != "headrace",
        sources=("live",),
    ),
    Rule(
        id="job-cache",
        title="job limited by its cache",
        guide="C2",
        threshold=f"{MIN_LIMITED_SHARE:.0%} of the job's time limited by the cache",
        check=job_full,
        needs=("limited_by_seconds",),
        sources=("job",),
        limit="cache",
    ),
)
