"""Features that do not pay for this model or workload."""

from __future__ import annotations

from math import ceil

from headrace.doctor.estimates import memory_of, replicas_gain
from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import MEASURED, Advice, Finding, Rule

MIN_QUERIED_TOKENS = 10_000  # of the prefix cache, before its hits are judged
MIN_HIT_SHARE = 0.01
SHORT_PROMPT = 512  # tokens
MIN_PARALLEL_PARAMS = 13e9  # the guides' bound for tensor parallelism (A6)
MIN_ACCEPTANCE = 0.4  # of draft tokens; below it, most of the draft's work is thrown away
MIN_DRAFT_TOKENS = 1_000
EAGER_GAIN = 0.35  # at batch 1, as guides report it (A10); less with larger batches


def useless_prefixes(evidence: Evidence) -> Finding | None:
    queried, share = evidence.prefix_queried_tokens, evidence.prefix_hit_share
    if queried is None or share is None or queried < MIN_QUERIED_TOKENS or share >= MIN_HIT_SHARE:
        return None
    if evidence.settings.get("enable_prefix_caching") is False:
        return None
    keys = (
        " Different API keys do not share prefixes unless --no-cache-salt-per-key is set."
        if evidence.engine == "headrace"
        else ""
    )
    return Finding(
        severity="note",
        title="prefix caching is on and prompts share no prefixes",
        numbers=(("prefix cache hits", f"{share:.2%} of {queried:,.0f} prompt tokens"),),
        why="A prefix is shared only from the first token on, in whole blocks. A time, a name or an id at the start of "
        f"the prompt ends it.{keys}",
        advice=(
            Advice(
                text="put the shared system prompt first and what changes last; if nothing is shared, leave it as it "
                "is: unused prefix caching costs next to nothing",
                certainty="rule of thumb",
            ),
        ),
    )


def chunked_short(evidence: Evidence) -> Finding | None:
    """Finds chunked prefill that splits short prompts."""
    if evidence.settings.get("enable_chunked_prefill") is not True:
        return None
    longest = evidence.longest_prompts if evidence.longest_prompts is not None else evidence.prompt_len
    budget = evidence.number("max_num_batched_tokens")
    if longest is None or longest > SHORT_PROMPT or budget is None or budget <= 0:
        return None
    which = "p95" if evidence.longest_prompts is not None else "mean"
    numbers = (
        (f"prompt length, {which}", f"{longest:,.0f} tokens"),
        ("max_num_batched_tokens", f"{budget:,.0f}"),
    )
    if budget < longest:
        value = 2048 if not evidence.is_on_cpu else 512
        return Finding(
            severity="problem",
            title="chunked prefill splits short prompts",
            numbers=numbers,
            why=f"A prompt of this length takes {ceil(longest / budget)} steps, each with the cost of a whole step, "
            "and its first token waits for all of them.",
            advice=(
                Advice(
                    text=f"raise max_num_batched_tokens to {max(value, int(2 * longest)):,}",
                    certainty="rule of thumb",
                    setting="max_num_batched_tokens",
                    value=max(value, int(2 * longest)),
                ),
            ),
        )
    if "enable_chunked_prefill" not in evidence.given:
        return None
    return Finding(
        severity="note",
        title="chunked prefill was asked for, and prompts are too short to be split",
        numbers=numbers,
        why="Prompts that fit into a step are not split, so there is little to gain or to lose. Guides report an "
        "overhead on short prompts; it was not measured here.",
        advice=(
            Advice(
                text="compare both: headrace bench sweep with enable_chunked_prefill on and off",
                certainty="rule of thumb",
                setting="enable_chunked_prefill",
                value=False,
            ),
        ),
    )


