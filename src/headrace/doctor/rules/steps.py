"""What the engine's steps are limited by: the host, prefill, decode; and the gaps between tokens."""

from __future__ import annotations

from dataclasses import replace

from headrace.doctor.estimates import DecodeStep, decode_seconds, decode_step, device_of
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import MEASURED, Advice, Finding, Rule
from headrace.doctor.rules.batch import too_few_requests
from headrace.doctor.rules.load import MIN_LIMITED_SHARE, is_client_bound, limited_share
from headrace.doctor.rules.prefill import FULL_STEP_SHARE, is_prefill_bound, prefill_share, step_fill
from headrace.jobs.status.bottleneck import HOST_SHARE, PROMPT_SHARE

USUAL_BUDGET = 8192  # tokens per step that guides ask for, and Headrace's default on a GPU
STALL_RATIO = 5.0  # p99 of inter-token latency against its median
MIN_STALL_S = 0.05
MIN_BUDGET, MIN_CPU_BUDGET = 512, 64  # tokens: steps of so few prompt tokens are short, so that they cause no stall
LONGEST_OVER_MEAN = 4.0  # where only the mean of prompt lengths is known
MIN_GPU_UTILIZATION = 0.85  # the guides' target (B3)


def host_bound(evidence: Evidence) -> Finding | None:
    share = evidence.host_share
    if share is None or share < HOST_SHARE or limited_share(evidence, "host") >= MIN_LIMITED_SHARE:
        return None  # a job says it by its own count
    numbers = [("host time", f"{share:.0%} of a step")]
    if evidence.num_steps and evidence.host_seconds is not None:
        numbers.append(("host time per step", f"{1e3 * evidence.host_seconds / evidence.num_steps:.2f} ms"))
    return Finding(
        severity="problem",
        title="the host is the bottleneck",
        numbers=tuple(numbers),
        why="Planning steps and handling results takes longer than the device needs for them: the device waits.",
        advice=(
            Advice(
                text="give the engine's process a core of its own, or a faster one; larger batches spread the cost of "
                "a step over more tokens",
                certainty="bound",
                gain=share / max(0.05, 1 - share),
                why="at most: host time would be hidden completely",
            ),
        ),
    )


def prefill_bound(evidence: Evidence) -> Finding | None:
    found = prefill_share(evidence)
    if found is None or not is_prefill_bound(evidence) or _is_idle(evidence):
        return None
    share, of_what = found
    filled, budget = step_fill(evidence), evidence.number("max_num_batched_tokens")
    numbers = [("prefill", f"{share:.0%} {of_what}")]
    if evidence.prompt_tokens_per_s is not None:
        numbers.append(("prompt tokens/s", f"{evidence.prompt_tokens_per_s:,.0f}"))
    if filled is not None:
        numbers.append(("steps", f"{min(1.0, filled):.0%} full"))
    advice = []
    has_state = evidence.settings.get("has_recurrent_state") is True  # then it cannot be turned on
    if evidence.settings.get("enable_prefix_caching") is False and not has_state:
        advice.append(
            Advice(
                text="turn on enable_prefix_caching; it helps if prompts share their first tokens (A4)",
                certainty="rule of thumb",
                setting="enable_prefix_caching",
                value=True,
            )
        )
    if budget is not None and budget < USUAL_BUDGET and (filled or 0) >= 0.9 and not evidence.is_on_cpu:
        advice.append(
            Advice(
                text=f"raise max_num_batched_tokens from {budget:,.0f} to {USUAL_BUDGET:,} (A1). Gaps between tokens "
                "of running answers get longer",
                certainty="rule of thumb",
                setting="max_num_batched_tokens",
                value=USUAL_BUDGET,
            )
        )
    advice += _fp8(evidence, "prefill")
    return Finding(
        severity="limit",
        title="prefill is the bottleneck",
        numbers=tuple(numbers),
        why="Computing prompts takes most of the time. It is bound by the device's FLOP/s, not by memory.",
        advice=tuple(advice),
    )


def decode_bound(evidence: Evidence) -> Finding | None:
    batch = evidence.mean_batch
    if not batch or evidence.prompt_share is None or is_prefill_bound(evidence) or _is_idle(evidence):
        return None
    numbers = [("sequences per step", f"{batch:,.0f}")]
    if evidence.output_tokens_per_s is not None:
        numbers.append(("generated tokens/s", f"{evidence.output_tokens_per_s:,.0f}"))
    step = decode_step(evidence, batch)
    if step is None:
        needs = evidence.missing(("model", "gpu")) if not evidence.is_on_cpu else ["the rates of this CPU"]
        return Finding(
            severity="limit",
            title="decode is the bottleneck",
            numbers=tuple(numbers),
            why="Whether memory or compute binds cannot be said: "
            f"{', '.join(needs) or 'prompt and answer lengths'} not known.",
        )
    numbers += [
        ("weights", f"{1e3 * step.weights_s:.2f} ms to read"),
        ("KV cache", f"{1e3 * step.cache_s:.2f} ms to read"),
        ("GEMMs", f"{1e3 * step.compute_s:.2f} ms to compute"),
    ]
    title, why = _side(step)
    advice = (*_fp8(evidence, "decode"), *(_fp8_cache(evidence) if step.is_bound_by_memory else ()))
    return Finding(severity="limit", title=title, numbers=tuple(numbers), why=why, advice=advice)


