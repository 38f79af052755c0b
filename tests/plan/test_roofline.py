"""The roofline moves the right way when its inputs do."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.plan.constants import H200
from headrace.plan.gpus import find_gpu
from headrace.plan.precision import Precision
from headrace.plan.roofline import Machine, StepSeconds, experts_hit, step_seconds
from headrace.plan.simulate import StepLimits, simulate
from headrace.plan.source import find_shape
from headrace.plan.workload import of_lengths

LIMITS = StepLimits(max_num_seqs=1024, max_num_batched_tokens=1 << 17, cache_tokens=1 << 24)
GPU = find_gpu("H200")


def seconds(model: str, lengths: list[tuple[int, int]], *, precision: Precision | None = None, tensor: int = 1,
            pipeline: int = 1, gpu: str = "H200") -> StepSeconds:  # fmt: skip
    """Seconds of the workload's steps, all requests starting at once."""
    machine = Machine(find_gpu(gpu), H200, tensor, pipeline)
    steps = simulate(of_lengths("test", lengths), LIMITS)
    return step_seconds(steps, find_shape(model), precision or Precision(), machine)


def test_one_sequence_takes_the_time_of_reading_the_weights() -> None:
    step = seconds("llama-3.1-8b", [(64, 16)]).gemm[-1]
    weights = 2 * 7.5e9 / (GPU.bandwidth * H200.few_weight_reads)
    assert step == pytest.approx(weights, rel=0.02)


def test_a_long_prompt_takes_the_time_of_its_flops() -> None:
    shape = find_shape("llama-3.1-8b")
    step = seconds("llama-3.1-8b", [(8192, 2)]).gemm[0]
    assert step == pytest.approx(2 * shape.linear_params * 8192 / (GPU.bf16_rate * H200.gemm), rel=0.1)


def test_fp8_gains_more_in_large_steps_than_in_small_ones() -> None:
    def gain(count: int) -> float:
        plain, fp8 = (
            seconds("llama-3.1-8b", [(64, 16)] * count, precision=precision).total[-1]
            for precision in (Precision(), Precision("fp8", "fp8"))
        )
        return float(plain / fp8)

    assert gain(1024) > 1.5
    assert 1.2 < gain(16) < 1.5  # measured 1.48 with shorter contexts


def test_more_sequences_take_longer_but_less_each() -> None:
    steps = [seconds("llama-3.1-8b", [(64, 16)] * count).total[-1] for count in (1, 16, 64, 256, 1024)]
    assert steps == sorted(steps)
    assert steps[0] > steps[3] / 256 > steps[4] / 1024


def test_the_expected_number_of_experts_grows_to_all_of_them() -> None:
    shares = experts_hit(np.array([1.0, 16.0, 1000.0]), 128, 8)
    np.testing.assert_allclose(shares, [8 / 128, 0.644, 1.0], atol=1e-3)


def test_a_mixture_reads_few_experts_for_one_token() -> None:
    alone, many = (seconds("qwen3-30b-a3b", [(64, 16)] * count).gemm[-1] for count in (1, 128))
    assert many > 8 * alone


def test_two_gpus_halve_gemms_and_cache_reads_and_add_network_time() -> None:
    one, two = (seconds("llama-3.1-70b", [(64, 16)] * 64, tensor=size) for size in (1, 2))
    assert two.gemm[-1] == pytest.approx(one.gemm[-1] / 2)
    assert two.cache[-1] == pytest.approx(one.cache[-1] / 2)
    assert one.network[-1] == 0 < two.network[-1] < two.gemm[-1]


def test_all_reduces_over_pcie_take_longer_than_over_nvlink() -> None:
    nvlink, pcie = (seconds("llama-3.1-8b", [(2048, 2)], tensor=4, gpu=gpu) for gpu in ("H100", "H100-PCIe"))
    assert pcie.network[0] > 3 * nvlink.network[0]


def test_a_pipeline_gains_nothing_for_one_sequence_and_much_for_large_batches() -> None:
    one, alone = seconds("llama-3.1-70b", [(64, 16)]), seconds("llama-3.1-70b", [(64, 16)], pipeline=4)
    assert alone.total[-1] >= one.total[-1]
    whole, staged = (seconds("llama-3.1-70b", [(64, 16)] * 1024, pipeline=size).total[-1] for size in (1, 4))
    assert staged < whole / 1.5


def test_windows_bound_what_decoding_reads() -> None:
    short, long = (seconds("gemma-2-9b", [(length, 4)]).cache[-1] for length in (4000, 8000))
    plain_short, plain_long = (seconds("llama-3.1-8b", [(length, 4)]).cache[-1] for length in (4000, 8000))
    assert plain_long / plain_short == pytest.approx(2.0, rel=0.02)
    assert long / short == pytest.approx(1.5, rel=0.03)  # every second layer has a window of 4,096
