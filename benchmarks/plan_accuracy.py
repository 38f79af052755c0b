"""Fits the constants of `headrace plan` on some H200 records and compares its predictions with the others.

    python benchmarks/plan_accuracy.py            fit, compare, write benchmarks/results/plan-accuracy.json
    python benchmarks/plan_accuracy.py --check    compare with the constants as they are, write nothing

Fitted on: llama-3.2-1b and llama-3.1-8b, in bfloat16 and FP8, and the mixture qwen3-30b-a3b with the chat workload and
with one sequence. Held out, never seen by the fit: every record of llama-3.2-3b and of qwen3-8b, and 16 sequences of
qwen3-30b-a3b, and 4 sequences of llama-3.1-8b in four and eight bits. Of each model, workload and number format only
the newest record counts. Records of 16 sequences and of one sequence, 512 tokens in and 512 out, are from
`few-h200.jsonl`, those in four and eight bits, 64 in and 256 out, from `quantized-speed-h200.json`. Those of the server
with 16 clients are left out: they are older than the kernels for few sequences.

The constants go to src/headrace/plan/constants.py by hand: a test compares the two.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from headrace.plan.constants import FEW_ROWS, H200, Constants
from headrace.plan.gpus import find_gpu
from headrace.plan.memory import fit as fit_memory
from headrace.plan.precision import Precision
from headrace.plan.prediction import speed_of
from headrace.plan.roofline import Machine
from headrace.plan.settings import PlanSettings, limits_of
from headrace.plan.simulate import StepLimits, Steps, simulate
from headrace.plan.source import find_shape
from headrace.plan.workload import Workload, named, of_lengths, uniform

RESULTS = Path(__file__).parent / "results"
RECORD = RESULTS / "plan-accuracy.json"
OFFLINE_FILES = ("offline-h200.jsonl", "restructure-h200.jsonl")
FEW = {"few": [(512, 512)] * 16, "alone": [(512, 512)]}
HELD_OUT_MODELS = ("llama-3.2-3b", "qwen3-8b")
HELD_OUT_ROWS = (("qwen3-30b-a3b", "few"), ("llama-3.1-8b", "short 4"))
PRECISIONS = {"bfloat16": Precision(), "fp8": Precision("fp8", "fp8")}
PACKED_PRECISIONS = {"fp8 weights": Precision("fp8"), "int8": Precision("int8"), "int4": Precision("int4")}
PRECISIONS |= PACKED_PRECISIONS
MAX_HELD_OUT_ERROR = 0.15

# The fit starts here, at what single kernels were measured to reach, and may leave each by about this factor.
START = Constants(
    weight_reads=0.88,
    few_weight_reads=0.89,
    weight_reads_fp8=0.46,  # all GEMMs of a layer of the 8B at 64 rows: 99 us (docs/experiments.md)
    cache_reads=0.92,
    gemm=0.70,
    gemm_fp8=0.65,
    narrow=300.0,
    prefill_attention=0.45,
    activations=1.0,
    quantize=1.0,
    layer_seconds=29e-6,  # fitted when 16 sequences and one had no kernels of their own; no record has 17 to 64
    few_layer_seconds=20e-6,
    one_layer_seconds=10e-6,
    packed_layer_seconds=32e-6,
    packed_row_seconds=0.75e-6,
    seq_layer_seconds=1e-8,
    step_seconds=1e-4,
    request_seconds=2e-5,
    mixture_layer_seconds=15e-6,
    few_mixture_layer_seconds=10e-6,
    mixture_gemm=0.5,
)
USUAL_FACTOR = 1.25
LOOSE = {
    "weight_reads_fp8": 1.05,  # no record has small batches in FP8
    "cache_reads": 1.05,  # it cannot exceed the bandwidth
    "narrow": 2.0,
    "few_weight_reads": 1.05,  # as above
    "layer_seconds": 1.1,
    "few_layer_seconds": 2.0,
    "one_layer_seconds": 2.0,
    "packed_layer_seconds": 2.0,
    "packed_row_seconds": 2.0,
    "few_mixture_layer_seconds": 3.0,
    "seq_layer_seconds": 2.0,
    "mixture_layer_seconds": 3.0,
    "mixture_gemm": 3.0,
    "activations": 1.6,
    "quantize": 1.6,
    "step_seconds": 1.6,
    "request_seconds": 1.6,
}
NOISE = 0.03  # of a measurement: machines of the same kind differ by 1 to 3 %


@dataclass(frozen=True)
class Case:
    """A record and what is needed to predict it."""

    model: str
    workload: str
    dtype: str
    measured: float
    commit: str
    num_steps: int | None  # as recorded
    is_held_out: bool
    lengths: Workload
    limits: StepLimits
    steps: Steps

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.dtype]

    def predicted(self, constants: Constants) -> float:
        machine = Machine(find_gpu("H200"), constants)
        shape = find_shape(self.model)
        return speed_of(shape, self.precision, machine, self.lengths, self.limits, steps=self.steps).seconds


def cases() -> list[Case]:
    return [*_offline_cases(), *_few_cases(), *_short_cases()]


def _offline_cases() -> Iterator[Case]:
    rows = sorted((row for name in OFFLINE_FILES for row in read(name)), key=lambda row: row["date"])
    newest = {(row["model"], row["workload"], row["dtype"]): row for row in rows}
    for (model, workload, dtype), row in newest.items():
        yield _case(model, workload, dtype, row["seconds"], row["commit"], row["num_steps"], named(workload))


def _few_cases() -> Iterator[Case]:
    newest = {(row["model"], row["workload"], row["dtype"]): row for row in read("few-h200.jsonl")}
    for (model, workload, dtype), row in newest.items():
        lengths = of_lengths(workload, FEW[workload])
        yield _case(model, workload, dtype, row["seconds"], row["commit"], row["num_steps"], lengths)


def _short_cases() -> Iterator[Case]:
    """Few sequences in four and eight bits."""
    found = json.loads((RESULTS / "quantized-speed-h200.json").read_text(encoding="utf-8"))
    names = {"fp8": "fp8 weights", "int8": "int8", "int4": "int4"}
    for row in found["formats"]:
        for count in (1, 4, 16) if row["format"] in names else ():
            lengths = of_lengths(f"short {count}", [(64, 256)] * count)
            seconds = round(count * 256 / row[f"{count} sequences"], 4)
            yield _case(found["model"], f"short {count}", names[row["format"]], seconds, found["commit"], None, lengths)


def _case(
    model: str, workload: str, dtype: str, seconds: float, commit: str, num_steps: int | None, lengths: Workload
) -> Case:
    """Settings are the planned ones, not the recorded ones: what a user of `headrace plan` gets."""
    settings = fit_memory(
        find_shape(model), find_gpu("H200"), PRECISIONS[dtype], PlanSettings(max_model_len=4096)
    ).settings
    assert settings is not None, f"{model} does not fit"
    limits = limits_of(settings)
    is_held_out = model in HELD_OUT_MODELS or (model, workload) in HELD_OUT_ROWS
    steps = simulate(lengths, limits)
    return Case(model, workload, dtype, seconds, commit, num_steps, is_held_out, lengths, limits, steps)


def serving_rows(constants: Constants) -> list[dict[str, Any]]:
    """The newest closed-loop records of the server, which the fit does not use: rates include the HTTP front."""
    newest = {
        (row["model"], row["concurrency"]): row
        for row in read("serving-h200.jsonl")
        if "req_s" in row and "spread" not in row and row["prompt_len"] == 512 and row["concurrency"] > FEW_ROWS
    }
    rows = []
    for (model, clients), row in newest.items():
        lengths = uniform(512, 128, num_requests=row["requests"], concurrency=clients)
        shape, gpu = find_shape(model), find_gpu("H200")
        settings = fit_memory(shape, gpu, Precision(), PlanSettings()).settings
        assert settings is not None
        speed = speed_of(shape, Precision(), Machine(gpu, constants), lengths, limits_of(settings))
        rows.append(
            {
                "model": model,
                "concurrency": clients,
                "measured_out_tok_s": row["out_tok_s"],
                "predicted_out_tok_s": round(speed.output_tokens_per_s),
                "error": round(speed.output_tokens_per_s / row["out_tok_s"] - 1.0, 4),
                "measured_tpot_ms_p50": row["tpot_ms_p50"],
                "predicted_tpot_ms": round(1e3 * speed.tpot_s, 2),
                "commit": row["commit"],
            }
        )
    return rows


def fit_constants(known: list[Case]) -> Constants:
    """Gauss-Newton on the logarithms of seconds and constants, with the starting values as a prior."""
    names = [each.name for each in fields(Constants)]
    start = np.log([getattr(START, name) for name in names])
    widths = np.array([math.log(LOOSE.get(name, USUAL_FACTOR)) for name in names])
    measured = np.log([case.measured for case in known])

    def residuals(at: np.ndarray) -> np.ndarray:
        constants = Constants(**dict(zip(names, np.exp(at).tolist(), strict=True)))
        errors = np.log([case.predicted(constants) for case in known]) - measured
        return np.concatenate((errors / NOISE, (at - start) / widths))

    best = gauss_newton(residuals, start)
    return Constants(**{name: float(f"{value:.3g}") for name, value in zip(names, np.exp(best).tolist(), strict=True)})


def gauss_newton(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    at, here = start, residuals(start)
    for _ in range(12):
        jacobian = np.empty((len(here), len(at)))
        for column in range(len(at)):
            moved = at.copy()
            moved[column] += 1e-4
            jacobian[:, column] = (residuals(moved) - here) / 1e-4
        step = np.linalg.lstsq(jacobian, -here, rcond=None)[0]
        scale = 1.0
        while scale > 1e-3 and (residuals(at + scale * step) ** 2).sum() > (here**2).sum():
            scale /= 2
        at = at + scale * step
        here = residuals(at)
        if float(np.abs(scale * step).max()) < 1e-4:
            break
    return at


def rows_of(all_cases: list[Case], constants: Constants) -> list[dict[str, Any]]:
    rows = []
    for case in all_cases:
        predicted = case.predicted(constants)
        rows.append(
            {
                "model": case.model,
                "workload": case.workload,
                "dtype": case.dtype,
                "used": "held out" if case.is_held_out else "fitted",
                "measured_s": case.measured,
                "predicted_s": round(predicted, 3),
                "error": round(predicted / case.measured - 1.0, 4),
                "measured_steps": case.num_steps,
                "predicted_steps": len(case.steps),
                "commit": case.commit,
            }
        )
    return sorted(rows, key=lambda row: (row["used"], row["model"], row["dtype"]))


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | int]]:
    kinds = {"fitted": [], "held out": []}  # type: dict[str, list[float]]
    for row in rows:
        kinds[row["used"]].append(abs(row["error"]))
    return {
        kind: {"records": len(found), "max_error": round(max(found), 4), "mean_error": round(float(np.mean(found)), 4)}
        for kind, found in kinds.items()
    }


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def record(constants: Constants) -> dict[str, Any]:
    rows = rows_of(cases(), constants)
    return {
        "gpu": "NVIDIA H200",
        "command": "python benchmarks/plan_accuracy.py",
        "constants": asdict(constants),
        "summary": summary(rows),
        "rows": rows,
        "serving": serving_rows(constants),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="use the constants of headrace.plan; write nothing")
    arguments = parser.parse_args()
    constants = H200 if arguments.check else fit_constants([case for case in cases() if not case.is_held_out])
    found = record(constants)
    for row in found["rows"]:
        print(
            "{used:9} {model:14} {workload:8} {dtype:9} {measured_s:8.2f} {predicted_s:8.2f} {error:+7.1%}".format(
                **row
            )
        )
    for row in found["serving"]:
        print(
            "{model:14} C={concurrency:<4} {measured_out_tok_s:7,} {predicted_out_tok_s:7,} {error:+7.1%}  TPOT "
            "{measured_tpot_ms_p50} {predicted_tpot_ms}".format(**row)
        )
    print(json.dumps(found["summary"]))
    print(constants)
    if not arguments.check:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
