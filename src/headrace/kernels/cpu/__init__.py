"""Kernels for the CPU, compiled by numba and cached on disk: the first start compiles, later ones load.

    launch.py       compiles kernels, at first in two processes, and launches them
    team.py         the threads that run a launch together
    graphs.py       runs the launches of a step in one call
    native.py       typed pointers, atomic steps and calls of addresses for numba
    vectors.py      SIMD registers and instructions for numba
    attention.py    attention over the paged cache, all sequences in one call
    rope.py         rotary embedding, and the cache layout that attention reads
    cache_formats.py   numbers of the cache: float32, float16 or eight bits
    recurrent.py    causal convolutions and recurrent states, in PyTorch
    linear.py       linear layers: weights packed at load
    gemm.py         their GEMMs in float32; panels.py has what all of them share
    gemm_int8.py    the same in INT8
    gemm_weight_only.py   with packed weights of four, six and eight bits; weight_only_tiles.py: the code of its kernels
    adapters.py     low-rank products of LoRA adapters
    norms.py, activation.py, bitmask.py   elementwise operations
    slots.py        the slots' state: where a step's tokens are, and what is appended
    sample.py       temperature, min_p, top_k, top_p and sampling, without a sort over the vocabulary
    disk_cache.py   where compiled kernels are stored

Import this package only where a kernel is needed (`ops` does): it imports numba. Other types and other layouts go to
`headrace.kernels.reference`. Results do not depend on the number of threads. Measurements: docs/performance.md.
"""

from __future__ import annotations

from headrace.kernels.cpu import disk_cache

disk_cache.choose_directory()  # before numba is first imported

from headrace.kernels.cpu import sample  # noqa: E402
from headrace.kernels.cpu.activation import gelu_tanh_and_mul, silu_and_mul  # noqa: E402
from headrace.kernels.cpu.adapters import add_low_rank  # noqa: E402
from headrace.kernels.cpu.attention import latent_attention, paged_attention  # noqa: E402
from headrace.kernels.cpu.bitmask import apply_bitmask  # noqa: E402
from headrace.kernels.cpu.graphs import Recorder  # noqa: E402
from headrace.kernels.cpu.launch import compile_all as warm_up  # noqa: E402
from headrace.kernels.cpu.linear import PackedLinear, pack_experts, pack_linear, pack_quantized, takes_groups  # noqa: E402
from headrace.kernels.cpu.norms import add_layer_norm, add_rms_norm, add_to, layer_norm, rms_norm  # noqa: E402
from headrace.kernels.cpu.recurrent import causal_conv, gated_delta_rule, gated_norm, selective_scan  # noqa: E402
from headrace.kernels.cpu.rope import allocate_cache, rope_and_store  # noqa: E402
from headrace.kernels.cpu.slots import append_tokens, lay_out_rows  # noqa: E402
from headrace.kernels.reference import (  # noqa: E402
    allocate_latent_cache,
    bidirectional_attention,
    clamped_silu_and_mul,
    copy_blocks,
    embed,
    gelu,
    gelu_and_mul,
    gelu_tanh,
    relu,
    relu2,
    rope_and_store_latent,
    rotate,
    route,
    soft_cap,
)

__all__ = [
    "PackedLinear",
    "Recorder",
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
    "gated_delta_rule",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "latent_attention",
    "lay_out_rows",
    "layer_norm",
    "pack_experts",
    "pack_linear",
    "pack_quantized",
    "paged_attention",
    "relu",
    "relu2",
    "rms_norm",
    "rope_and_store",
    "rope_and_store_latent",
    "rotate",
    "route",
    "sample",
    "selective_scan",
    "silu_and_mul",
    "soft_cap",
    "takes_groups",
    "warm_up",
]
