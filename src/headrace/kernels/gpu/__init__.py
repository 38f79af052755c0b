"""The operations on an NVIDIA GPU: Triton kernels, each tested against its PyTorch twin."""

from __future__ import annotations

from headrace.kernels.gpu.activation import gelu_tanh_and_mul, silu_and_mul, soft_cap
from headrace.kernels.gpu.attention import allocate_cache, paged_attention
from headrace.kernels.gpu.norms import add_rms_norm, rms_norm
from headrace.kernels.gpu.rope import rope_and_store
from headrace.kernels.twins import pack_linear

__all__ = [
    "add_rms_norm",
    "allocate_cache",
    "gelu_tanh_and_mul",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_and_store",
    "silu_and_mul",
    "soft_cap",
]
