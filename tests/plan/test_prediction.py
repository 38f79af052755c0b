"""Whole predictions: what fits, what does not, and what is said about it."""

from __future__ import annotations

import json

import pytest

from headrace.errors import ConfigError
from headrace.plan import PlanSettings, find_gpu, find_shape, named, predict, uniform
from headrace.plan.advice import compare, in_other_formats, ways_out
from headrace.plan.document import document
from headrace.plan.gpus import GPUS, cpu
from headrace.plan.prediction import PHASES
from headrace.plan.source import shape_of_config
from tests.models.test_published_configs import CONFIGS

CHAT = named("chat")
SHORT = uniform(200, 100, num_requests=100)


def test_phases_add_up_to_the_seconds() -> None:
    speed = predict("llama-3.1-8b", "H200", CHAT).speed
    assert speed is not None
    assert set(speed.phases) == set(PHASES)
    assert sum(speed.phases.values()) == pytest.approx(speed.seconds)
    assert speed.output_tokens_per_s == pytest.approx(CHAT.num_output_tokens / speed.seconds)


def test_the_same_question_gets_the_same_answer() -> None:
    assert predict("qwen3-8b", "H100", SHORT) == predict("qwen3-8b", "H100", SHORT)


def test_a_known_kind_of_prediction_shows_its_error_and_others_say_that_there_is_none() -> None:
    assert predict("llama-3.1-8b", "H200", SHORT).error.share is not None
    assert predict("llama-3.1-8b", "H100", SHORT).error.text == "not measured on this GPU; constants from H200"
    for settings in (PlanSettings(num_gpus=2), PlanSettings(quantization="int4")):
        assert predict("llama-3.1-8b", "H200", SHORT, settings).error.share is None
    assert predict("mixtral-8x7b", "H200", SHORT).error.share is None
    gemma_3n = shape_of_config("gemma-3n-e4b", CONFIGS["google/gemma-3n-E4B"])
    assert predict(gemma_3n, "H200", SHORT).error.text.startswith("not measured: layers of gemma3n_text")
    assert predict("mixtral-8x7b", "H200", uniform(200, 100, num_requests=16)).error.share is not None


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_of_the_table_can_be_planned(gpu) -> None:  # type: ignore[no-untyped-def]
    found = predict("llama-3.2-3b", gpu, SHORT)
    assert found.speed is not None and found.speed.seconds > 0
    assert found.cost_per_million(found.speed.output_tokens_per_s) is not None


