"""GEMMs of a CPU with weights of 32, eight and four bits, for the matrices of a model.

python benchmarks/gemm_cpu.py --json benchmarks/results/gemm-cpu.json

float32     panels of weights (kernels/cpu/gemm.py)
int8        the same for INT8 weights and activations (kernels/cpu/gemm_int8.py)
packed 8    activations of 16 bits, weights of eight bits in groups of 32 as in Q5_1 (kernels/cpu/gemm_weight_only.py)
packed 4    the same with four bits, as in Q4_1
mkl         float32 weights packed by MKL, through torch
int8 mm     torch._int_mm (oneDNN), with rows quantized before it and scales applied after it
dynamic     torch.ops.quantized.linear_dynamic (FBGEMM): INT8 weights and activations, one scale per tensor of input

A round multiplies by the weights of many layers in turn, so that they come from memory, as in a step. Rounds of all
candidates alternate; the best round counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.hardware import shorten_openmp_waits

shorten_openmp_waits()  # or torch's threads would take the cores of ours for a while after each of their rounds

import torch  # noqa: E402
from about import commit  # noqa: E402
from torch import Tensor  # noqa: E402

from headrace.kernels.cpu.linear import Int8Linear, PackedLinear, WeightOnlyLinear  # noqa: E402
from headrace.kernels.quantized import GroupedWeight, quantize_int8  # noqa: E402

SHAPES = {  # N, K
    "smollm2-135m": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)},
    "llama-3.2-1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
}
GROUP_LEN = 32
ROWS = (1, 2, 4, 5, 8, 16, 64, 128, 512)
Linear = Callable[[Tensor], Tensor]


def candidates(weight: Tensor) -> dict[str, Linear]:
    quantized = quantize_int8(weight)
    scales, transposed = quantized.scales.flatten(), quantized.values.t()

    def int_mm(x: Tensor) -> Tensor:
        rows = x.abs().amax(1, keepdim=True) / 127
        sums = torch._int_mm((x / rows).round_().to(torch.int8), transposed)
        return sums.float().mul_(rows).mul_(scales)

    def packed(bits: int) -> WeightOnlyLinear:
        values = torch.randint(2**bits, weight.shape, dtype=torch.uint8)
        scales, minima = torch.rand(2, len(weight), weight.shape[1] // GROUP_LEN).half().float()
        return WeightOnlyLinear(GroupedWeight(values, scales, -minima, bits))

    zeros = torch.zeros(len(scales)).long()
    of_torch = torch.quantize_per_channel(weight, scales.double(), zeros, 0, torch.qint8)
    prepacked = torch.ops.quantized.linear_prepack(of_torch, None)
    by_mkl, shape = torch.ops.mkl._mkl_reorder_linear_weight(weight, 256), torch.zeros(1, 1).expand(weight.shape)
    return {
        "float32": PackedLinear(weight),
        "int8": Int8Linear(quantized),
        "packed 8": packed(8),
        "packed 4": packed(4),
        "mkl": lambda x: torch.ops.mkl._mkl_linear(x, by_mkl, shape, None, len(x)),
        "int8 mm": int_mm,
        "dynamic": lambda x: torch.ops.quantized.linear_dynamic(x, prepacked),
    }


def measure(matrices: dict[str, tuple[int, int]], num_layers: int, num_rounds: int) -> list[dict[str, Any]]:
    """Returns microseconds of a layer's four GEMMs, for each number of rows."""
    layers = [(shape[1], candidates(torch.randn(shape))) for _ in range(num_layers) for shape in matrices.values()]
    found = []
    for num_rows in ROWS:
        inputs = {width: torch.randn(num_rows, width) for width in {shape[1] for shape in matrices.values()}}
        best = dict.fromkeys(layers[0][1], float("inf"))
        for _ in range(num_rounds):
            for name in best:
                started = time.perf_counter()
                for width, linears in layers:
                    linears[name](inputs[width])
                best[name] = min(best[name], (time.perf_counter() - started) / num_layers)
        found.append({"rows": num_rows, **{name: round(seconds * 1e6, 1) for name, seconds in best.items()}})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*deprecated.*")
    torch.backends.quantized.engine = "fbgemm"
    torch.set_num_threads(given.threads)
    record: dict[str, Any] = {
        "unit": "microseconds of one layer's four GEMMs",
        "model": given.model,
        "layers": given.layers,
        "threads": given.threads,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "commit": commit(),
    }
    record["rows"] = measure(SHAPES[given.model], given.layers, given.rounds)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
