"""Whether weights of eight bits are faster than float32 on a CPU, for the matrices of the default model.

python benchmarks/int8_cpu.py --json benchmarks/results/int8-cpu.json

float32     what Headrace uses: weights packed by MKL
int8 mm     torch._int_mm (oneDNN), with rows quantized before it and scales applied after it
dynamic     torch.ops.quantized.linear_dynamic (FBGEMM): INT8 weights and activations, one scale per tensor of input
weight      torch.ops.aten._weight_int8pack_mm: INT8 weights, activations in bfloat16
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.kernels.cpu import linear as cpu_linear

MATRICES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}  # N, K; 30 layers
ROWS = (1, 8, 64, 128, 512)
SECONDS = 0.15


def seconds_of(call: Callable[[], Any]) -> float:
    """The best mean of five parts."""
    call()
    best = float("inf")
    for _ in range(5):
        count, started = 0, time.perf_counter()
        while time.perf_counter() - started < SECONDS / 5:
            call()
            count += 1
        best = min(best, (time.perf_counter() - started) / count)
    return best


def candidates(weight: torch.Tensor, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    scales = weight.abs().amax(1) / 127
    values = (weight / scales[:, None]).round().to(torch.int8)
    transposed = values.t()
    packed = cpu_linear.pack_linear(weight)

    def int_mm() -> torch.Tensor:
        rows = x.abs().amax(1, keepdim=True) / 127
        sums = torch._int_mm((x / rows).round_().to(torch.int8), transposed)
        return sums.float().mul_(rows).mul_(scales)

    quantized = torch.quantize_per_channel(weight, scales.double(), torch.zeros(len(scales)).long(), 0, torch.qint8)
    prepacked = torch.ops.quantized.linear_prepack(quantized, None)
    half, of_half = x.bfloat16(), scales.bfloat16()
    return {
        "float32": lambda: packed(x),
        "int8 mm": int_mm,
        "dynamic": lambda: torch.ops.quantized.linear_dynamic(x, prepacked),
        "weight": lambda: torch.ops.aten._weight_int8pack_mm(half, values, of_half),
    }


def measure(num_threads: int) -> list[dict[str, Any]]:
    torch.set_num_threads(num_threads)
    found = []
    for num_rows in ROWS:
        row: dict[str, Any] = {"rows": num_rows}
        for shape in MATRICES.values():
            for name, call in candidates(torch.randn(shape), torch.randn(num_rows, shape[1])).items():
                try:
                    seconds = seconds_of(call)
                except RuntimeError as error:
                    row[f"{name} failed"] = str(error).splitlines()[0][:100]
                    continue
                row[name] = row.get(name, 0.0) + seconds * 1e6
        found.append({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--commit", help="commit of the code, if git cannot tell")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args()
    torch.backends.quantized.engine = "fbgemm"
    record: dict[str, Any] = {
        "unit": "microseconds of one layer's four GEMMs",
        "threads": arguments.threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "commit": arguments.commit,
    }
    record["rows"] = measure(arguments.threads)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
