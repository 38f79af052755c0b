"""Compiles every Triton kernel for a Hopper GPU, down to machine code, on a machine that has none.

Run as a program, without Triton's interpreter: the wrappers are called with tensors on the CPU, and a launch compiles
instead of running. Prints the names of the compiled kernels, and fails as a compilation on a GPU would.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.kernels import gpu
from headrace.kernels.gpu import slots as slot_kernels
from headrace.kernels.gpu.allowed_tokens import keep_allowed
from headrace.kernels.gpu.gather_kv import gather_contexts
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.gpu.sample import sample
from headrace.kernels.gpu.scaled_gemm import ScaledLinear
from headrace.kernels.gpu.scores import scores
from headrace.kernels.gpu.shared_attention import shared_shape
from headrace.kernels.gpu.threshold_types import Filters
from headrace.kernels.layout import (
    AdapterRows,
    Gathering,
    LayerCache,
    LowRankWeights,
    SharedPrefixes,
    Splits,
    StepLayout,
)
from headrace.kernels.quantized import Fp8Weight, Int4Weight, quantize_int8

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
compiled: set[str] = set()


class HopperWithoutHardware:
    """The part of a driver that the compiler uses."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only() -> None:
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.add(self.__name__)
        return original(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run  # type: ignore[method-assign]
    driver.set_active(HopperWithoutHardware())


def layout_of(num_decodes: int, num_splits: int) -> StepLayout:
    num_seqs, num_tokens = num_decodes + 1, num_decodes + 128
    return StepLayout(
        positions=torch.arange(num_tokens),
        slot_mapping=torch.arange(num_tokens),
        query_starts=torch.tensor([*range(num_decodes + 1), num_tokens], dtype=torch.int32),
        context_lens=torch.full((num_seqs,), 128, dtype=torch.int32),
        slots=torch.arange(num_seqs, dtype=torch.int32),
        block_tables=torch.zeros((num_seqs, 16), dtype=torch.int32),
        max_query_len=128,
        max_context_len=256,
        num_decodes=num_decodes,
        splits=Splits(num_splits),
        tiles=torch.zeros((1, 2), dtype=torch.int32),
    )


def attention(num_heads: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype) -> None:
    cache = LayerCache(*(torch.zeros(64, num_kv_heads, 16, head_dim, dtype=cache_dtype) for _ in range(2)))
    for num_splits in (1, 4) if cache_dtype == BF16 else (4,):
        layout = layout_of(16, num_splits)
        qkv = torch.zeros(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=BF16)
        norm = torch.zeros(head_dim)
        q = gpu.rope_and_store(qkv, layout, torch.zeros(256, head_dim), cache, num_heads, num_kv_heads, norm, norm)
        gpu.paged_attention(q, cache, layout, 0.1, None, None)
        gpu.paged_attention(q, cache, layout, 0.1, 64, 30.0)
        gpu.paged_attention(q, cache, layout, 0.1, 64, slides=False)
        gpu.paged_attention(q, cache, layout, 0.1, 64, sinks=torch.zeros(num_heads))
        seqs_per_tile = shared_shape(head_dim, cache_dtype).rows // (num_heads // num_kv_heads)
        shared = SharedPrefixes(
            torch.zeros(16, dtype=torch.int32),
            torch.zeros((2, seqs_per_tile), dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )
        for slopes in (None, torch.zeros(num_heads)):
            gpu.paged_attention(q, cache, dataclasses.replace(layout, shared=shared), 0.1, slopes=slopes)
    starts = torch.tensor([0, 128], dtype=torch.int32)
    gather_contexts(cache, layout, Gathering(16, starts, 128, 128), BF16)


def latents(num_heads: int, cache_dtype: torch.dtype) -> None:
    cache = LayerCache.of_latents(torch.zeros(64, 1, 16, 512 + 64, dtype=cache_dtype), 512)
    for num_splits in (1, 4):
        layout = layout_of(16, num_splits)
        q = torch.zeros(layout.num_tokens, num_heads, 512 + 64, dtype=BF16)
        rows, cos_sin = torch.zeros(layout.num_tokens, 512 + 64, dtype=BF16), torch.zeros(256, 64)
        gpu.rope_and_store_latent(q, rows[:, :512].contiguous(), rows[:, 512:], layout, cos_sin, cache)
        gpu.latent_attention(q, cache, layout, 0.1)


def elementwise() -> None:
    x, residual, weight = torch.zeros(32, 2048, dtype=BF16), torch.zeros(32, 2048, dtype=BF16), torch.zeros(2048)
    gpu.rms_norm(x, weight, 1e-5)
    gpu.add_rms_norm(x, residual, weight, 1e-5)
    gpu.rms_norm_fp8(x, weight, 1e-5)
    gpu.add_rms_norm_fp8(x, residual, weight, 1e-5)
    gpu.layer_norm(x, weight, weight, 1e-5)
    gpu.add_layer_norm_fp8(x, residual, weight, weight, 1e-5)
    gpu.quantize_rows(x)
    for activation in (gpu.silu_and_mul, gpu.gelu_tanh_and_mul, gpu.silu_and_mul_fp8, gpu.gelu_tanh_and_mul_fp8):
        activation(x)
    gpu.soft_cap(x, 30.0)
    rows, bits = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 64, dtype=torch.int32)
    for logits in (x, x.float()):
        gpu.apply_bitmask(logits, rows, bits)


def experts() -> None:
    x = torch.zeros(1024, 256, dtype=BF16)
    for num_tokens in (8, 64, 256, 1024):
        for num_experts, num_chosen, rule in ((8, 1, "sigmoid"), (8, 2, "softmax"), (8, 2, "softmax_of_chosen")):
            routes = gpu.route(x[:num_tokens, :num_experts], num_chosen, rule)
        for rule in ("sigmoid_of_chosen", "softmax_of_chosen"):
            gpu.route(x[:num_tokens, :8], 2, rule, correction=torch.zeros(8), scale=2.5)
        gpu.route(x[:num_tokens, :8], 2, "sparsemixer", jitter=0.01)
        for as_fp8 in (False, True):
            weight = torch.zeros(8, 200, 256, dtype=BF16)
            gpu.pack_experts(weight, as_fp8=as_fp8)(x[:num_tokens], routes, weighs=True)
            gpu.pack_experts(weight[:, :, :72], as_fp8=as_fp8)(x[:num_tokens, :72], routes)


def quantized() -> None:
    x = torch.zeros(512, 512, dtype=BF16)
    for group_len, zeros in ((128, None), (32, torch.zeros(256, 16, dtype=torch.uint8))):
        values = torch.zeros(256, 512, dtype=torch.uint8)
        linear = Int4Linear(Int4Weight(values, torch.zeros(256, 512 // group_len), zeros), None, BF16)
        for num_tokens in (4, 32, 200, 512):
            linear(x[:num_tokens])
    for weight in (quantize_int8(x), Fp8Weight(x.to(FP8), torch.zeros(4, 4))):
        for num_tokens in (4, 200):
            ScaledLinear(weight, None, BF16)(x[:num_tokens])


def recurrent(num_heads: int, head_dim: int, state_size: int) -> None:
    head, x = torch.zeros(num_heads), torch.zeros(144, num_heads, head_dim, dtype=BF16)
    states = torch.zeros(17, num_heads, head_dim, state_size), torch.zeros(17, num_heads, head_dim, head_dim)
    group = torch.zeros(144, 1, state_size, dtype=BF16)
    for layout in (layout_of(16, 1), dataclasses.replace(layout_of(16, 1), max_query_len=1)):
        conv = torch.zeros(17, 3, num_heads * head_dim, dtype=BF16)
        weight = torch.zeros(num_heads * head_dim, 4, dtype=BF16)
        gpu.causal_conv(x.flatten(1), layout, conv, weight, activates=True)
        gpu.selective_scan(x, group, group, x[:, :, 0], layout, states[0], rate=head, skip=head, dt_bias=head)
        gpu.gated_delta_rule(x, x, x, x[:, :, 0], x[:, :, 1], layout, states[1], rate=head, dt_bias=head)
    for weight in (None, torch.zeros(head_dim), torch.zeros(num_heads * head_dim)):
        for norm_first in (False, True):
            gpu.gated_norm(x.flatten(1), x.flatten(1), weight, 1e-5, group_size=head_dim, norm_first=norm_first)


def slots_and_sampling() -> None:
    numbers, wide = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int64)
    tokens, tables = torch.zeros(32, 64, dtype=torch.int32), torch.zeros(32, 16, dtype=torch.int32)
    slot_kernels.prepare_decode(numbers, tokens, wide, tables, 16, numbers, wide, wide, numbers)
    slot_kernels.prepare_decode(numbers, tokens, wide, tables, 16, numbers, wide, wide, numbers, numbers)
    slot_kernels.write_tables(tables, numbers, numbers, numbers)
    flags, finished = torch.zeros(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.bool)
    slot_kernels.enter_slot(tables[:4, :8].contiguous(), numbers, 32, tokens, wide, wide, finished)
    stops, out = torch.zeros(32, 16, dtype=torch.int64), torch.zeros(2, 32, dtype=torch.int32)
    for advances in (None, wide):
        slot_kernels.append_tokens(numbers, wide, flags, tokens, wide, finished, wide, stops, out, advances=advances)
    accepted = torch.zeros(3, 32, dtype=torch.int32)
    rows = (numbers, numbers, numbers, wide, flags)
    slot_kernels.accept_drafts(*rows, tokens, wide, wide, finished, wide, stops, accepted)
    logits, temperature = torch.zeros(32, 8192, dtype=BF16), torch.zeros(32, dtype=torch.float64)
    sample(logits, numbers, wide, temperature, wide, wide, flags)
    for dtype in (BF16, torch.float32):
        filters = Filters(temperature, wide, temperature)
        sample(logits.to(dtype), numbers, wide, temperature, wide, wide, flags, filters)
    keep_allowed(logits.float(), wide, wide, torch.zeros(32, 1024, dtype=torch.uint8))
    scores(logits.float(), wide, num_top=5)


def adapters(sizes: tuple[int, ...], width: int, max_rank: int) -> None:
    weights = LowRankWeights(
        torch.zeros(4, max_rank, len(sizes), width, dtype=BF16),
        torch.zeros(4, sum(sizes), max_rank, dtype=BF16),
        torch.full((4,), max_rank, dtype=torch.int32),
        sizes,
    )
    rows = AdapterRows.of(torch.ones(40, dtype=torch.int32), 4)
    out, x = torch.zeros(40, sum(sizes), dtype=BF16), torch.zeros(40, width, dtype=BF16)
    gpu.add_low_rank(out, x, weights, rows)


def main() -> None:
    compile_only()
    adapters((4096, 1024, 1024), 4096, 16)
    adapters((14336, 14336), 4096, 64)
    adapters((4096,), 14336, 256)
    elementwise()
    slots_and_sampling()
    experts()
    quantized()
    recurrent(8, 64, 128)
    recurrent(8, 64, 256)
    recurrent(8, 128, 128)
    attention(8, 2, 64, BF16)
    attention(8, 2, 128, FP8)
    latents(16, BF16)
    latents(128, FP8)
    sys.stdout.write(" ".join(sorted(compiled)) + "\n")


if __name__ == "__main__":
    main()
