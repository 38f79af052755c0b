"""Time of GEMMs with weights of four bits against bfloat16, for the matrices of one layer of the 8B shape.

    python benchmarks/int4_kernel.py --json benchmarks/results/int4-kernel-h200.json        # the tile shapes in use
    python benchmarks/int4_kernel.py --sweep                                                # others too

Each time is of a CUDA graph with enough copies of the matrix that no copy is still in the L2 cache. The kernels of up
to 16 rows are timed in whole layers by `layer_time.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.gpu import few_rows_int4, int4
from headrace.kernels.quantized import dequantize, quantize_int4

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
ROWS = (1, 4, 16, 32, 64, 128)
NUM_COPIES_BYTES = 200 << 20  # of L2 cache there are 50 MiB


def graph_seconds(calls: list[Any], seconds: float = 0.05) -> float:
    """Mean seconds of one call, in a graph of all of them."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    num_replays, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(5):
            graph.replay()
        num_replays += 5
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / num_replays / len(calls)


def layer_of(shape: tuple[int, int], copies: int) -> list[int4.Int4Linear]:
    weight = quantize_int4(torch.randn(shape, device="cuda") * 0.02)
    return [int4.Int4Linear(weight, None, torch.bfloat16) for _ in range(copies)]


def error_of(shape: tuple[int, int], num_rows: int) -> float:
    weight = quantize_int4(torch.randn(shape, device="cuda") * 0.02)
    x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ dequantize(weight).t()
    return relative_error(int4.Int4Linear(weight, None, torch.bfloat16)(x), expected)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def compile_shape(job: tuple[Any, ...]) -> None:
    """Compiles one tile shape in a process of its own, into Triton's cache."""
    tile, splits, num_rows, shape = job
    linear = layer_of(shape, 1)[0]
    use(tile, splits)
    linear(torch.zeros(num_rows, shape[1], device="cuda", dtype=torch.bfloat16))


def use(tile: tuple[int, int, int, int], splits: int) -> None:
    few_rows_int4.MAX_ROWS = 0
    int4._tile_shape = lambda num_rows, num_columns: tile  # type: ignore[assignment]
    int4._num_splits = lambda num_tiles, num_blocks: splits  # type: ignore[assignment]


def measure(names: list[str], rows: tuple[int, ...]) -> list[dict[str, Any]]:
    found = []
    for name in names:
        shape = MATRICES[name]
        copies = max(2, NUM_COPIES_BYTES * 2 // (shape[0] * shape[1]))
        linears = layer_of(shape, copies)
        plain = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, copies // 4))]
        for num_rows in rows:
            x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
            ours = graph_seconds([lambda linear=linear, x=x: linear(x) for linear in linears])
            bf16 = graph_seconds([lambda weight=weight, x=x: torch.nn.functional.linear(x, weight) for weight in plain])
            num_bytes = shape[0] * shape[1] * 4.25 / 8
            row = {"matrix": name, "rows": num_rows, "int4_us": round(ours * 1e6, 2), "bf16_us": round(bf16 * 1e6, 2)}
            row |= {"int4_tb_per_s": round(num_bytes / ours / 1e12, 2), "error": round(error_of(shape, num_rows), 5)}
            found.append(row)
            print(row, flush=True)
    return found


def sweep(seconds: float) -> None:
    """Prints the best tile shapes for each matrix and number of rows, within a time."""
    tiles = [(16, 64, 4, stages) for stages in (2, 3, 4)] + [(16, 128, 4, stages) for stages in (2, 3, 4)]
    tiles += [(16, 128, 8, 3), (16, 256, 8, 2), (64, 128, 4, 3), (64, 128, 8, 3), (64, 64, 4, 3)]
    jobs = [(tile, 4, tile[0], MATRICES["o"]) for tile in tiles]
    started = time.perf_counter()
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_shape, jobs, timeout=seconds))
    print(f"compiled {len(jobs)} shapes in {time.perf_counter() - started:.0f} s", flush=True)
    cases = [(16, "gate_up", (1, 2, 4)), (16, "down", (4, 8, 16)), (16, "o", (4, 8)), (16, "qkv", (2, 4, 8))]
    cases += [(64, "gate_up", (1, 2)), (64, "down", (4, 8))]
    for rows, name, splits_of in cases:
        shape = MATRICES[name]
        linears = layer_of(shape, max(2, NUM_COPIES_BYTES * 2 // (shape[0] * shape[1])))
        found = []
        for splits, tile in itertools.product(splits_of, [each for each in tiles if each[0] == rows]):
            use(tile, splits)
            times = []
            for num_rows in (rows, 1):
                x = torch.randn(num_rows, shape[1], device="cuda", dtype=torch.bfloat16)
                calls = [lambda linear=linear, x=x: linear(x) for linear in linears]
                times.append(round(graph_seconds(calls, 0.02) * 1e6, 2))
            found.append((*times, tile, splits))
        for each in sorted(found)[:3]:
            print(
                name,
                f"us at {rows} and 1 rows:",
                each[:2],
                "rows, columns, warps, stages:",
                each[2],
                "splits:",
                each[3],
            )
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tile shapes")
    parser.add_argument("--budget", type=float, default=60, help="seconds for a sweep, half of them to compile")
    parser.add_argument("--rows", type=int, nargs="*", help="default: up to 128")
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"commit": arguments.commit}
    if arguments.sweep:
        sweep(arguments.budget)
        return
    record |= {"rows": measure(list(MATRICES), tuple(arguments.rows or ROWS))}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
