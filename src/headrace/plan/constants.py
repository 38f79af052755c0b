"""The few constants of the roofline that are fitted, and the error that was measured with them.

`benchmarks/plan_accuracy.py` fits them on records of one H200 and compares predictions with records that it did not
use; tests/plan/test_accuracy.py checks that this file says what that comparison found.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.plan.gpus import MEASURED_GPU, Gpu
from headrace.plan.precision import Precision
from headrace.plan.shape import ModelShape

FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of the data sheet's rates that the engine reaches, and fixed times in seconds."""

    weight_reads: float  # of the memory bandwidth, when weights are read by small batches
    few_weight_reads: float  # the same in steps of up to `FEW_ROWS` tokens, which have kernels of their own
    weight_reads_fp8: float  # the same for FP8 with more tokens
    cache_reads: float  # of the memory bandwidth, by decode attention
    gemm: float  # of the 16-bit rate, by large GEMMs
    gemm_fp8: float  # of the 8-bit rate
    narrow: float  # hidden size at which GEMMs reach half of those rates: narrow ones fill fewer processors
    prefill_attention: float  # of the 16-bit rate
    activations: float  # memory traffic of norms, RoPE and activations, as a multiple of the tensors' sizes
    quantize: float  # the same for the additional passes that FP8 needs
    layer_seconds: float  # per layer and step: gaps between kernels, and kernels too small to fill the device
    few_layer_seconds: float  # the same in steps of 2 to `FEW_ROWS` tokens in 16 bits
    one_layer_seconds: float  # the same in steps of one token in 16 bits
    packed_layer_seconds: float  # the same in steps of up to `FEW_ROWS` tokens in four and eight bits
    packed_row_seconds: float  # and per token of them
    seq_layer_seconds: float  # per decoding sequence, layer and step
    step_seconds: float  # per step: sampling, tables, graph launch
    request_seconds: float  # per request: host time that is not hidden
    mixture_layer_seconds: float  # per layer with experts and step: routing and grouping
    few_mixture_layer_seconds: float  # the same in steps of up to `FEW_ROWS` tokens in 16 bits
    mixture_gemm: float  # of the rate of dense GEMMs, by the grouped GEMMs of experts


H200 = Constants(
    weight_reads=0.925,
    few_weight_reads=0.908,
    weight_reads_fp8=0.46,
    cache_reads=0.954,
    gemm=0.697,
    gemm_fp8=0.649,
    narrow=273.0,
    prefill_attention=0.424,
    activations=0.935,
    quantize=0.948,
    layer_seconds=2.86e-05,
    few_layer_seconds=2.14e-05,
    one_layer_seconds=9.2e-06,
    packed_layer_seconds=3.14e-05,
    packed_row_seconds=4.49e-07,
    seq_layer_seconds=1.6e-08,
    step_seconds=8.76e-05,
    request_seconds=2.59e-05,
    mixture_layer_seconds=1.54e-05,
    few_mixture_layer_seconds=9.75e-06,
    mixture_gemm=0.363,
)

# Shares of what `hostprobe` measures with NumPy, not of a data sheet; benchmarks/plan_accuracy_cpu.py fits the first of
# them on records of one CPU, and leaves what it has no record of.
CPU = Constants(
    weight_reads=0.92,
    few_weight_reads=0.92,
    weight_reads_fp8=0.92,
    cache_reads=0.41,
    gemm=1.5,
    gemm_fp8=1.5,
    narrow=100.0,
    prefill_attention=0.25,
    activations=1.6,
    quantize=0.0,
    layer_seconds=2.5e-05,
    few_layer_seconds=2.5e-05,
    one_layer_seconds=2.5e-05,
    packed_layer_seconds=2.5e-05,
    packed_row_seconds=1e-09,
    seq_layer_seconds=1.3e-06,
    step_seconds=0.0015,
    request_seconds=0.0002,
    mixture_layer_seconds=0.0001,
    few_mixture_layer_seconds=0.0001,
    mixture_gemm=1.0,
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

    @property
    def text(self) -> str:
        which = "held-out" if self.is_held_out else "fitted"
        return f"±{self.max_error:.0%}: the largest error on {self.num_records} {which} {MEASURED_GPU} records"


@dataclass(frozen=True, slots=True)
class MeasuredOnCpu:
    """The errors of held-out records of one CPU."""

    max_error: float
    mean_error: float
    num_records: int

    @property
    def text(self) -> str:
        return (
            f"not measured on every CPU: up to {self.max_error:.0%}, {self.mean_error:.0%} in the mean, on "
            f"{self.num_records} held-out records of one AMD EPYC; --probe shows it here"
        )


CPU_ERROR = MeasuredOnCpu(0.52, 0.13, 9)  # from benchmarks/results/plan-accuracy-cpu.json

FEW_PACKED = "few sequences in four and eight bits"
# From benchmarks/results/plan-accuracy.json; tests/plan/test_accuracy.py compares.
ERRORS = {
    "16 bits": Measured(0.07, 6, is_held_out=True),
    "FP8": Measured(0.08, 4, is_held_out=False),
    FEW_PACKED: Measured(0.04, 3, is_held_out=True),
}
MAX_MIXTURE_SEQS = 16  # of the held-out record of a mixture


def error_band(
    gpu: Gpu, precision: Precision, shape: ModelShape, *, num_gpus: int, max_running: int, streams: bool = False
) -> ErrorBand:
    """What is known about the error of such a prediction. `streams`: layers from host memory."""
    if gpu.is_cpu:
        return ErrorBand(None, CPU_ERROR.text)
    if not gpu.is_measured:
        return ErrorBand(None, f"not measured on this GPU; constants from {MEASURED_GPU}")
    if streams:
        return ErrorBand(None, "not measured with layers in host memory; the rate of the copies is assumed")
    if num_gpus > 1:
        return ErrorBand(None, f"not measured on several GPUs; constants from one {MEASURED_GPU}")
    if precision.weights in ("int4", "int8") and max_running > FEW_ROWS:
        return ErrorBand(None, f"not measured in {precision.label} with more than {FEW_ROWS} sequences")
    if shape.why_not_run is not None:
        return ErrorBand(None, "not measured: Headrace does not run this model")
    if shape.spec is not None and (shape.spec.latent is not None or shape.spec.gemma3n is not None):
        return ErrorBand(None, f"not measured: layers of {shape.spec.family} are of a kind without a record")
    if shape.has_mixture and precision.is_quantized:
        return ErrorBand(None, "not measured: mixtures were measured in 16 bits only")
    if shape.has_mixture and max_running > MAX_MIXTURE_SEQS:
        return ErrorBand(None, f"fitted: mixtures with more than {MAX_MIXTURE_SEQS} sequences rest on one record")
    kind = "16 bits" if not precision.is_quantized else "FP8" if max_running > FEW_ROWS else FEW_PACKED
    found = ERRORS[kind]
    return ErrorBand(found.max_error, found.text)
