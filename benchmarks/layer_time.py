"""Time of a decoder layer in decode steps of few sequences, in CUDA graphs of whole layers with random weights.

    python benchmarks/layer_time.py --model llama-3.1-8b --quantization fp8 --rows 1 4 16
    python benchmarks/layer_time.py --model llama-3.1-8b --quantization fp8 --rows 16 --sweep --budget 90

What is best for a GEMM alone is not best between other kernels, so tiles are chosen here: `--sweep` replaces the tile
of one matrix after the other (`one_row.py`, `few_rows.py`, `few_rows_int4.py`; routers and experts: `few_routes.py`,
`sorted_experts.py`), keeps the best, and prints the fastest few of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from about import commit
from triton.runtime.errors import OutOfResources

from headrace.bench.engines.shapes import SHAPES, shape_directory
from headrace.kernels.gpu import few_routes, few_rows, few_rows_int4, one_row, sorted_experts
from headrace.kernels.gpu.few_routes import RouterTile
from headrace.kernels.gpu.few_rows import FewRowsTile
from headrace.kernels.gpu.few_rows_int4 import FewRowsTile as Int4Tile
from headrace.kernels.gpu.one_row import RowTile
from headrace.kernels.gpu.sorted_experts import ExpertTile
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.runner.gpu.context_splits import programs_per_decode, splits_of

BLOCK_SIZE = 16
VOCABULARY = 4096  # the head is not part of a layer
NUM_PROCESSES = 14  # that compile
Matrix = tuple[int, int, bool]  # columns of the output, width, whether it is gate and up
Tile = RowTile | FewRowsTile | Int4Tile | RouterTile | ExpertTile
T = TypeVar("T", RowTile, FewRowsTile, Int4Tile, RouterTile, ExpertTile)
_tiles: dict[Matrix, Tile] = {}  # what the sweep uses instead of the tiles of the engine
_seen: dict[Matrix, Tile] = {}
_row_tile, _few_rows_tile, _int4_tile = one_row.row_tile, few_rows.few_rows_tile, few_rows_int4.few_rows_tile
_router_tile, _expert_tile = few_routes.router_tile, sorted_experts.expert_tile


def chosen_row_tile(num_columns: int, width: int, *, has_norm: bool, is_gated: bool) -> RowTile:
    tile = _row_tile(num_columns, width, has_norm=has_norm, is_gated=is_gated)
    return chosen((num_columns, width, is_gated), tile)


def chosen_few_rows_tile(num_columns: int, width: int, scaling: int, *, is_gated: bool) -> FewRowsTile:
    return chosen((num_columns, width, is_gated), _few_rows_tile(num_columns, width, scaling, is_gated=is_gated))


def chosen_int4_tile(num_columns: int, width: int, *, is_gated: bool) -> Int4Tile:
    return chosen((num_columns, width, is_gated), _int4_tile(num_columns, width, is_gated=is_gated))


def chosen_router_tile(num_experts: int, width: int, element_size: int) -> RouterTile:
    return chosen((num_experts, width, False), _router_tile(num_experts, width, element_size))


def chosen_expert_tile(num_columns: int, width: int, *, is_gated: bool) -> ExpertTile:
    return chosen((num_columns, width, is_gated), _expert_tile(num_columns, width, is_gated=is_gated))


def chosen(matrix: Matrix, tile: T) -> T:
    """The sweep's tile, or this one. Of a quantized model some matrices have 16 bits, and tiles of another kind."""
    _seen.setdefault(matrix, tile)
    found = _tiles.get(matrix, tile)
    return found if isinstance(found, type(tile)) else tile


