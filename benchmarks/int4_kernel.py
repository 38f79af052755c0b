"""Time of GEMMs with weights of four bits against bfloat16, for the matrices of one layer of the 8B shape.

    python benchmarks/int4_kernel.py --json benchmarks/results/int4-kernel-h200.json        # the tile shapes in use
    python benchmarks/int4_kernel.py --sweep                                                # others too
    python benchmarks/int4_kernel.py --chain --sweep --budget 90 --json found.json          # as a model runs them

Each time is of a CUDA graph with enough copies of the matrix that no copy is still in the L2 cache. `--chain`: the
graph has the norms, GEMMs and activations of several layers in the order of a model, with up to 16 rows, and the time
is that of one layer; each tile of the sweep replaces that of one matrix. Every tile is checked against the dequantized
matrix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.gpu import few_rows_int4, int4, one_row_int4
from headrace.kernels.gpu.few_rows import Linear
from headrace.kernels.gpu.few_rows_int4 import FewRowsTile
from headrace.kernels.gpu.int4 import Int4Linear
from headrace.kernels.gpu.norms import add_rms_norm
from headrace.kernels.gpu.one_row_int4 import OneRowTile
from headrace.kernels.layout import UnnormedRows
from headrace.kernels.quantized import Int4Weight, dequantize, quantize_int4

MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # N, K
ROWS = (1, 4, 16, 32, 64, 128)
NUM_COPIES_BYTES = 200 << 20  # of L2 cache there are 50 MiB
CHAIN_ROWS = (1, 4, 16)
NUM_LAYERS = 8  # of a chain: their smallest matrices together are larger than the L2 cache
NUM_PROCESSES = 14  # that compile
MAX_ERROR = 0.01  # of bfloat16 results, relative


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


# The chain of a model's layers, and tiles of `few_rows_int4.py` in it.

DEFAULT_TILE, DEFAULT_ROW_TILE = few_rows_int4.few_rows_tile, one_row_int4.one_row_tile
DEFAULT_MAX_ROWS = few_rows_int4.MAX_ROWS
Tile = FewRowsTile | OneRowTile
TILES_IN_USE: dict[tuple[int, int], Tile | None] = {}  # by width and number of columns; None: the default


def chosen_tile(num_rows: int, num_columns: int, width: int, **facts: Any) -> Tile:
    return TILES_IN_USE.get((num_columns, width)) or DEFAULT_TILE(num_rows, num_columns, width, **facts)


def chosen_row_tile(num_columns: int, width: int) -> Tile:
    return TILES_IN_USE.get((num_columns, width)) or DEFAULT_ROW_TILE(num_columns, width)


def use_tile(name: str, tile: Tile | None) -> None:
    few_rows_int4.few_rows_tile, one_row_int4.one_row_tile = chosen_tile, chosen_row_tile
    TILES_IN_USE[MATRICES[name]] = tile


def tiles_to_try(name: str, num_rows: int) -> list[Tile]:
    """The tiles of a sweep for a matrix: of one row chunks ahead and warps; of more pieces, held, warps, splits and
    registers."""
    shapes: list[tuple[Any, ...]]
    if num_rows == 1:
        shapes = [(8, 4), (4, 4), (4, 8), (2, 8), (8, 8), (1, 8), (2, 16), (1, 16)]
        return [OneRowTile(*shape) for shape in shapes]
    if num_rows <= 8:
        shapes = [(1, 1, 8), (1, 2, 8), (1, 4, 8), (1, 1, 16), (2, 1, 8), (2, 2, 8), (2, 1, 16), (2, 2, 4), (4, 1, 4)]
        shapes += [(4, 1, 8), (1, 4, 8, 1, 128)]
        shapes += [] if name == "gate_up" else [(2, 1, 8, 2), (2, 2, 4, 4), (1, 2, 8, 2)]
    else:
        shapes = [(1, 1, 8), (2, 1, 8), (2, 2, 8), (2, 1, 16), (2, 1, 4), (4, 1, 4), (4, 1, 8), (4, 1, 16)]
        shapes += [(2, 1, 8, 1, 128), (2, 1, 4, 1, 128), (4, 1, 8, 1, 128), (1, 1, 4), (1, 1, 4, 1, 96)]
        shapes += [] if name == "gate_up" else [(2, 1, 8, 2), (4, 1, 4, 2), (4, 1, 4, 4), (4, 1, 8, 2), (4, 1, 4, 8)]
    return [FewRowsTile(*shape) for shape in shapes]


def random_linear(shape: tuple[int, int]) -> tuple[Int4Linear, Int4Weight]:
    scales = (torch.rand(shape[0], shape[1] // 128, device="cuda") + 0.5) * 0.2 * shape[1] ** -0.5
    values = torch.randint(0, 16, shape, dtype=torch.uint8, device="cuda")
    weight = Int4Weight(values, scales)
    return Int4Linear(weight, None, torch.bfloat16), weight


def random_rows(num_rows: int, width: int) -> Tensor:
    return torch.randn(num_rows, width, device="cuda", dtype=torch.bfloat16)


def run_matrix(name: str, linear: Any, x: Tensor, gain: Tensor) -> Tensor:
    """Runs one matrix with what a model has before and after it, on x without a residual stream."""
    if name in ("qkv", "gate_up") and linear.takes_unnormed(x):
        rows: Any = UnnormedRows(x, torch.zeros_like(x), torch.empty_like(x), gain, 1e-5)
    else:
        rows = add_rms_norm(x, torch.zeros_like(x), gain, 1e-5) if name in ("qkv", "gate_up") else x
    return linear.gated(rows, "silu") if name == "gate_up" else linear(rows)


def compile_tile(job: tuple[str, int, Tile | None]) -> None:
    """Compiles the kernel of a tile in a process of its own. Few columns give the same kernel."""
    name, num_rows, tile = job
    shape = (256, MATRICES[name][1])
    few_rows_int4.few_rows_tile = lambda *args, **kwargs: tile or DEFAULT_TILE(num_rows, *MATRICES[name], **kwargs)
    one_row_int4.one_row_tile = lambda *args: tile or DEFAULT_ROW_TILE(*MATRICES[name])
    x = random_rows(num_rows, shape[1])
    run_matrix(name, random_linear(shape)[0], x, torch.ones(shape[1], device="cuda"))
    torch.cuda.synchronize()


class Chain:
    """Layers with weights of their own, and one row or more that go through them."""

    def __init__(self, layers: list[dict[str, Any]], num_rows: int) -> None:
        self._layers = layers
        self._x, self._mixed = random_rows(num_rows, 4096), random_rows(num_rows, 4096)
        self._residual = random_rows(num_rows, 4096)
        self._gain = torch.ones(4096, device="cuda")

    def _normed(self, x: Tensor, residual: Tensor, linear: Any) -> tuple[Any, Tensor]:
        if linear.takes_unnormed(x):
            total = torch.empty_like(x)
            return UnnormedRows(x, residual, total, self._gain, 1e-5), total
        return add_rms_norm(x, residual, self._gain, 1e-5), residual

    def _run(self) -> None:
        x, residual = self._x, self._residual
        for layer in self._layers:
            rows, residual = self._normed(x, residual, layer["qkv"])
            layer["qkv"](rows)
            rows, residual = self._normed(layer["o"](self._mixed), residual, layer["gate_up"])
            x = layer["down"](layer["gate_up"].gated(rows, "silu"))

    def us_per_layer(self, seconds: float = 0.03) -> float:
        self._run()
        return round(graph_seconds([self._run] * 3, seconds) * 1e6 / len(self._layers), 2)


def check(name: str, num_rows: int, case: tuple[Int4Linear, Tensor]) -> float:
    """Returns the error of the tile in use against the dequantized matrix."""
    linear, matrix = case
    x, gain = random_rows(num_rows, matrix.shape[1]), torch.rand(matrix.shape[1], device="cuda") + 0.5
    rows = reference.rms_norm(x, gain, 1e-5) if name in ("qkv", "gate_up") else x
    expected = rows.float() @ matrix.t()
    if name == "gate_up":
        expected = reference.silu_and_mul(expected)
    return relative_error(run_matrix(name, linear, x, gain), expected)


def compiled_tiles(budget: float, num_rows: Sequence[int]) -> dict[tuple[str, int], list[Tile]]:
    """Compiles the tiles to try, and returns those that were compiled within half of the time."""
    jobs: list[tuple[str, int, Tile | None]] = [(name, rows, None) for rows in num_rows for name in MATRICES]
    jobs += [(name, rows, tile) for rows in num_rows for name in MATRICES for tile in tiles_to_try(name, rows)]
    started = time.perf_counter()
    futures: dict[Future[None], tuple[str, int, Tile | None]] = {}
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(compile_tile, job): job for job in jobs}
        done = wait(futures, timeout=budget / 2).done
        pool.shutdown(cancel_futures=True)
    found: dict[tuple[str, int], list[Tile]] = {}
    for future in done:
        name, rows, tile = futures[future]
        if error := future.exception():
            print(f"not compiled: {name} {rows} {tile}: {str(error)[:200]}", flush=True)
        elif tile is not None:
            found.setdefault((name, rows), []).append(tile)
    print(f"compiled {len(done)} of {len(jobs)} kernels in {time.perf_counter() - started:.0f} s", flush=True)
    return found


def chain(budget: float, num_rows: Sequence[int], *, has_sweep: bool) -> dict[str, Any]:
    """Measures layers of a model: bfloat16, the kernel for all numbers of rows, and that for few with its tiles."""
    started = time.perf_counter()
    tiles = compiled_tiles(budget, num_rows) if has_sweep else {}
    layers, cases = [], {}
    for _ in range(NUM_LAYERS):
        layer = {}
        for name, shape in MATRICES.items():
            layer[name], weight = random_linear(shape)
            cases[name] = (layer[name], dequantize(weight))
        layers.append(layer)
    plain = [{name: Linear(random_rows(*shape) * 0.02, None) for name, shape in MATRICES.items()} for _ in range(2)]
    found: dict[str, Any] = {"chains": [], "tiles": []}
    for rows in num_rows:
        times = {"rows": rows, "bf16_us": Chain(plain, rows).us_per_layer()}
        few_rows_int4.MAX_ROWS = 0
        times |= {"errors_before": {name: check_all(name, rows, cases) for name in MATRICES}}
        times |= {"before_us": Chain(layers, rows).us_per_layer()}
        few_rows_int4.MAX_ROWS = DEFAULT_MAX_ROWS
        times |= {"errors": {name: check_all(name, rows, cases) for name in MATRICES}}
        times |= {"few_rows_us": Chain(layers, rows).us_per_layer()}
        print(times, flush=True)
        found["chains"].append(times)
    for rows, name in itertools.product(num_rows, MATRICES):
        for tile in tiles.get((name, rows), []):
            if time.perf_counter() - started > budget:
                print("out of time", flush=True)
                return found
            found["tiles"].append(tile_times(name, rows, tile, layers, cases))
        print_best(name, rows, found["tiles"])
    for times in found["chains"]:
        times["best_tiles_us"] = with_best_tiles(times["rows"], layers, found["tiles"])
        print(
            f"{times['rows']} rows with the best tile of each matrix: {times['best_tiles_us']} us a layer", flush=True
        )
    return found


def check_all(name: str, rows: int, cases: dict[str, tuple[Int4Linear, Tensor]]) -> float:
    error = check(name, rows, cases[name])
    assert error < MAX_ERROR, (name, rows, error)
    return round(error, 5)


def tile_times(
    name: str,
    rows: int,
    tile: Tile,
    layers: list[dict[str, Int4Linear]],
    cases: dict[str, tuple[Int4Linear, Tensor]],
) -> dict[str, Any]:
    use_tile(name, tile)
    error = check(name, rows, cases[name])
    chain_us = Chain(layers, rows).us_per_layer(0.02)
    x, gain = random_rows(rows, MATRICES[name][1]), torch.ones(MATRICES[name][1], device="cuda")
    calls = [lambda linear=layer[name]: run_matrix(name, linear, x, gain) for layer in layers]
    alone_us = round(graph_seconds(calls, 0.01) * 1e6, 2)  # with the norm before it, as a kernel where it is one
    use_tile(name, None)
    assert error < MAX_ERROR, (name, rows, tile, error)
    return {"matrix": name, "rows": rows, "tile": tile, "chain_us": chain_us, "alone_us": alone_us, "error": error}


def print_best(name: str, rows: int, found: list[dict[str, Any]]) -> None:
    mine = sorted((each for each in found if (each["matrix"], each["rows"]) == (name, rows)), key=by_chain)
    for each in mine:
        times = f"chain {each['chain_us']:7.2f} us  alone {each['alone_us']:7.2f}  error {each['error']:.5f}"
        print(f"{name:8} {rows:3} rows  {times}  {each['tile']}", flush=True)


def by_chain(found: dict[str, Any]) -> float:
    return float(found["chain_us"])


def with_best_tiles(rows: int, layers: list[dict[str, Int4Linear]], found: list[dict[str, Any]]) -> float | None:
    for name in MATRICES:
        mine = [each for each in found if (each["matrix"], each["rows"]) == (name, rows)]
        if not mine:
            return None
        use_tile(name, min(mine, key=by_chain)["tile"])
    us = Chain(layers, rows).us_per_layer()
    for name in MATRICES:
        use_tile(name, None)
    return us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try other tile shapes")
    parser.add_argument("--chain", action="store_true", help="whole layers with 1, 4 and 16 rows")
    parser.add_argument("--budget", type=float, default=60, help="seconds for a sweep, half of them to compile")
    parser.add_argument("--rows", type=int, nargs="*", help="default: of a chain 1, 4 and 16, else up to 128")
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    record: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    record |= {"commit": arguments.commit}
    if arguments.chain:
        record |= chain(arguments.budget, arguments.rows or CHAIN_ROWS, has_sweep=arguments.sweep)
    elif arguments.sweep:
        sweep(arguments.budget)
        return
    else:
        record |= {"rows": measure(list(MATRICES), tuple(arguments.rows or ROWS))}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
