from __future__ import annotations

import pytest

from headrace.plan.gpus import cpu
from headrace.tune import forecast
from headrace.tune.forecast import forecaster
from tests.tune.builders import workload


def test_a_gpu_that_plan_knows_is_predicted_with_its_error_band() -> None:
    predict = forecaster("llama-3.1-8b", workload(64), {}, gpu_title="NVIDIA H200", num_gpus=1)
    assert predict is not None
    few, many = predict({"max_num_seqs": 1}), predict({"max_num_seqs": 64})
    assert few is not None and many is not None
    assert many.value > 4 * few.value
    assert many.low is not None and many.high is not None and many.low < many.value < many.high


def test_fixed_settings_count() -> None:
    fixed = forecaster("llama-3.1-8b", workload(64), {"max_num_seqs": 1}, gpu_title="NVIDIA H200", num_gpus=1)
    free = forecaster("llama-3.1-8b", workload(64), {}, gpu_title="NVIDIA H200", num_gpus=1)
    assert fixed is not None and free is not None
    assert fixed({}) == free({"max_num_seqs": 1})


def test_a_combination_that_does_not_run_has_no_prediction() -> None:
    predict = forecaster("llama-3.1-8b", workload(64), {}, gpu_title="NVIDIA H200", num_gpus=1)
    assert predict is not None
    assert predict({"max_num_seqs": 512, "max_num_batched_tokens": 16}) is None


@pytest.mark.parametrize(("model", "gpu"), [("no/such-model", "NVIDIA H200"), ("llama-3.1-8b", "Unknown GPU 9")])
def test_what_plan_does_not_know_is_not_predicted(model: str, gpu: str) -> None:
    assert forecaster(model, workload(64), {}, gpu_title=gpu, num_gpus=1) is None


def test_without_a_gpu_this_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "this_cpu", lambda: cpu(bandwidth=1e10, flops=1e11, memory_bytes=2**33))
    predict = forecaster("smollm2", workload(16, 8, 16), {}, gpu_title=None, num_gpus=0)
    assert predict is not None
    found = predict({})
    assert found is not None and found.value > 0 and found.low is None
