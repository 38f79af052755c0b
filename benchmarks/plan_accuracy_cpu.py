"""Fits the constants of `headrace plan` for CPUs on records of one CPU, and compares its predictions with others.

    python benchmarks/plan_accuracy_cpu.py         on the machine of the records, idle: fit, compare, write the record
    python benchmarks/plan_accuracy_cpu.py --check with the constants as they are and the rates in the record

Fitted on the default model (`packed-cpu.json`): 1 to 128 sequences with packed weights, in float32 and in INT8. Held
out: a 1B with 1 to 16 sequences (`packed-cpu-1b-q4_0.json`). Rates of the machine are what `hostprobe` measures. The
constants go to src/headrace/plan/constants.py by hand: a test compares the two.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.engines.shapes import SHAPES
from headrace.models.hub_config import spec_from_config
from headrace.models.quantized import PackedBits
from headrace.plan.constants import CPU, Constants
from headrace.plan.gpus import Gpu, cpu
from headrace.plan.hostprobe import measure_host
from headrace.plan.memory import fit as fit_memory
from headrace.plan.precision import Precision
from headrace.plan.prediction import speed_of
from headrace.plan.roofline import Machine
from headrace.plan.settings import PlanSettings, limits_of
from headrace.plan.shape import ModelShape, shape_of_spec
from headrace.plan.source import find_shape
from headrace.plan.workload import uniform

RESULTS = Path(__file__).parent / "results"
RECORD = RESULTS / "plan-accuracy-cpu.json"
VOCAB_SIZE = 49_152  # of the 1B: `random_gguf.py` gives it the default model's tokenizer
Q4_0 = PackedBits(layers=4.5, head=8.5, embeddings=8.5)
MEMORY_BYTES = 16 << 30
# Constants that are fitted, each with those that have the same value on a CPU.
FITTED = {
    "weight_reads": ("few_weight_reads", "weight_reads_fp8"),
    "gemm": ("gemm_fp8",),
    "narrow": (),
    "cache_reads": (),
    "activations": (),
    "layer_seconds": ("few_layer_seconds", "one_layer_seconds", "packed_layer_seconds"),
    "seq_layer_seconds": (),
    "step_seconds": (),
    "request_seconds": (),
}
START = {
    "weight_reads": 0.7,
    "gemm": 1.2,
    "narrow": 100.0,
    "cache_reads": 0.4,
    "activations": 1.0,
    "layer_seconds": 2e-5,
    "seq_layer_seconds": 1e-6,
    "step_seconds": 1e-3,
    "request_seconds": 2e-4,
}
PRIOR_WIDTH = math.log(2.0)
NOISE = 0.05  # of a measurement: the machine is shared


@dataclass(frozen=True)
class Case:
    model: str
    engine: str
    num_seqs: int
    lens: tuple[int, int]
    measured: float  # output tokens/s
    is_held_out: bool

    @property
    def precision(self) -> Precision:
        if self.engine == "int8":
            return Precision("int8", is_wide=True)
        wide = Precision("float32", is_wide=True)
        return wide if self.engine == "float32" else replace(wide, packed=packed_bits(self.model))

    def predicted(self, gpu: Gpu, constants: Constants) -> float:
        shape, settings = shape_of(self.model), fit_memory(shape_of(self.model), gpu, self.precision, PlanSettings())
        assert settings.settings is not None
        lengths = uniform(*self.lens, num_requests=self.num_seqs)
        machine = Machine(gpu, constants)
        return speed_of(shape, self.precision, machine, lengths, limits_of(settings.settings)).output_tokens_per_s


def shape_of(model: str) -> ModelShape:
    if model == "smollm2":
        return find_shape(model)
    return shape_of_spec(model, spec_from_config({**SHAPES["llama-3.2-1b"], "vocab_size": VOCAB_SIZE}))


def packed_bits(model: str) -> PackedBits:
    spec = find_shape(model).spec if model == "smollm2" else None
    return Q4_0 if spec is None or spec.packed_bits is None else spec.packed_bits


def cases() -> Iterator[Case]:
    for name, model in (("packed-cpu", "smollm2"), ("packed-cpu-1b-q4_0", "1B")):
        found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        lens = found["prompt_len"], found["answer_len"]
        for engine in ("packed", "float32", "int8"):
            for num_seqs, rate in found["engines"][engine]["median"].items():
                yield Case(model, engine, int(num_seqs), lens, rate, is_held_out=model != "smollm2")


def constants_of(values: dict[str, float]) -> Constants:
    same = {other: values[name] for name, others in FITTED.items() for other in others}
    return replace(CPU, **values, **same)


def fit_constants(known: list[Case], gpu: Gpu) -> Constants:
    from plan_accuracy import gauss_newton

    names, start = list(FITTED), np.log(list(START.values()))
    measured = np.log([case.measured for case in known])

    def residuals(at: np.ndarray) -> np.ndarray:
        constants = constants_of(dict(zip(names, np.exp(at).tolist(), strict=True)))
        errors = np.log([case.predicted(gpu, constants) for case in known]) - measured
        return np.concatenate((errors / NOISE, (at - start) / PRIOR_WIDTH))

    best = np.exp(gauss_newton(residuals, start)).tolist()
    return constants_of({name: float(f"{value:.2g}") for name, value in zip(names, best, strict=True)})


def rows_of(gpu: Gpu, constants: Constants) -> list[dict[str, Any]]:
    rows = []
    for case in cases():
        predicted = case.predicted(gpu, constants)
        rows.append(
            {
                "model": case.model,
                "weights": case.engine,
                "num_seqs": case.num_seqs,
                "used": "held out" if case.is_held_out else "fitted",
                "measured_out_tok_s": case.measured,
                "predicted_out_tok_s": round(predicted, 1),
                "error": round(predicted / case.measured - 1.0, 3),
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in ("fitted", "held out"):
        errors = [abs(row["error"]) for row in rows if row["used"] == kind]
        found[kind] = {"max_error": max(errors), "mean_error": round(float(np.mean(errors)), 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fit and write nothing")
    given = parser.parse_args()
    if given.check:
        rates = json.loads(RECORD.read_text(encoding="utf-8"))["host"]
    else:
        best = [measure_host(2) for _ in range(5)]
        rates = {"bandwidth": max(each.bandwidth for each in best), "flops": max(each.flops for each in best)}
    gpu = cpu(bandwidth=rates["bandwidth"], flops=rates["flops"], memory_bytes=MEMORY_BYTES)
    constants = CPU if given.check else fit_constants([case for case in cases() if not case.is_held_out], gpu)
    rows = rows_of(gpu, constants)
    for row in rows:
        print("{model:<8} {weights:<8} {num_seqs:>4} {measured_out_tok_s:>8.1f} {predicted_out_tok_s:>8.1f} "
              "{error:>+7.1%} {used}".format(**row))  # fmt: skip
    print(summary(rows))
    if not given.check:
        from about import commit, cpu_name

        record = {
            "command": "python benchmarks/plan_accuracy_cpu.py",
            "commit": commit(),
            "machine": cpu_name(),
            "host": rates,
            "constants": asdict(constants),
            "summary": summary(rows),
            "rows": rows,
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