def test_faster_memory_and_more_of_it_is_faster() -> None:
    seconds = []
    for name in ("L4", "L40S", "A100", "H100", "H200", "B200"):
        speed = predict("llama-3.1-8b", name, CHAT).speed
        assert speed is not None
        seconds.append(speed.seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_what_does_not_fit_names_the_numbers_and_the_ways_out() -> None:
    found = predict("llama-3.3-70b", "H200", CHAT)
    assert not found.fits
    assert found.problem is not None and "131.4 GiB" in found.problem and "are missing" in found.problem
    ways = "\n".join(ways_out(found, PlanSettings()))
    for part in ("FP8", "INT4", "2 x H200: tensor parallel 2", "1 x B200"):
        assert part in ways


def test_the_cache_of_all_replicas_is_named_everywhere() -> None:
    settings = PlanSettings(num_gpus=8)
    found = predict("llama-3.1-405b", "H100", CHAT, settings)
    (int4,) = (
        each for each in in_other_formats(found.model, found.gpu, CHAT, settings) if each.precision.label == "INT4"
    )
    total = int4.memory.cache_tokens * int4.layout.replicas
    assert int4.layout.replicas == 2
    assert any(f"leave room for {total:,} tokens of cache" in way for way in ways_out(found, settings))
    written = document(int4, formats=[], compared=[], ways_out=[], probe=None)
    assert written["plan"]["capacity"]["cache_tokens"] == total


def test_requests_longer_than_the_context_or_the_cache_do_not_fit() -> None:
    long = uniform(5000, 100, num_requests=4)
    assert "max_model_len is 4,096" in (predict("llama-2-7b", "H100", long).problem or "")
    book = uniform(100_000, 100, num_requests=4)
    assert "KV cache holds" in (predict("llama-3.1-8b", "L4", book).problem or "")
    given = predict("llama-3.1-8b", "L4", SHORT, PlanSettings(max_model_len=131_072))
    assert "max_model_len=131,072 needs 131,071 tokens" in (given.problem or "")


def test_more_than_the_models_own_context_is_an_error() -> None:
    with pytest.raises(ConfigError, match="more than the model's own context"):
        predict("llama-2-7b", "H100", SHORT, PlanSettings(max_model_len=8192))


def test_what_headrace_does_not_run_is_planned_and_said() -> None:
    notes = " ".join(predict("deepseek-r1", "B200", SHORT, PlanSettings(num_gpus=8)).notes)
    assert "the speed of several GPUs is predicted, and has not been measured" in notes
    assert "CUDA GPU or a CPU" in " ".join(predict("llama-3.1-8b", "MI300X", SHORT).notes)
    assert "INT4" in predict("llama-3.1-8b", "H200", SHORT, PlanSettings(quantization="int4")).error.text


def test_fp8_needs_tensor_cores_for_it() -> None:
    with pytest.raises(ConfigError, match="A100 has no FP8 tensor cores"):
        predict("llama-3.1-8b", "A100", SHORT, PlanSettings(quantization="fp8"))
    found = in_other_formats(find_shape("llama-3.1-8b"), find_gpu("A100"), SHORT, PlanSettings())
    assert [each.precision.label for each in found] == ["bf16", "INT4"]


def test_a_comparison_keeps_the_gpus_that_cannot_run_it() -> None:
    shape = predict("llama-3.1-8b", "H200", SHORT).model
    rows = compare(shape, [find_gpu("A100"), find_gpu("H100")], SHORT, PlanSettings(quantization="fp8"))
    assert isinstance(rows[0][1], str)
    assert not isinstance(rows[1][1], str) and rows[1][1].fits


def test_a_price_that_is_given_is_no_assumption() -> None:
    gpu = find_gpu("H200").with_price(2.0)
    found = predict("llama-3.1-8b", gpu, SHORT)
    assert found.speed is not None
    per_million = found.cost_per_million(found.speed.output_tokens_per_s)
    assert per_million == pytest.approx(2.0 / 3600 / found.speed.output_tokens_per_s * 1e6)
    assert gpu.is_price_given and not find_gpu("H200").is_price_given


def test_a_cpu_is_planned_by_its_bandwidth_and_rate() -> None:
    slow = cpu(bandwidth=20e9, flops=100e9, memory_bytes=16 << 30)
    fast = cpu(bandwidth=40e9, flops=400e9, memory_bytes=16 << 30)
    seconds = [
        found.speed.seconds for found in (predict("smollm2", each, SHORT) for each in (slow, fast)) if found.speed
    ]
    assert seconds[0] > 2 * seconds[1]
    assert predict("smollm2", slow, SHORT).precision.weights == "float32"


def test_more_clients_raise_throughput_and_latency() -> None:
    few, many = (
        predict("llama-3.1-8b", "H200", uniform(512, 128, num_requests=512, concurrency=count)).speed
        for count in (4, 128)
    )
    assert few is not None and many is not None
    assert many.output_tokens_per_s > 4 * few.output_tokens_per_s
    assert many.tpot_s > few.tpot_s and many.ttft_s > few.ttft_s
    assert many.ttft_one_s == few.ttft_one_s


def test_the_document_can_be_written_as_json() -> None:
    found = predict("llama-3.1-8b", "H200", SHORT)
    text = json.dumps(document(found, formats=[found], compared=[(found.gpu, "no")], ways_out=[], probe=None))
    read = json.loads(text)
    assert read["schema"] == "headrace.plan/1"
    assert read["plan"]["speed"]["phases"].keys() == set(PHASES)
    assert read["compare"] == [{"gpu": "H200", "error": "no"}]
