"""The operations on an NVIDIA GPU: Triton kernels, each tested against its PyTorch twin."""

from __future__ import annotations

from headrace.kernels.gpu.activation import (
    gelu_fp8,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    gelu_tanh_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
    soft_cap,
)
from headrace.kernels.gpu.attention import allocate_cache, paged_attention
from headrace.kernels.gpu.bitmask import apply_bitmask
from headrace.kernels.gpu.experts import pack_experts
from headrace.kernels.gpu.fp8 import pack_linear, quantize_rows
from headrace.kernels.gpu.norms import (
    add_layer_norm,
    add_layer_norm_fp8,
    add_rms_norm,
    add_rms_norm_fp8,
    layer_norm,
    layer_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from headrace.kernels.gpu.rope import rope_and_store
from headrace.kernels.gpu.routing import route
from headrace.kernels.reference import gelu, gelu_tanh

__all__ = [
    "add_layer_norm",
    "add_layer_norm_fp8",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "allocate_cache",
    "apply_bitmask",
    "gelu",
    "gelu_fp8",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_fp8",
    "gelu_tanh_fp8",
    "layer_norm",
    "layer_norm_fp8",
    "pack_experts",
    "pack_linear",
    "paged_attention",
    "quantize_rows",
    "rms_norm",
    "rms_norm_fp8",
    "rope_and_store",
    "route",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "soft_cap",
]