class Step:
    """A decode step of sequences with the same context, as a CUDA graph."""

    def __init__(self, decoder: Decoder, num_rows: int, context: int) -> None:
        self.decoder, device = decoder, decoder.device
        per_seq = -(-context // BLOCK_SIZE)
        order = torch.randperm(num_rows * per_seq, dtype=torch.int32, device=device).view(num_rows, per_seq)
        last = torch.full((num_rows,), context - 1, device=device)
        spec = decoder.spec
        self.layout = StepLayout(
            positions=last,
            slot_mapping=order[:, -1].long() * BLOCK_SIZE + last % BLOCK_SIZE,
            query_starts=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.full((num_rows,), context, dtype=torch.int32, device=device),
            slots=torch.arange(num_rows, dtype=torch.int32, device=device),
            block_tables=order,
            max_query_len=1,
            max_context_len=context,
            num_decodes=num_rows,
            splits=replace(
                splits_of(num_rows, programs_per_decode(spec), spec.head_dim, 4096),
                arrivals=torch.zeros(num_rows * spec.num_kv_heads, dtype=torch.int32, device=device),
            ),
            has_few_decodes=num_rows <= few_rows.MAX_ROWS,
        )
        self.caches: list[LayerCache] = []
        for _ in decoder.layers:
            cache = decoder.allocate_cache(num_rows * per_seq, BLOCK_SIZE)
            cache.keys.normal_()
            cache.values.normal_()
            self.caches.append(cache)
        generator = torch.Generator().manual_seed(0)
        self.token_ids = torch.randint(0, VOCABULARY, (num_rows,), generator=generator).to(device)

    def run(self) -> torch.Tensor:
        return self.decoder.hidden(self.token_ids, self.layout, self.caches)

    def layer_us(self, seconds: float) -> float:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        graph.replay()
        torch.cuda.synchronize()
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() - started < seconds:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(5):
                graph.replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 5)
        return 1000 * best / len(self.decoder.layers)


def load(given: argparse.Namespace, num_layers: int) -> Decoder:
    one_row.row_tile, few_rows.few_rows_tile = chosen_row_tile, chosen_few_rows_tile
    few_rows_int4.few_rows_tile = chosen_int4_tile
    few_routes.router_tile, sorted_experts.expert_tile = chosen_router_tile, chosen_expert_tile
    overrides = {"num_hidden_layers": num_layers, "vocab_size": VOCABULARY}
    with shape_directory(given.model) as directory:
        checkpoint = open_checkpoint(str(directory), load_format="random", hf_overrides=overrides)
        return load_decoder(
            checkpoint,
            dtype=torch.bfloat16,
            device="cuda",
            quantization=given.quantization,
            load_format="random",
            max_len=4096,
        )


def router_tiles(num_experts: int, width: int) -> list[Tile]:
    found: list[Tile] = []
    for columns, depth, warps in itertools.product((16, 32, 64, 128), (64, 128, 256, 512), (2, 4, 8)):
        if width % depth == 0 and columns <= num_experts and columns * depth // (32 * warps) <= 256:
            found.append(RouterTile(columns, depth, warps))
    return found


def expert_tiles(matrix: Matrix) -> list[Tile]:
    num_columns, width, _ = matrix
    shapes = itertools.product((64, 128), (64, 128, 256), (2, 3, 4, 5, 6), (4, 8))
    return [
        ExpertTile(columns, depth, stages, warps)
        for columns, depth, stages, warps in shapes
        if num_columns % columns == 0 and width % depth == 0
    ]


def int4_tiles(matrix: Matrix) -> list[Tile]:
    num_columns, width, is_gated = matrix
    found: list[Tile] = []
    shapes, splits_of = ((64, 4), (128, 4), (128, 8)), (1, 2) if is_gated else (2, 4, 8, 16)
    for (columns, warps), ahead, stages, splits in itertools.product(shapes, (0, 1, 2, 4), (3, 4, 5, 6), splits_of):
        num_blocks = width // 128 // splits
        is_whole = width % (128 * splits) == 0 and ahead <= num_blocks and num_columns % columns == 0
        if is_whole and (num_blocks - ahead >= stages or stages == 3):
            found.append(Int4Tile(columns, ahead, stages, splits, warps))
    return found


