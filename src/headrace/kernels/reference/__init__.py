"""Every operation in plain PyTorch: the specification, the test of the fast kernels, and the fallback without them.

The files are those of `ops/`, and adapters.py and fp8.py. Sums are in float32 whatever the type of the input. T tokens,
Hq and Hkv query and kv heads, D head_dim.
"""

from __future__ import annotations

from headrace.kernels.reference.activations import (
    CLAMP,
    clamped_silu_and_mul,
    clamped_silu_and_mul_fp8,
    gelu,
    gelu_and_mul,
    gelu_fp8,
    gelu_tanh,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    gelu_tanh_fp8,
    relu,
    relu2,
    relu2_fp8,
    relu_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)
from headrace.kernels.reference.adapters import add_low_rank
from headrace.kernels.reference.attention import (
    bidirectional_attention,
    latent_attention,
    paged_attention,
    rope_and_store,
    rope_and_store_latent,
    rotate,
)
from headrace.kernels.reference.cache import (
    allocate_cache,
    allocate_latent_cache,
    copy_blocks,
    copy_blocks_to_rows,
    copy_rows_to_blocks,
)
from headrace.kernels.reference.experts import PackedExperts, choose_experts, pack_experts, route
from headrace.kernels.reference.fp8 import FP8, FP8_MAX, quantize_rows
from headrace.kernels.reference.linear import Fp8Linear, PackedLinear, embed, pack_linear, pack_quantized, takes_groups
from headrace.kernels.reference.logits import apply_bitmask, soft_cap
from headrace.kernels.reference.norms import (
    add_layer_norm,
    add_layer_norm_fp8,
    add_rms_norm,
    add_rms_norm_fp8,
    add_to,
    layer_norm,
    layer_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from headrace.kernels.reference.recurrent import causal_conv, gated_delta_rule, gated_norm, selective_scan
from headrace.kernels.reference.slots import append_tokens, lay_out_rows

__all__ = [
    "CLAMP",
    "FP8",
    "FP8_MAX",
    "Fp8Linear",
    "PackedExperts",
    "PackedLinear",
    "add_layer_norm",
    "add_layer_norm_fp8",
    "add_low_rank",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_to",
    "allocate_cache",
    "allocate_latent_cache",
    "append_tokens",
    "apply_bitmask",
    "bidirectional_attention",
    "causal_conv",
    "choose_experts",
    "clamped_silu_and_mul",
    "clamped_silu_and_mul_fp8",
    "copy_blocks",
    "copy_blocks_to_rows",
    "copy_rows_to_blocks",
    "embed",
    "gated_delta_rule",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_fp8",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_fp8",
    "gelu_tanh_fp8",
    "latent_attention",
    "lay_out_rows",
    "layer_norm",
    "layer_norm_fp8",
    "pack_experts",
    "pack_linear",
    "pack_quantized",
    "paged_attention",
    "quantize_rows",
    "relu",
    "relu2",
    "relu2_fp8",
    "relu_fp8",
    "rms_norm",
    "rms_norm_fp8",
    "rope_and_store",
    "rope_and_store_latent",
    "rotate",
    "route",
    "selective_scan",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "soft_cap",
    "takes_groups",
]