def _side(step: DecodeStep) -> tuple[str, str]:
    """Which side of the roofline binds, in words."""
    if not step.is_bound_by_memory:
        slower = "The batch is so large that GEMMs take longer than reading weights and cache"
        return "decode is bound by compute", f"{slower}: more sequences raise latency, not throughput."
    is_cache = step.cache_s > step.weights_s
    which = "KV cache" if is_cache else "weights"
    helps = "Shorter contexts or an FP8 cache help." if is_cache else "More sequences per step cost little."
    reads = f"A step must read at least this much, mostly {which}, and computes less than it reads in the same time."
    return "decode is bound by memory bandwidth", f"{reads} {helps}"


def _fp8(evidence: Evidence, what: str) -> list[Advice]:
    gpu = device_of(evidence)
    if gpu is None or gpu.fp8_rate is None or evidence.settings.get("quantization") not in (None, "None", "none"):
        return []
    if "quantization" not in evidence.settings:
        return []  # the weights may be quantized already
    gain = None
    if what == "prefill":
        gain = gpu.fp8_rate / gpu.bf16_rate - 1
    elif evidence.mean_batch:
        changed = replace(evidence, settings={**evidence.settings, "quantization": "fp8"})
        now, then = decode_seconds(evidence, evidence.mean_batch), decode_seconds(changed, evidence.mean_batch)
        gain = None if now is None or then is None else now / then - 1
    if gain is None:
        return []
    bound = what == "prefill"
    return [
        Advice(
            text="quantization fp8: half the bytes and twice the rate of GEMMs; answers change, so check their quality",
            certainty="bound" if bound else "predicted",
            setting="quantization",
            value="fp8",
            gain=gain,
            why="at most: the ratio of the GPU's rates" if bound else "decode steps of both by plan's roofline",
        )
    ]


def _fp8_cache(evidence: Evidence) -> list[Advice]:
    gpu, batch = device_of(evidence), evidence.mean_batch
    if gpu is None or gpu.fp8_rate is None or evidence.has_fp8_cache or not batch:
        return []
    changed = replace(evidence, settings={**evidence.settings, "kv_cache_dtype": "fp8"})
    now, then = decode_seconds(evidence, batch), decode_seconds(changed, batch)
    if now is None or then is None:
        return []
    return [
        Advice(
            text="kv_cache_dtype fp8: half the bytes of the cache to read; answers change slightly (A9)",
            certainty="predicted",
            setting="kv_cache_dtype",
            value="fp8",
            gain=now / then - 1,
            why="decode steps of both by plan's roofline",
        )
    ]


def _is_idle(evidence: Evidence) -> bool:
    return not (evidence.output_tokens or evidence.prompt_tokens)


