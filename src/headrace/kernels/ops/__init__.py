"""The operations that a model calls. Each uses the fast kernel of the tensor's device, or else the PyTorch reference.

    dispatch.py                     picks the kernels by device and type
    linear.py, experts.py           linear layers and their adapters; mixtures of experts
    norms.py, activations.py        what is between them
    attention.py, recurrent.py      the layers that see other tokens, through the KV cache or a recurrent state
    graphs.py                       launches that run again in one call
    cache.py, logits.py             memory and copies of the KV cache; what comes before sampling
    slots.py                        what a step on a CPU reads from the slots, and appends to them

The files of `reference/` have the same names and say what each operation computes.
"""

from __future__ import annotations

from headrace.kernels.layout import (
    AdapterRows,
    Addend,
    Appended,
    Fp8Rows,
    LayerCache,
    LayerState,
    LowRankWeights,
    RouteRows,
    Routes,
    Rows,
    StepLayout,
    StepRows,
    UnnormedRows,
    num_rows_of,
)
from headrace.kernels.ops.activations import (
    GATED,
    clamped_silu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    gelu_tanh_and_mul,
    relu,
    relu2,
    silu_and_mul,
)
from headrace.kernels.ops.attention import (
    bidirectional_attention,
    latent_attention,
    paged_attention,
    rope_and_attend,
    rope_and_store,
    rope_and_store_latent,
    rotate,
    takes_few_decodes,
)
from headrace.kernels.ops.cache import allocate_cache, allocate_latent_cache, copy_blocks
from headrace.kernels.ops.dispatch import has_numba, kernels_for, record_ranges, warm_up
from headrace.kernels.ops.experts import (
    PackedExperts,
    experts_of,
    experts_of_few_tokens,
    gated_experts,
    multiply_and_route,
    pack_experts,
    pack_quantized_experts,
    route,
    sum_routes,
    takes_few_tokens,
)
from headrace.kernels.ops.graphs import Graph, Recorder, recorder
from headrace.kernels.ops.linear import (
    PackedLinear,
    add_low_rank,
    embed,
    gated_linear,
    pack_linear,
    pack_quantized,
    pack_with_copy,
    takes_groups,
    takes_unnormed,
)
from headrace.kernels.ops.logits import apply_bitmask, soft_cap
from headrace.kernels.ops.norms import add_layer_norm, add_rms_norm, add_to, layer_norm, rms_norm
from headrace.kernels.ops.recurrent import causal_conv, gated_delta_rule, gated_norm, selective_scan
from headrace.kernels.ops.slots import append_tokens, lay_out_rows

__all__ = [
    "GATED",
    "AdapterRows",
    "Addend",
    "Appended",
    "Fp8Rows",
    "Graph",
    "LayerCache",
    "LayerState",
    "LowRankWeights",
    "PackedExperts",
    "PackedLinear",
    "Recorder",
    "RouteRows",
    "Routes",
    "Rows",
    "StepLayout",
    "StepRows",
    "UnnormedRows",
    "add_layer_norm",
    "add_low_rank",
    "add_rms_norm",
    "add_to",
    "allocate_cache",
    "allocate_latent_cache",
    "append_tokens",
    "apply_bitmask",
    "bidirectional_attention",
    "causal_conv",
    "clamped_silu_and_mul",
    "copy_blocks",
    "embed",
    "experts_of",
    "experts_of_few_tokens",
    "gated_delta_rule",
    "gated_experts",
    "gated_linear",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "has_numba",
    "kernels_for",
    "latent_attention",
    "lay_out_rows",
    "layer_norm",
    "multiply_and_route",
    "num_rows_of",
    "pack_experts",
    "pack_linear",
    "pack_quantized",
    "pack_quantized_experts",
    "pack_with_copy",
    "paged_attention",
    "record_ranges",
    "recorder",
    "relu",
    "relu2",
    "rms_norm",
    "rope_and_attend",
    "rope_and_store",
    "rope_and_store_latent",
    "rotate",
    "route",
    "selective_scan",
    "silu_and_mul",
    "soft_cap",
    "sum_routes",
    "takes_few_decodes",
    "takes_few_tokens",
    "takes_groups",
    "takes_unnormed",
    "warm_up",
]
