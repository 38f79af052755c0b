"""Built-in shapes: sizes as published, names that people write."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.errors import ModelError
from headrace.plan.catalogue import CATALOGUE, find_entry, names_of
from headrace.plan.source import find_shape, shape_of_config

# Billions of weights, as the hub counts them in the published safetensors files, or as model cards and papers say.
PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6.74,
    "meta-llama/Llama-2-13b-hf": 13.02,
    "meta-llama/Llama-2-70b-hf": 68.98,
    "meta-llama/Meta-Llama-3-8B": 8.03,
    "meta-llama/Meta-Llama-3-70B": 70.55,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.55,
    "meta-llama/Llama-3.1-405B": 405.85,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-14B": 14.77,
    "Qwen/Qwen2.5-32B": 32.76,
    "Qwen/Qwen2.5-72B": 72.71,
    "Qwen/Qwen3-0.6B": 0.60,
    "Qwen/Qwen3-1.7B": 1.72,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "Qwen/Qwen3-14B": 14.77,
    "Qwen/Qwen3-32B": 32.76,
    "Qwen/Qwen3-30B-A3B": 30.53,
    "Qwen/Qwen3-235B-A22B": 235.09,
    "mistralai/Mistral-7B-v0.1": 7.24,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "mistralai/Mistral-Small-24B-Base-2501": 23.57,
    "mistralai/Mixtral-8x7B-v0.1": 46.70,
    "mistralai/Mixtral-8x22B-v0.1": 140.62,
    "deepseek-ai/DeepSeek-V3": 671.03,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1.78,
    "google/gemma-2-2b": 2.61,
    "google/gemma-2-9b": 9.24,
    "google/gemma-2-27b": 27.23,
    "google/gemma-3-1b-it": 1.00,
    "microsoft/Phi-3-mini-4k-instruct": 3.82,
    "microsoft/Phi-3-medium-4k-instruct": 13.96,
    "microsoft/phi-4": 14.66,
    "HuggingFaceTB/SmolLM2-135M": 0.1345,
    "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
    "openai/gpt-oss-20b": 20.91,
    "openai/gpt-oss-120b": 116.83,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_has_as_many_weights_as_published(name: str) -> None:
    assert find_shape(name).num_params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.hub_id)
def test_the_numbers_of_a_shape_are_those_of_the_engines_spec(entry) -> None:  # type: ignore[no-untyped-def]
    shape = shape_of_config(entry.hub_id, entry.config)
    if shape.spec is None:
        assert shape.why_not_run
        return
    assert shape.num_params == shape.spec.num_params
    assert shape.linear_params + shape.expert_params == shape.spec.num_linear_params
    assert shape.kv_elements_per_token == shape.spec.kv_elements_per_token


def test_no_two_shapes_share_a_name() -> None:
    counts = Counter(name for entry in CATALOGUE for name in names_of(entry))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(
    ("written", "hub_id"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("deepseek-r1-distill-llama-70b", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("gemma-2-9b-it", "google/gemma-2-9b"),
        ("smollm2", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_a_name_may_be_short_or_as_on_the_hub(written: str, hub_id: str) -> None:
    assert find_entry(written).hub_id == hub_id


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'llama-3\.1-8b'"):
        find_shape("lama-3.1-8b")
