"""Whether prefill takes most of the time."""

from __future__ import annotations

from headrace.doctor.estimates import decode_step, step_of_prompts
from headrace.doctor.evidence import Evidence
from headrace.jobs.status.bottleneck import PROMPT_SHARE

FULL_STEP_SHARE = 0.5  # of max_num_batched_tokens: steps with less are not full of prompts


def prefill_share(evidence: Evidence) -> tuple[float, str] | None:
    """The share of prefill, and of what: of a job's time by its own count, of the least time if the device is known,
    otherwise of computed tokens."""
    prefill_s, decode_s = ((evidence.limited_by_seconds or {}).get(name, 0.0) for name in ("prefill", "decode"))
    if prefill_s + decode_s > 0:
        return prefill_s / (prefill_s + decode_s), "of the job's time in steps"
    if evidence.prompt_share is None:
        return None
    batch, prompt = evidence.mean_batch, evidence.computed_prompt_tokens
    if batch and prompt is not None and evidence.output_tokens is not None:
        step, prefill = decode_step(evidence, batch), step_of_prompts(evidence, prompt)
        if step is not None and prefill is not None:
            decode = evidence.output_tokens / batch * max(step.memory_s, step.compute_s)
            return prefill / max(1e-12, prefill + decode), "of the least time on this GPU"
    return evidence.prompt_share, "of computed tokens"


def is_prefill_bound(evidence: Evidence) -> bool:
    found = prefill_share(evidence)
    if found is None or found[0] < PROMPT_SHARE:
        return False
    filled = step_fill(evidence)
    return found[1] != "of computed tokens" or filled is None or filled >= FULL_STEP_SHARE


def step_fill(evidence: Evidence) -> float | None:
    """Tokens per step against the token budget."""
    budget = evidence.number("max_num_batched_tokens")
    return evidence.tokens_per_step / budget if evidence.tokens_per_step is not None and budget else None
