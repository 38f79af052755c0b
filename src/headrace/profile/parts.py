"""The parts of a step, and the part that a kernel, a torch operation or a range of ours belongs to."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

Part = Literal[
    "gemm",
    "prefill_attention",
    "decode_attention",
    "cache",
    "elementwise",
    "sampling",
    "inputs",
    "collectives",
    "copies",
    "other",
    "unattributed",
    "launch_gaps",
    "host_gaps",
    "waiting",
]

TITLES: dict[Part, str] = {
    "gemm": "GEMMs",
    "prefill_attention": "attention, prefill",
    "decode_attention": "attention, decode",
    "cache": "cache traffic, with RoPE",
    "elementwise": "norms, activations, routing",
    "sampling": "sampling",
    "inputs": "slots and step inputs",
    "collectives": "collectives",
    "copies": "copies and fills",
    "other": "other kernels",
    "unattributed": "unattributed",
    "launch_gaps": "gaps between kernels",
    "host_gaps": "host gaps",
    "waiting": "waiting for requests",
}
GAPS: tuple[Part, ...] = ("launch_gaps", "host_gaps", "waiting")

RANGE = "headrace."  # our ranges in a trace
OPERATION = RANGE + "op."  # those around an operation of `kernels/ops/`
EXECUTE = RANGE + "execute"  # one step on the CPU's device thread

# The Triton kernels of `kernels/gpu`, by the name of their function. tests/profile checks that none is missing.
OWN_KERNELS: dict[str, Part] = {
    "_multiply": "gemm",  # experts
    "_multiply_columns": "gemm",  # experts of few routes each
    "_multiply_routes": "gemm",  # experts of few tokens
    "_multiply_row": "gemm",  # with the norm before it and the activation after it
    "_multiply_rows": "gemm",
    "_shrink": "gemm",  # of adapters
    "_expand": "gemm",
    "_gate_up": "gemm",  # experts of few tokens
    "_down": "gemm",
    "_multiply_int4": "gemm",
    "_multiply_int4_experts": "gemm",
    "_multiply_row_int4": "gemm",
    "_multiply_rows_int4": "gemm",  # with the activation after it
    "_multiply_scaled": "gemm",
    "_bidirectional": "prefill_attention",
    "_rotate": "cache",  # of encoders, which have no cache
    "_quantize_groups": "elementwise",
    "_split_rows": "elementwise",
    "_quantize_int8": "elementwise",
    "_widen": "elementwise",
    "_sum_over_peers": "collectives",
    "_accept": "inputs",  # drafts
    "_prefill": "prefill_attention",
    "_decode": "decode_attention",
    "_rope_and_attend": "decode_attention",  # with RoPE and the write to the cache
    "_shared": "decode_attention",
    "_latent_prefill": "prefill_attention",
    "_latent_decode": "decode_attention",
    "_rope_and_store": "cache",
    "_copy": "cache",  # blocks to and from host memory
    "_rope_and_store_latent": "cache",
    "_gather_context": "cache",
    "_norm": "elementwise",
    "_gate": "elementwise",
    "_gate_fp8": "elementwise",
    "_quantize": "elementwise",
    "_soft_cap": "elementwise",
    "_choose_experts": "elementwise",
    "_multiply_and_route": "elementwise",  # the router of few tokens too
    "_sort": "elementwise",  # routes by expert
    "_sum_routes": "elementwise",
    "_gated_norm": "elementwise",
    "_decode_conv": "elementwise",
    "_prefill_conv": "elementwise",
    "_conv_state": "elementwise",
    "_decode_scan": "other",  # recurrent states
    "_chunk_scan": "other",
    "_decode_delta": "other",
    "_chunk_delta": "other",
    "_weigh": "sampling",
    "_choose": "sampling",
    "_plan": "sampling",
    "_histogram": "sampling",
    "_bound": "sampling",
    "_gather": "sampling",
    "_settle": "sampling",
    "_search_thresholds": "sampling",
    "_apply_bitmask": "sampling",
    "_keep_allowed": "sampling",
    "_read": "sampling",  # log-probabilities
    "_merge": "sampling",
    "_prepare": "inputs",
    "_embed": "inputs",
    "_write_tables": "inputs",
    "_enter_slot": "inputs",
    "_append": "inputs",
}

# Kernels of libraries and of other engines. The first pattern that is found in the name decides.
_KERNELS: tuple[tuple[str, Part], ...] = (
    (r"^memcpy|^memset", "copies"),
    (r"nccl|all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce", "collectives"),
    (r"reshape_and_cache|concat_and_cache|copy_blocks|swap_blocks|kv_cache", "cache"),
    (
        r"decode.*(attention|attn|mha)|(attention|attn|mha).*(decode|paged|combine)|xqa|splitkv|flash.*combine",
        "decode_attention",
    ),
    (r"flash|fmha|attention|attn", "prefill_attention"),
    (r"nvjet|gemm|gemv|cublas|cutlass|splitkreduce|xmma|wgmma|matmul|_mm_|marlin|machete", "gemm"),
    (
        r"top_?k|top_?p|sampl|argmax|softmax|gumbel|logprob|penalt|min_p|radixsort|philox|exponential|multinomial",
        "sampling",
    ),
    (r"rms_?norm|layer_?norm|rsqrt|silu|gelu|swiglu|act_and_mul|rotary|rope|quant|moe_align|routing", "elementwise"),
)

# Operations of `kernels/ops/` on a CPU, where kernels are no events of their own.
_OPERATIONS: dict[str, Part] = {
    "linear": "gemm",
    "paged_attention.decode": "decode_attention",
    "paged_attention.prefill": "prefill_attention",
    "latent_attention.decode": "decode_attention",
    "latent_attention.prefill": "prefill_attention",
    "rope_and_attend": "decode_attention",
    "rope_and_store": "cache",
    "rope_and_store_latent": "cache",
    "copy_blocks": "cache",
    "apply_bitmask": "sampling",
    "route": "elementwise",
    "causal_conv": "elementwise",
    "embed": "inputs",
}
_ELEMENTWISE = re.compile(r"norm|silu|gelu|soft_cap")
_RANGES: dict[str, Part] = {"sample": "sampling", "inputs": "inputs", "append": "inputs", "copy_blocks": "cache"}
_GEMM_OPS = re.compile(r"^(aten::(mm|bmm|addmm|addbmm|baddbmm|matmul|linear|_scaled_mm)|mkl|mkldnn).*")


@cache
def part_of_kernel(name: str) -> Part:
    """The part of a kernel or a copy on a GPU."""
    own = OWN_KERNELS.get(name)
    if own is not None:
        return own
    lowered = name.lower()
    for pattern, part in _KERNELS:
        if re.search(pattern, lowered):
            return part
    return "other"


@cache
def part_of_range(name: str) -> Part | None:
    """The part of one of our ranges; None: the range holds several parts, or is not ours."""
    if name.startswith(OPERATION):
        operation = name.removeprefix(OPERATION)
        return _OPERATIONS.get(operation) or ("elementwise" if _ELEMENTWISE.search(operation) else "other")
    return _RANGES.get(name.removeprefix(RANGE)) if name.startswith(RANGE) else None


@cache
def part_of_operation(name: str) -> Part | None:
    """The part of one of torch's own operations on a CPU, outside all of our ranges; None: not known."""
    return "gemm" if _GEMM_OPS.match(name) else None