def stalls(evidence: Evidence) -> Finding | None:
    """Gaps between tokens beside prompts. The guides' advice (A7) makes them longer."""
    median, worst = evidence.token_gap_p50_s, evidence.token_gap_p99_s
    if not median or worst is None or worst < MIN_STALL_S or worst < STALL_RATIO * median:
        return None
    if not evidence.computed_prompt_tokens or is_client_bound(evidence):
        return None
    budget = evidence.number("max_num_batched_tokens")
    chunked = evidence.settings.get("enable_chunked_prefill")
    smallest = MIN_CPU_BUDGET if evidence.is_on_cpu else MIN_BUDGET
    value = max(smallest, int(budget) // 4) if budget else None
    if chunked is not False and value is not None and budget is not None and value >= budget:
        return None  # steps are short already: something else causes the gaps
    if _most_prompt_tokens(evidence) < smallest:
        return None  # too few to make a step long
    advice = []
    if chunked is False:
        advice.append(
            Advice(
                text="turn on enable_chunked_prefill: without it, a whole prompt runs between two tokens (A2)",
                certainty="certain",
                setting="enable_chunked_prefill",
                value=True,
            )
        )
    elif value is not None and budget is not None:
        advice.append(
            Advice(
                text=f"lower max_num_batched_tokens from {budget:,.0f} to {value:,}: a step, and with it the gap, gets "
                "shorter; prompts take more steps",
                certainty="certain",
                setting="max_num_batched_tokens",
                value=value,
            )
        )
    else:
        advice.append(
            Advice(
                text="lower max_num_batched_tokens: a step, and with it the gap, gets shorter",
                certainty="certain",
                setting="max_num_batched_tokens",
            )
        )
    numbers = [
        ("inter-token latency, p50", f"{1e3 * median:.1f} ms"),
        ("inter-token latency, p99", f"{1e3 * worst:.1f} ms ({worst / median:.0f} times)"),
    ]
    if budget:
        numbers.append(("max_num_batched_tokens", f"{budget:,.0f}"))
    return Finding(
        severity="problem",
        title="answers stall while prompts are computed",
        numbers=tuple(numbers),
        why="Decoding sequences get one token per step, and a step that is full of prompt tokens takes long.",
        advice=tuple(advice),
        correction=A7_CORRECTION,
    )


def _most_prompt_tokens(evidence: Evidence) -> float:
    """About how many prompt tokens the fullest steps have: of one long prompt, or of several short ones."""
    longest = evidence.longest_prompts
    if longest is None:
        longest = LONGEST_OVER_MEAN * evidence.prompt_len if evidence.prompt_len is not None else float("inf")
    return max(longest, evidence.tokens_per_step or 0.0)


# Medians of benchmarks/results/budget-gaps-cpu.json: seconds of the worst gap by token budget.
A7_WORST_GAPS_S = {64: 1.1, 256: 4.2, 1024: 13.2, 2048: 23.4}
A7_CORRECTION = (
    "Guides say to raise max_num_batched_tokens to twice the longest prompt (A7). That is the wrong direction: every "
    "step decodes one token of each running sequence first and fills the rest with prompts, so the longest gap is the "
    "longest step, and a larger budget makes it longer. Measured with Headrace on two busy CPU cores, 8 answers beside "
    "a prompt of 1,500 tokens: the worst gap was "
    + ", ".join(f"{seconds:g} s with {budget:,}" for budget, seconds in A7_WORST_GAPS_S.items())
    + " (benchmarks/results/budget-gaps-cpu.json)."
)


def gpu_idle(evidence: Evidence) -> Finding | None:
    share = evidence.gpu_utilization
    if share is None or share >= MIN_GPU_UTILIZATION or evidence.is_on_cpu:
        return None
    if is_client_bound(evidence) or host_bound(evidence) or too_few_requests(evidence):
        return None  # the cause is named already
    return Finding(
        severity="problem",
        title="the GPU is idle part of the time, and no other rule says why",
        numbers=(("GPU utilisation", f"{share:.0%}"),),
        why="No kernel runs for part of the time although there is work. The host, the client or the start and the end "
        "of the run are likely.",
        advice=(
            Advice(
                text="headrace profile (or --url for a server) shows where a step's time goes",
                certainty="bound",
                gain=1 / max(0.05, share) - 1,
                why="at most: the GPU would never be idle",
            ),
        ),
    )


RULES = (
    Rule(
        id="host",
        title="host-bound",
        guide="A10, B6",
        threshold=f"{HOST_SHARE:.0%} of a step's time on the host",
        check=host_bound,
        needs=("host_share",),
        sources=MEASURED,
        limit="host",
    ),
    Rule(
        id="prefill",
        title="prefill-bound",
        guide="A1, B6",
        threshold=f"{PROMPT_SHARE:.0%} of the least time; GPU not known: of tokens, in steps "
        f"{FULL_STEP_SHARE:.0%} full",
        check=prefill_bound,
        needs=("prompt_share",),
        sources=MEASURED,
        limit="prefill",
        is_essential=True,
    ),
    Rule(
        id="decode",
        title="decode bound by memory or by compute",
        guide="B6",
        threshold="reading weights and cache against computing GEMMs, by the GPU's rates",
        check=decode_bound,
        needs=("prompt_share", "mean_batch"),
        sources=MEASURED,
        limit="decode",
        is_essential=True,
    ),
    Rule(
        id="stalls",
        title="answers stall beside prompts",
        guide="A7, D3",
        threshold=f"inter-token latency: p99 over {STALL_RATIO:.0f} times p50 and {1e3 * MIN_STALL_S:.0f} ms; a token "
        f"budget over {MIN_BUDGET} ({MIN_CPU_BUDGET} on a CPU), or prefill that is not chunked; prompts as long",
        check=stalls,
        needs=("token_gap_p50_s", "token_gap_p99_s"),
        sources=("live", "online"),
    ),
    Rule(
        id="gpu-idle",
        title="GPU idle without a known cause",
        guide="B3",
        threshold=f"utilisation under {MIN_GPU_UTILIZATION:.0%}",
        check=gpu_idle,
        needs=("gpu_utilization",),
        sources=("offline", "online"),
    ),
)
