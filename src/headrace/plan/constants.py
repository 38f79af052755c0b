"""The few constants of the roofline that are fitted, and the error that was measured with them.

`benchmarks/plan_accuracy.py` fits them on records of one H200 and compares predictions with records that it did not
use; tests/plan/test_accuracy.py checks that this file says what that comparison found.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan.gpus import MEASURED_GPU, Gpu
from headrace.plan.precision import Precision
from headrace.plan.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of the data sheet's rates that the engine reaches, and fixed times in seconds."""

    weight_reads: float  # of the memory bandwidth, when weights are read by small batches
    cache_reads: float  # of the memory bandwidth, by decode attention
    gemm: float  # of the 16-bit rate, by large GEMMs
    gemm_fp8: float  # of the 8-bit rate
    narrow: float  # hidden size at which GEMMs reach half of those rates: narrow ones fill fewer processors
    prefill_attention: float  # of the 16-bit rate
    activations: float  # memory traffic of norms, RoPE and activations, as a multiple of the tensors' sizes
    quantize: float  # the same for the additional passes that FP8 needs
    layer_seconds: float  # per layer and step: gaps between kernels, and kernels too small to fill the device
    seq_layer_seconds: float  # per decoding sequence, layer and step
    step_seconds: float  # per step: sampling, tables, graph launch
    request_seconds: float  # per request: host time that is not hidden
    mixture_layer_seconds: float  # per layer with experts and step: routing and grouping


H200 = Constants(
    weight_reads=0.85,
    cache_reads=0.95,
    gemm=0.698,
    gemm_fp8=0.669,
    narrow=245.0,
    prefill_attention=0.433,
    activations=0.905,
    quantize=0.985,
    layer_seconds=3.06e-05,
    seq_layer_seconds=1.32e-08,
    step_seconds=9.3e-05,
    request_seconds=2.42e-05,
    mixture_layer_seconds=2.74e-05,
)

# Shares of what `hostprobe` measures with NumPy, not of a data sheet; set by hand from a few runs, see docs/plan.md.
CPU = Constants(
    weight_reads=1.0,
    cache_reads=0.5,
    gemm=0.75,
    gemm_fp8=0.75,
    narrow=0.0,
    prefill_attention=0.25,
    activations=1.0,
    quantize=0.0,
    layer_seconds=1e-4,
    seq_layer_seconds=1e-6,
    step_seconds=1e-3,
    request_seconds=2e-4,
    mixture_layer_seconds=1e-4,
)


@dataclass(frozen=True, slots=True)
class ErrorBand:
    """How far predictions of this kind were from measurements."""

    share: float | None  # the largest error, as a share; None: nothing was measured
    text: str


@dataclass(frozen=True, slots=True)
class Measured:
    """The largest error of the H200 records of one kind of model, rounded up to a percent."""

    max_error: float
    num_records: int
    is_held_out: bool  # False: the records were used in the fit, so the error of others may be larger


# From benchmarks/results/plan-accuracy.json; tests/plan/test_accuracy.py compares.
ERRORS = {
    "dense": Measured(0.06, 5, is_held_out=True),
    "mixture": Measured(0.02, 1, is_held_out=True),
    "fp8": Measured(0.07, 4, is_held_out=False),
}


def error_band(gpu: Gpu, precision: Precision, shape: ModelShape, num_gpus: int) -> ErrorBand:
    if gpu.is_cpu:
        return ErrorBand(
            None, "a CPU is predicted roughly: its constants were set by hand; --probe shows the difference"
        )
    if not gpu.is_measured:
        return ErrorBand(None, f"not measured on this GPU; constants from {MEASURED_GPU}")
    if num_gpus > 1:
        return ErrorBand(None, f"not measured on several GPUs; constants from one {MEASURED_GPU}")
    if precision.weights in ("int4", "int8"):
        return ErrorBand(None, f"not measured in {precision.label}; constants from 16 bits and FP8")
    if shape.why_not_run is not None:
        return ErrorBand(None, "not measured: Headrace does not run this model")
    kind = "mixture" if shape.has_mixture else "fp8" if precision.weights == "fp8" else "dense"
    found = ERRORS[kind]
    which = "held-out" if found.is_held_out else "fitted"
    records = "one" if found.num_records == 1 else str(found.num_records)
    text = f"±{found.max_error:.0%}: the largest error on {records} {which} {gpu.name} record"
    return ErrorBand(found.max_error, text + ("" if found.num_records == 1 else "s") + f" ({kind})")
