"""Time of small sums over two ranks through shared memory, with both ranks on one GPU.

    python benchmarks/peer_sums.py --json benchmarks/results/peer-sums-h200.json

The ranks are two streams of one process, so that their kernels run at the same time; each replays a CUDA graph of many
sums. This is the cost of the kernel and of its waits, without the links between GPUs: a lower bound of what ranks with
a GPU each need.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from about import record_facts

from headrace.kernels.gpu import peer_sum

NUM_SUMS = 200  # in a graph
NUM_REPLAYS = 9
KIB = (8, 32, 128, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record here")
    given = parser.parse_args()
    times = {f"{kib} KiB": _microseconds(kib) for kib in KIB}
    for size, each in times.items():
        print(f"{size:>8}  {each:6.2f} µs per sum")
    if given.json:
        record = {
            **record_facts(),
            "num_sums_in_a_graph": NUM_SUMS,
            "median_of_replays": NUM_REPLAYS,
            "microseconds_per_sum": times,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _microseconds(kib: int) -> float:
    memories = [torch.zeros(peer_sum.memory_bytes(2), dtype=torch.uint8, device="cuda") for _ in range(2)]
    end = torch.zeros(1, dtype=torch.int32, device="cuda")
    addresses = torch.tensor([each.data_ptr() for each in (*memories, end)], dtype=torch.int64, device="cuda")
    tensors = [torch.zeros(kib << 9, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]

    def add(rank: int, **halves: bool) -> None:
        peer_sum.sum_over_peers(tensors[rank], addresses, rank, timeout_s=5.0, **halves)

    def captured(rank: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            for _ in range(NUM_SUMS):
                add(rank)
        return graph

    for rank in range(2):  # compiles, with no rank that waits meanwhile
        add(1 - rank, sums=False)
        add(rank)
        add(1 - rank, pushes=False)
    graphs = [captured(rank) for rank in range(2)]
    times = []
    for _ in range(NUM_REPLAYS):
        torch.cuda.synchronize()
        begin, finish = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(streams[0])
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        finish.record(streams[0])
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(finish) / NUM_SUMS)
    return round(median(times), 2)


if __name__ == "__main__":
    main()