def tiles_to_try(matrix: Matrix, num_rows: int, quantization: str | None) -> list[Tile]:
    num_columns, width, is_gated = matrix
    found: list[Tile] = []
    if isinstance(_seen.get(matrix), RouterTile):
        return router_tiles(num_columns, width)
    if isinstance(_seen.get(matrix), ExpertTile):
        return expert_tiles(matrix)
    if quantization == "int4":
        return int4_tiles(matrix)
    if num_rows == 1 and quantization is None:
        for columns, depth, warps in itertools.product((2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8)):
            num_bytes = columns * depth * 2 * (2 if is_gated else 1) // (32 * warps)  # to a thread
            if width % depth == 0 and 32 <= num_bytes <= 256:
                found.append(RowTile(columns, depth, warps, 1))
        return found
    for depth, stages, splits in itertools.product((128, 256), (2, 3, 4, 5, 6, 8), (1,) if is_gated else (1, 2, 4, 8)):
        for first in (0, depth):
            if width % (splits * depth) == 0 and width > splits * (depth + first):
                found.append(FewRowsTile(depth, first, stages, splits))
    return found


def compile_share(given: argparse.Namespace, num_rows: int, jobs: list[tuple[Matrix, Tile]]) -> list[Tile]:
    """Compiles tiles in a process of its own, into Triton's cache. Returns those that fail."""
    step, failed = Step(load(given, 2), num_rows, given.context), []
    with torch.inference_mode():
        for matrix, tile in jobs:
            _tiles.clear()
            _tiles[matrix] = tile
            try:
                step.run()
            except OutOfResources:
                failed.append(tile)
        torch.cuda.synchronize()
    return failed


def sweep(given: argparse.Namespace, step: Step, num_rows: int) -> dict[str, Any]:
    step.run()
    matrices = [each for each in _seen if given.matrix is None or each[0] in given.matrix]
    jobs = [(matrix, tile) for matrix in matrices for tile in tiles_to_try(matrix, num_rows, given.quantization)]
    started = time.perf_counter()
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, given, num_rows, jobs[i::NUM_PROCESSES]) for i in range(NUM_PROCESSES)]
        failed = [tile for share in shares for tile in share.result()]
    print(f"compiled {len(jobs)} in {time.perf_counter() - started:.0f} s, {len(failed)} failed", flush=True)
    started, found = time.perf_counter(), {}
    for matrix in matrices:
        times = [(round(step.layer_us(0.05), 2), _seen[matrix])]
        for tile in tiles_to_try(matrix, num_rows, given.quantization):
            if time.perf_counter() - started > given.budget or tile in failed:
                continue
            _tiles[matrix] = tile
            try:
                times.append((round(step.layer_us(0.02), 2), tile))
            except OutOfResources as error:
                print(matrix, tile, error, flush=True)
            del _tiles[matrix]
        best = sorted(times, key=lambda each: each[0])[:6]
        _tiles[matrix] = best[0][1]
        found[str(matrix)] = {"in use": times[0], "best": best}
        print(num_rows, matrix, times[0], best, flush=True)
    final = round(step.layer_us(0.2), 2)
    print("with the best of each:", final, flush=True)
    return found | {"with the best of each": final}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--quantization", choices=["fp8", "int8", "int4"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=550, help="tokens of each sequence")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    parser.add_argument("--matrix", nargs="*", type=int, help="only matrices with so many columns of output")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of a sweep, without compiling")
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    record: dict[str, Any] = {"model": given.model, "quantization": given.quantization, "context": given.context}
    record |= {"commit": given.commit or commit(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    decoder = load(given, given.layers)
    with torch.inference_mode():
        for num_rows in given.rows:
            _tiles.clear()
            _seen.clear()
            step = Step(decoder, num_rows, given.context)
            record[f"{num_rows} rows, us a layer"] = round(step.layer_us(0.3), 2)
            print(given.model, given.quantization, num_rows, record[f"{num_rows} rows, us a layer"], flush=True)
            if given.sweep:
                record[f"{num_rows} rows, sweep"] = sweep(given, step, num_rows)
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