def small_and_parallel(evidence: Evidence) -> Finding | None:
    size = evidence.number("tensor_parallel_size")
    model = evidence.model
    if size is None or size < 2 or model is None or model.num_params >= MIN_PARALLEL_PARAMS:
        return None
    memory = memory_of(evidence, tensor=1)
    if memory is not None and not memory.fits:
        return None  # it is needed
    gain = replicas_gain(evidence, int(size))
    is_faster = gain is None or gain > 0
    numbers = [
        ("tensor_parallel_size", f"{size:.0f}"),
        ("parameters", f"{model.num_params / 1e9:.1f} B (guides: from {MIN_PARALLEL_PARAMS / 1e9:.0f} B on)"),
    ]
    if memory is not None:
        numbers.append(("on one GPU", f"{memory.cache_tokens:,} tokens of KV cache beside the weights"))
    if not is_faster:
        return Finding(
            severity="note",
            title="tensor parallelism on a small model, where plan predicts no loss",
            numbers=(*numbers, ("one engine per GPU", f"about {1 + (gain or 0.0):.2f}x")),
            why="The guides' rule of thumb says one engine per GPU. Plan's model of these GPUs says otherwise: their "
            "larger common cache, or their fast links, outweigh the all-reduces. Measure both.",
        )
    return Finding(
        severity="problem",
        title="tensor parallelism on a small model",
        numbers=tuple(numbers),
        why="Every layer ends in two all-reduces between the GPUs. A small model has too little work per layer to hide "
        "them, so one engine per GPU gives more throughput. Tensor parallelism still shortens the time per token.",
        advice=(
            Advice(
                text=f"tensor_parallel_size 1, and {size:.0f} engines behind a balancer",
                certainty="rule of thumb" if gain is None else "predicted",
                setting="tensor_parallel_size",
                value=1,
                gain=gain,
                why="" if gain is None else "both layouts on the same GPUs by plan; not measured on several GPUs",
            ),
        ),
    )


def poor_drafts(evidence: Evidence) -> Finding | None:
    share, drafts = evidence.acceptance, evidence.draft_tokens
    if share is None or drafts is None or drafts < MIN_DRAFT_TOKENS or share >= MIN_ACCEPTANCE:
        return None
    return Finding(
        severity="problem",
        title="speculative decoding with poor acceptance",
        numbers=(("accepted", f"{share:.0%} of {drafts:,.0f} draft tokens"),),
        why="Rejected draft tokens are computed and thrown away. With large batches the device has no spare compute "
        "for them, and decoding gets slower than without drafts.",
        advice=(
            Advice(
                text="turn speculative decoding off, or use fewer draft tokens or a draft model of this domain; "
                "compare both under your load",
                certainty="rule of thumb",
                setting="speculative_config",
            ),
        ),
    )


def eager(evidence: Evidence) -> Finding | None:
    if evidence.settings.get("enforce_eager") is not True or evidence.engine != "vllm" or evidence.is_on_cpu:
        return None
    return Finding(
        severity="problem",
        title="CUDA graphs are turned off",
        numbers=(("enforce_eager", "true"),),
        why="Each kernel of each layer is launched by the host. For small models and batches that takes longer than "
        "the kernels.",
        advice=(
            Advice(
                text="leave out --enforce-eager; it saves start-up time and a little memory only",
                certainty="rule of thumb",
                setting="enforce_eager",
                value=False,
                gain=EAGER_GAIN,
                why="at batch 1, as guides report it; not measured here",
            ),
        ),
    )


def _is_measured_headrace(evidence: Evidence) -> bool:
    """It runs on one device. A planned command may still ask for more."""
    return evidence.engine == "headrace" and evidence.is_measured


RULES = (
    Rule(
        id="prefix-unused",
        title="prefix caching without shared prefixes",
        guide="A4, D5",
        threshold=f"hits under {MIN_HIT_SHARE:.0%} of {MIN_QUERIED_TOKENS:,} or more prompt tokens",
        check=useless_prefixes,
        needs=("prefix_hit_share",),
        sources=MEASURED,
    ),
    Rule(
        id="chunked-short",
        title="chunked prefill on short prompts",
        guide="A2, D3",
        threshold=f"prompts of up to {SHORT_PROMPT} tokens; a problem if the token budget is smaller than they are",
        check=chunked_short,
        needs=("prompt_len", "[enable_chunked_prefill]", "[max_num_batched_tokens]"),
    ),
    Rule(
        id="tensor-parallel",
        title="tensor parallelism on a small model",
        guide="A6, D2",
        threshold=f"2 or more GPUs for under {MIN_PARALLEL_PARAMS / 1e9:.0f} B parameters that fit on one",
        check=small_and_parallel,
        needs=("model", "[tensor_parallel_size]"),
        is_moot=lambda seen: seen.number("tensor_parallel_size") == 1 or _is_measured_headrace(seen),
    ),
    Rule(
        id="drafts",
        title="speculative decoding with poor acceptance",
        guide="A8, D6",
        threshold=f"under {MIN_ACCEPTANCE:.0%} of {MIN_DRAFT_TOKENS:,} or more draft tokens accepted",
        check=poor_drafts,
        needs=("acceptance",),
        sources=("live",),
        is_moot=lambda seen: not seen.draft_tokens,  # vLLM exports them only with speculative decoding
    ),
    Rule(
        id="eager",
        title="CUDA graphs turned off",
        guide="A10",
        threshold="--enforce-eager on a GPU",
        check=eager,
        sources=("offline", "online", "command"),
    ),
)
