"""The work of steps by part, and the least time that it needs at the device's measured ceilings.

GEMMs need the larger of two times in each step: their FLOPs at the GEMM rate, or their weights at the bandwidth.
Prefill attention needs its FLOPs at the GEMM rate. All other parts need the bytes that they must read and write at the
bandwidth. A shared prefix counts for each of its sequences, though it may be read once. Activations count as if they
came from memory; where they stay in a cache of the device, a part may be faster than its ceiling.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.profile.parts import Part
from headrace.profile.trace import Ceilings, ModelNumbers, StepLine


@dataclass(frozen=True, slots=True)
class Work:
    flops: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True)
class PartCeiling:
    work: Work
    seconds: float | None  # None: the device was not measured
    limit: str  # what sets it: "GEMM rate" or "bandwidth"


def work_of_step(step: StepLine, model: ModelNumbers) -> dict[Part, Work]:
    tokens, element = step.num_tokens, model.activation_bytes
    weight_bytes = model.few_weight_bytes if 0 < tokens <= model.few_rows else model.weight_bytes
    head_bytes = model.few_head_bytes if step.num_samples <= model.few_rows else model.head_bytes
    activated = (3 if model.is_gated else 2) * model.mlp_width
    return {
        "gemm": Work(
            2.0 * model.active_params * tokens + 2.0 * model.hidden_size * model.vocab_size * step.num_samples,
            weight_bytes + (head_bytes if step.num_samples else 0),
        ),
        "prefill_attention": Work(4.0 * model.num_layers * model.q_size * step.pairs, 0.0),
        "decode_attention": Work(
            4.0 * model.num_layers * model.q_size * step.kv_tokens, step.kv_tokens * model.kv_token_bytes
        ),
        "cache": Work(
            0.0,  # read queries, keys and values; write the queries, and keys and values into the cache
            tokens * (model.num_layers * element * (2 * model.q_size + 2 * model.kv_size) + model.kv_token_bytes),
        ),
        "elementwise": Work(0.0, tokens * model.num_layers * element * (8 * model.hidden_size + activated)),
        "sampling": Work(0.0, step.num_samples * model.vocab_size * model.logit_bytes),
    }


def ceilings_of(
    steps: Sequence[StepLine], model: ModelNumbers, device: Ceilings, *, splits_attention: bool = True
) -> dict[Part, PartCeiling]:
    """The least seconds that all steps need, by part. A part without work is left out. `splits_attention`: prefill and
    decode attention are told apart within a step; otherwise all attention of a step with prefills counts as prefill."""
    totals: dict[Part, Work] = defaultdict(Work)
    gemm_by_flops = gemm_by_bytes = 0.0
    rate, bandwidth = device.gemm_rate, device.bandwidth
    gemm_seconds = mixed_seconds = 0.0
    for step in steps:
        works = work_of_step(step, model)
        if not splits_attention and step.num_decodes < step.num_seqs:
            decode = works.pop("decode_attention")
            mixed_seconds += decode.num_bytes / bandwidth if bandwidth else 0.0
        for part, work in works.items():
            totals[part] += work
            if part == "gemm" and rate and bandwidth and step.num_tokens:
                by_flops, by_bytes = work.flops / rate, work.num_bytes / bandwidth
                gemm_seconds += max(by_flops, by_bytes)
                gemm_by_flops += by_flops if by_flops >= by_bytes else 0.0
                gemm_by_bytes += by_bytes if by_flops < by_bytes else 0.0
    found: dict[Part, PartCeiling] = {}
    for part, work in totals.items():
        if not work.flops and not work.num_bytes:
            continue
        if part == "gemm":
            limit = "GEMM rate" if gemm_by_flops >= gemm_by_bytes else "bandwidth"
            found[part] = PartCeiling(work, gemm_seconds or None, limit)
        elif part == "prefill_attention":
            found[part] = PartCeiling(work, work.flops / rate + mixed_seconds if rate else None, "GEMM rate")
        else:
            found[part] = PartCeiling(work, work.num_bytes / bandwidth if bandwidth else None, "bandwidth")
    return found
