"""Triton kernels for NVIDIA GPUs, each tested against its PyTorch reference.

    attention.py            splits a step's sequences over the attention kernels below
    decode_attention.py     decode: one query token per sequence; long contexts are split over programs
    few_decodes.py          decode with few sequences, RoPE and the write to the cache in the same kernel
    shared_attention.py     prefixes that several decoding sequences share, read once for all of them
    prefill_attention.py    fresh prefills and prefill continuations, read from the paged cache
    bidirectional_attention.py   attention of encoders: whole texts, packed, no cache
    flash.py, gather_kv.py  FlashAttention-3 for prefills, where it is installed
    latent.py               multi-head latent attention: decodes and prefills over a cache of latents
    attention_loop.py       the loop over keys that the prefill and shared-prefix kernels have in common
    rope.py, norms.py, activation.py, bitmask.py   elementwise operations
    routing.py, experts.py, route_rows.py   mixture of experts: routing, one grouped GEMM for all experts, sums;
    few_routes.py, few_experts.py, sorted_experts.py   the same for a few tokens: the router with the routing; experts
    expert_columns.py       experts with few routes each: the weight as the left operand
    experts_int4.py         experts with weights of four bits
    embeddings.py           the lookup of embeddings
    linear.py, one_row.py, few_rows.py   linear layers, with kernels of their own for steps of few tokens
    row_parts.py            few rows as integers or FP8, for weights of four and eight bits
    adapters.py             low-rank products of adapters (LoRA), of several adapters at once
    causal_conv.py, selective_scan.py, delta_rule.py, gated_norm.py   mixers with a recurrent state per slot
    fp8.py, fp8_linear.py   FP8 quantization and scaled GEMMs
    quantized.py, int4.py, scaled_gemm.py   weights of four and eight bits, as checkpoints store them
    one_row_int4.py, few_rows_int4.py, int4_values.py   four bits in steps of few tokens; how they are widened
    dependent_launch.py     kernels that are set up while the one before them runs
    peer_sum.py             sums over ranks that share memory
    slots.py                moves tokens and lengths in and out of the slots, so that a decode step needs no host
    sample.py, thresholds.py, threshold_search.py   sampling with min_p, top_k and top_p, without a sort
    launches.py, compile_pool.py   which kernels were launched; compiling them without a GPU, in parallel
    architectures.py, shared_memory.py   what tiles must fit into
    allowed_tokens.py, scores.py   allowed_token_ids, and log-probabilities

Invariants: the host never reads a result, so all launches fit into CUDA graphs. Numbers that change from step to step
are not specialized, because a compilation in the middle of a run stops the GPU for half a second. Padding has a
context length of 0 and is skipped. Launch parameters are beside each kernel, with the date and device of the sweep.
"""

from __future__ import annotations

from headrace.kernels.gpu.activation import (
    clamped_silu_and_mul_fp8,
    gelu_fp8,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    gelu_tanh_fp8,
    relu2_fp8,
    relu_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
    soft_cap,
)
from headrace.kernels.gpu.adapters import add_low_rank
from headrace.kernels.gpu.attention import allocate_cache, paged_attention
from headrace.kernels.gpu.bidirectional_attention import bidirectional_attention
from headrace.kernels.gpu.bitmask import apply_bitmask
from headrace.kernels.gpu.causal_conv import causal_conv
from headrace.kernels.gpu.delta_rule import gated_delta_rule
from headrace.kernels.gpu.embeddings import embed
from headrace.kernels.gpu.experts import (
    experts_of_few_tokens,
    gated_experts,
    pack_experts,
    pack_quantized_experts,
    takes_few_tokens,
)
from headrace.kernels.gpu.few_decodes import rope_and_attend, takes_few_decodes
from headrace.kernels.gpu.few_routes import multiply_and_route, takes_router
from headrace.kernels.gpu.fp8 import quantize_rows
from headrace.kernels.gpu.gated_norm import gated_norm
from headrace.kernels.gpu.latent import allocate_latent_cache, latent_attention, rope_and_store_latent
from headrace.kernels.gpu.linear import fuses_gate, gated_linear, pack_linear, pack_with_copy, takes_unnormed
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
from headrace.kernels.gpu.quantized import pack_quantized
from headrace.kernels.gpu.rope import rope_and_store, rotate
from headrace.kernels.gpu.route_rows import sum_routes
from headrace.kernels.gpu.routing import route
from headrace.kernels.gpu.selective_scan import selective_scan
from headrace.kernels.reference import add_to, clamped_silu_and_mul, gelu, gelu_and_mul, gelu_tanh, relu, relu2

__all__ = [
    "add_layer_norm",
    "add_layer_norm_fp8",
    "add_low_rank",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_to",
    "allocate_cache",
    "allocate_latent_cache",
    "apply_bitmask",
    "bidirectional_attention",
    "causal_conv",
    "clamped_silu_and_mul",
    "clamped_silu_and_mul_fp8",
    "embed",
    "experts_of_few_tokens",
    "fuses_gate",
    "gated_delta_rule",
    "gated_experts",
    "gated_linear",
    "gated_norm",
    "gelu",
    "gelu_and_mul",
    "gelu_fp8",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "gelu_tanh_and_mul_fp8",
    "gelu_tanh_fp8",
    "latent_attention",
    "layer_norm",
    "layer_norm_fp8",
    "multiply_and_route",
    "pack_experts",
    "pack_linear",
    "pack_quantized",
    "pack_quantized_experts",
    "pack_with_copy",
    "paged_attention",
    "quantize_rows",
    "relu",
    "relu2",
    "relu2_fp8",
    "relu_fp8",
    "rms_norm",
    "rms_norm_fp8",
    "rope_and_attend",
    "rope_and_store",
    "rope_and_store_latent",
    "rotate",
    "route",
    "selective_scan",
    "silu_and_mul",
    "silu_and_mul_fp8",
    "soft_cap",
    "sum_routes",
    "takes_few_decodes",
    "takes_few_tokens",
    "takes_router",
    "takes_unnormed",
]
