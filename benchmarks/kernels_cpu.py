"""Speed of each CPU kernel on the shapes of SmolLM2-135M. Usage: python benchmarks/kernels_cpu.py [--seconds 0.3]

Weights and caches are cycled through as many copies as a model has, so that they come from memory and not from a cache.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable

import torch

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, StepLayout

HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 576, 9, 3, 64, 1536, 49152
LINEARS = {
    "qkv": ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, NUM_HEADS * HEAD_DIM),
    "gate_up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
    "head": (VOCAB, HIDDEN),
}
NUM_TOKENS = (1, 8, 32, 64, 128, 512)
COLD_BYTES = 100e6  # more than the last-level cache of most machines
BLOCK_SIZE = 16
EPS = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each number")
    seconds = parser.parse_args().seconds
    start = time.perf_counter()
    ops.warm_up(torch.device("cpu"), torch.float32)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"kernels compiled or loaded in {time.perf_counter() - start:.2f} s\n")
    _print_linears(seconds)
    _print_elementwise(seconds)
    _print_attention(seconds)


def _best_seconds(calls: list[Callable[[], object]], seconds: float) -> float:
    """Returns the minimum time of one call in seconds, cycling through all calls."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        start = time.perf_counter()
        for call in calls:
            call()
        best = min(best, (time.perf_counter() - start) / len(calls))
    return best


def _print_heading(title: str) -> None:
    print(f"{title:<34}" + "".join(f"{num_tokens:>9}" for num_tokens in NUM_TOKENS))


def _print_linears(seconds: float) -> None:
    _print_heading("GFLOP/s at this many tokens")
    for name, (num_out, num_in) in LINEARS.items():
        num_copies = max(1, round(COLD_BYTES / (4 * num_out * num_in)))
        weights = [torch.randn(num_out, num_in) for _ in range(num_copies)]
        packed = [ops.pack_linear(weight) for weight in weights]
        plain = [lambda x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
        for label, linears in ((f"{name} {num_in}x{num_out}", packed), ("  torch.nn.functional.linear", plain)):
            speeds = [_linear_speed(linears, num_tokens, num_out, num_in, seconds) for num_tokens in NUM_TOKENS]
            print(f"{label:<34}" + "".join(f"{speed:>9.1f}" for speed in speeds), flush=True)
    print()


def _linear_speed(linears: list[ops.PackedLinear], num_tokens: int, num_out: int, num_in: int, seconds: float) -> float:
    x = torch.randn(num_tokens, num_in)
    calls: list[Callable[[], object]] = [lambda linear=linear: linear(x) for linear in linears]  # type: ignore[misc]
    return 2e-9 * num_tokens * num_out * num_in / _best_seconds(calls, seconds)


def _print_elementwise(seconds: float) -> None:
    _print_heading("microseconds at this many tokens")
    weight = torch.randn(HIDDEN)
    angles = torch.outer(torch.arange(2048.0), 1e4 ** -torch.linspace(0, 1, HEAD_DIM // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)  # true rotations: qkv is rotated in place many times
    table = torch.randn(VOCAB, HIDDEN)
    rows: dict[str, list[float]] = {}
    for num_tokens in NUM_TOKENS:
        x, residual = torch.randn(num_tokens, HIDDEN), torch.zeros(num_tokens, HIDDEN)
        gate_up = torch.randn(num_tokens, 2 * INTERMEDIATE)
        qkv = torch.randn(num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        layout, cache = _decode_step(num_tokens, context_len=100)
        token_ids = torch.randint(VOCAB, (num_tokens,))
        calls: dict[str, Callable[[], object]] = {
            "embed": lambda token_ids=token_ids: ops.embed(token_ids, table),  # type: ignore[misc]
            "rms_norm": lambda x=x: ops.rms_norm(x, weight, EPS),  # type: ignore[misc]
            "add_rms_norm": lambda x=x, residual=residual: ops.add_rms_norm(x, residual, weight, EPS),  # type: ignore[misc]
            "rope_and_store": lambda qkv=qkv, layout=layout, cache=cache: ops.rope_and_store(  # type: ignore[misc]
                qkv, layout, cos_sin, cache, NUM_HEADS, NUM_KV_HEADS
            ),
            "silu_and_mul": lambda gate_up=gate_up: ops.silu_and_mul(gate_up),  # type: ignore[misc]
        }
        for name, call in calls.items():
            rows.setdefault(name, []).append(1e6 * _best_seconds([call], seconds))
    for name, times in rows.items():
        print(f"{name:<34}" + "".join(f"{time_us:>9.1f}" for time_us in times))


def _print_attention(seconds: float) -> None:
    for context_len in (100, 1000):
        times = []
        for num_seqs in NUM_TOKENS:
            num_bytes = 8 * num_seqs * context_len * NUM_KV_HEADS * HEAD_DIM
            num_copies = min(30, max(1, round(COLD_BYTES / num_bytes)))
            steps = [_decode_step(num_seqs, context_len) for _ in range(num_copies)]
            q = torch.randn(num_seqs, NUM_HEADS, HEAD_DIM)
            times.append(1e6 * _best_seconds([_attention(q, *step) for step in steps], seconds))
        print(f"{f'paged_attention, context {context_len}':<34}" + "".join(f"{time_us:>9.0f}" for time_us in times))
    for prompt_len in (128, 512, 2048):
        layout, cache = _prompt_step(prompt_len)
        q = torch.randn(prompt_len, NUM_HEADS, HEAD_DIM)
        best = _best_seconds([_attention(q, layout, cache)], seconds)
        flops = 2 * NUM_HEADS * HEAD_DIM * prompt_len * (prompt_len + 1)  # two matmuls over half of a square
        print(
            f"paged_attention, prompt of {prompt_len:>5} tokens: {1e3 * best:.2f} ms, {1e-9 * flops / best:.0f} GFLOP/s"
        )


def _attention(q: torch.Tensor, layout: StepLayout, cache: LayerCache) -> Callable[[], object]:
    return lambda: ops.paged_attention(q, cache, layout, HEAD_DIM**-0.5)


def _decode_step(num_seqs: int, context_len: int) -> tuple[StepLayout, LayerCache]:
    return _step(num_seqs, query_len=1, context_len=context_len)


def _prompt_step(prompt_len: int) -> tuple[StepLayout, LayerCache]:
    return _step(1, query_len=prompt_len, context_len=prompt_len)


def _step(num_seqs: int, query_len: int, context_len: int) -> tuple[StepLayout, LayerCache]:
    blocks_per_seq = -(-context_len // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_per_seq
    cache = ops.allocate_cache(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    cache.keys.fill_(0.1)
    cache.values.fill_(0.1)
    tables = torch.randperm(num_blocks, dtype=torch.int32).view(num_seqs, blocks_per_seq)
    positions = torch.arange(context_len - query_len, context_len)
    blocks = tables[:, positions // BLOCK_SIZE].long()  # [num_seqs, query_len]
    layout = StepLayout(
        positions=positions.repeat(num_seqs),
        slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten(),
        query_starts=torch.arange(0, num_seqs * query_len + 1, query_len, dtype=torch.int32),
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32),
        slots=torch.arange(num_seqs, dtype=torch.int32),
        block_tables=tables,
        max_query_len=query_len,
        max_context_len=context_len,
    )
    return layout, cache


if __name__ == "__main__":
    main()
