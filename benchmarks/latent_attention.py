"""Times multi-head latent attention over a cache of latents on a GPU, for several tile sizes.

    python benchmarks/latent_attention.py --seconds 60 --json latent.json

A decode of DeepSeek reads 576 elements per token of its context, and computes 2 * (576 + 512) operations per head.
Prints the median time of each case and the share of the device's bandwidth; `--seconds` bounds the sweep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from headrace.kernels.gpu import latent
from headrace.kernels.gpu.latent import LatentShape
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.runner.gpu.context_splits import splits_of
from headrace.runner.gpu.tiles import tiles_of

RANK, ROTARY, BLOCK = 512, 64, 16
SHAPES = [
    LatentShape(16, 32, 4, 2),
    LatentShape(16, 64, 4, 2),
    LatentShape(32, 32, 8, 2),
    LatentShape(32, 64, 8, 2),
    LatentShape(64, 32, 8, 2),
]
DECODES = [(16, 1, 8192), (16, 64, 2048), (16, 256, 1024), (128, 1, 8192), (128, 64, 2048)]  # heads, sequences, context
PREFILLS = [(16, 1, 2048), (128, 1, 1024)]


def layout_of(num_seqs: int, query_len: int, context_len: int, programs: int) -> StepLayout:
    import numpy as np

    blocks = -(-context_len // BLOCK)
    num_decodes = num_seqs if query_len == 1 else 0
    tiles, _ = tiles_of(np.full(num_seqs, query_len), num_decodes)
    return StepLayout(
        positions=torch.arange(context_len - query_len, context_len, device="cuda").repeat(num_seqs),
        slot_mapping=torch.zeros(num_seqs * query_len, dtype=torch.int64, device="cuda"),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda") * query_len,
        context_lens=torch.full((num_seqs,), context_len, dtype=torch.int32, device="cuda"),
        slots=torch.arange(num_seqs, dtype=torch.int32, device="cuda"),
        block_tables=torch.randperm(num_seqs * blocks, device="cuda").view(num_seqs, blocks).int(),
        max_query_len=query_len,
        max_context_len=context_len,
        num_decodes=num_decodes,
        splits=splits_of(num_seqs, programs, RANK, 32768),
        tiles=torch.from_numpy(tiles.copy()).int().cuda() if len(tiles) else None,
    )


def milliseconds(q: torch.Tensor, cache: LayerCache, layout: StepLayout) -> float:
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            latent.latent_attention(q, cache, layout, 0.05)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return statistics.median(times[2:])


def measure(shape: LatentShape, num_heads: int, num_seqs: int, context_len: int, *, query_len: int) -> dict[str, Any]:
    latent.latent_shape = lambda _: shape
    layout = layout_of(num_seqs, query_len, context_len, latent.programs_per_decode(num_heads))
    num_blocks = layout.block_tables.numel()
    keys = torch.randn(num_blocks, 1, BLOCK, RANK + ROTARY, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(num_seqs * query_len, num_heads, RANK + ROTARY, device="cuda", dtype=torch.bfloat16)
    ms = milliseconds(q, LayerCache.of_latents(keys, RANK), layout)
    pairs = num_seqs * (context_len if query_len == 1 else context_len * (context_len + 1) // 2)
    return {
        "shape": [shape.rows, shape.keys, shape.num_warps, shape.num_stages],
        "heads": num_heads,
        "sequences": num_seqs,
        "context": context_len,
        "query_len": query_len,
        "microseconds": round(1000 * ms, 1),
        "cache_tb_per_s": round(num_seqs * context_len * (RANK + ROTARY) * 2 / ms / 1e9, 3),
        "tflop_per_s": round(2 * pairs * num_heads * (2 * RANK + ROTARY) / ms / 1e9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, end = [], time.monotonic() + options.seconds
    cases = [(*case, 1) for case in DECODES] + [(*case, case[2]) for case in PREFILLS]
    print("rows keys warps | heads seqs context query |      us  cache TB/s  TFLOP/s")
    for shape in SHAPES:
        for num_heads, num_seqs, context_len, query_len in cases:
            if time.monotonic() > end or shape.rows > num_heads:
                continue
            try:
                line = measure(shape, num_heads, num_seqs, context_len, query_len=query_len)
            except Exception as error:  # noqa: BLE001  too much shared memory, for example: the sweep goes on
                print(f"{shape}: {type(error).__name__}: {str(error)[:100]}")
                break
            found.append(line)
            print(
                f"{shape.rows:4} {shape.keys:4} {shape.num_warps:5} | {num_heads:5} {num_seqs:4} {context_len:7} "
                f"{query_len:5} | {line['microseconds']:7} {line['cache_tb_per_s']:11} {line['tflop_per_s']:8}"
            )
    if options.json is not None:
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        options.json.write_text(json.dumps({**versions, "cases": found}, indent=1))


if __name__ == "__main__":
    main()
