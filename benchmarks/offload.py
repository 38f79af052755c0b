"""Steps with layers that stream from host memory, against the rate of the bus, on a GPU with random weights.

    python benchmarks/offload.py --json benchmarks/results/offload-h200.json

First the rate of plain copies from pinned memory, which is the limit. Then a model shape with several sizes of
`cpu_offload_gb`: seconds per token of a decode step, bytes that it copies, and their rate as a share of the limit.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from about import record_facts

from headrace import LLM, SamplingParams
from headrace.bench.engines.shapes import SHAPES, shape_directory
from headrace.dist.mesh import Mesh
from headrace.engine.offloading import sizes_of, streamed_layers
from headrace.models.shards import Shards
from headrace.runner.gpu.pinned_memory import pinned_memory

COPY_BYTES, NUM_COPIES = 512 << 20, 8
NUM_SEQS, PROMPT_LEN, OUTPUT_LEN = (1, 64), 64, 9


def bus_bytes_per_s() -> float:
    """The best of several copies of half a GiB."""
    source, target = pinned_memory(COPY_BYTES), torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(NUM_COPIES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, COPY_BYTES / (time.perf_counter() - started))
    return best


def step_seconds(llm: LLM, num_seqs: int) -> float:
    """Of a decode step: the difference between long and short answers, of the best of two rounds each."""
    prompts = [[1000 + 7 * i + j for j in range(PROMPT_LEN)] for i in range(num_seqs)]

    def seconds(num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        found = []
        for _ in range(2):
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found.append(time.perf_counter() - started)
        return min(found)

    return (seconds(OUTPUT_LEN) - seconds(1)) / (OUTPUT_LEN - 1)


def measure(directory: str, cpu_offload_gb: float, limit: float) -> dict[str, Any]:
    started = time.perf_counter()
    settings = {"load_format": "random", "max_model_len": 512, "max_num_seqs": max(NUM_SEQS), "dtype": "bfloat16"}
    with LLM(directory, cpu_offload_gb=cpu_offload_gb, enable_prefix_caching=False, **settings) as llm:
        ready_s = time.perf_counter() - started
        sizes = sizes_of(Shards(llm.spec, Mesh()), element_bytes=2, kind=None)
        streamed = streamed_layers(sizes, cpu_offload_gb)
        copied = streamed.num_bytes
        found: dict[str, Any] = {
            "cpu_offload_gb": cpu_offload_gb,
            "layers": len(streamed.indexes),
            "gib_per_step": round(copied / 2**30, 3),
            "ready_s": round(ready_s, 1),
            "kv_cache_tokens": llm.settings.kv_cache_size_tokens,
        }
        for num_seqs in NUM_SEQS:
            seconds = step_seconds(llm, num_seqs)
            found[f"{num_seqs} sequences"] = {
                "step_ms": round(1e3 * seconds, 2),
                "tokens_per_s": round(num_seqs / seconds, 1),
                "share_of_bus": round(copied / seconds / limit, 3),
            }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--gib", nargs="*", type=float, default=[0.0, 4.0, 12.0], help="sizes of cpu_offload_gb")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    limit = bus_bytes_per_s()
    print(f"bus: {limit / 1e9:.1f} GB/s", flush=True)
    record: dict[str, Any] = {
        **record_facts(),
        "gpu": torch.cuda.get_device_name(),
        "model": given.model,
        "bus_gb_per_s": round(limit / 1e9, 2),
        "runs": [],
    }
    with shape_directory(given.model) as directory:
        for gib in given.gib:
            record["runs"].append(measure(str(directory), gib, limit))
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
