"""The adapter for Ray Data, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import headrace.ray
from headrace.errors import RequestError
from headrace.ray import BatchAnswerer, map_batches


class FakeLLM:
    """Answers in capitals, and refuses a batch with an empty prompt."""

    def __init__(self, model: str, **options: Any) -> None:
        self.num_calls = 0

    def generate(self, prompts: list[str], params: Any, *, use_tqdm: bool) -> list[Any]:
        self.num_calls += 1
        if "" in prompts:
            raise RequestError("the prompt is empty")
        return [_output(prompt) for prompt in prompts]


def _output(prompt: str) -> Any:
    error = "broken" if prompt == "break" else None
    return SimpleNamespace(error=error, outputs=[SimpleNamespace(text=prompt.upper())])


@pytest.fixture
def answerer(monkeypatch: pytest.MonkeyPatch) -> BatchAnswerer:
    monkeypatch.setattr(headrace.ray, "LLM", FakeLLM)
    return BatchAnswerer(model="fake", prompt_column="question")


def test_columns_are_kept_and_answers_added(answerer: BatchAnswerer) -> None:
    batch = {"id": np.array([3, 4]), "question": np.array(["a", "b"], dtype=object)}
    found = answerer(batch)
    assert (found["text"], found["error"]) == (["A", "B"], ["", ""])
    assert found["id"] is batch["id"]


def test_a_bad_row_becomes_an_error_and_the_others_are_answered(answerer: BatchAnswerer) -> None:
    found = answerer({"question": ["a", "b", "", "c", "break", "d"]})
    assert found["text"] == ["A", "B", "", "C", "", "D"]
    assert found["error"] == ["", "", "the prompt is empty", "", "broken", ""]


def test_an_empty_batch_needs_no_engine(answerer: BatchAnswerer) -> None:
    assert answerer({"question": []})["text"] == []
    assert answerer._llm.num_calls == 0  # type: ignore[attr-defined]


def test_the_dataset_gets_the_class_and_its_resources() -> None:
    class Dataset:
        def map_batches(self, kind: type, **options: Any) -> Any:
            return kind, options

    kind, options = map_batches(Dataset(), model="m", concurrency=2, num_gpus=1, prompt_column="q")
    assert kind is BatchAnswerer
    assert options["fn_constructor_kwargs"] == {"model": "m", "prompt_column": "q"}
    assert (options["concurrency"], options["num_gpus"], "num_cpus" in options) == (2, 1, False)
