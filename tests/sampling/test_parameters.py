"""Every sampling parameter is implemented by a feature or listed as handled elsewhere, and nothing else is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.sampling.feature import Feature, SequenceSettings
from headrace.sampling.features import FEATURES, HANDLED_ELSEWHERE
from headrace.types import SamplingParams

FIELDS = {field.name for field in dataclasses.fields(SamplingParams)}
DECLARED = {name for feature in FEATURES for name in feature.params}
RESOLVED = {  # fields of SequenceSettings that the engine computes, and the parameters that they come from
    "seed": {"seed"},
    "end_len": {"max_tokens"},
    "stop_token_ids": {"stop_token_ids", "ignore_eos"},
}
EVERYTHING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words_token_ids": [[1, 2]],
    "min_tokens": 2,
    "logprobs": 2,
    "logprob_token_ids": [1, 2],
}


class RecordedParams(SamplingParams):
    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            READ.add(name)
        return super().__getattribute__(name)


class RecordedSettings(SequenceSettings):
    def __getattribute__(self, name: str) -> Any:
        READ.update(RESOLVED.get(name, ()))
        return super().__getattribute__(name)


READ: set[str] = set()


def parameters_read_by(feature: Feature) -> set[str]:
    params = RecordedParams(**EVERYTHING)
    sequence = RecordedSettings(params, seed=1, prompt_len=3, end_len=9, stop_token_ids=(4,), vocab_size=50)
    READ.clear()
    feature.is_used(sequence)
    feature.settings(sequence)
    return set(READ)


def test_every_parameter_belongs_to_a_feature_or_is_handled_elsewhere() -> None:
    assert FIELDS - DECLARED - HANDLED_ELSEWHERE.keys() == set()


def test_no_feature_or_list_names_a_parameter_that_does_not_exist() -> None:
    assert (DECLARED | HANDLED_ELSEWHERE.keys()) - FIELDS == set()


def test_no_parameter_is_declared_twice() -> None:
    assert DECLARED & HANDLED_ELSEWHERE.keys() == set()
    assert len(DECLARED) == sum(len(feature.params) for feature in FEATURES)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: type(feature).__name__)
def test_a_feature_reads_the_parameters_that_it_declares(feature: Feature) -> None:
    assert set(feature.params) - parameters_read_by(feature) == set()


def test_every_parameter_that_a_feature_reads_is_declared_by_one() -> None:
    read = {name for feature in FEATURES for name in parameters_read_by(feature)}
    assert read - DECLARED - {"n", "best_of"} == set()  # with best_of, log-probabilities choose the answers


@pytest.mark.parametrize("file", sorted(set(HANDLED_ELSEWHERE.values())))
def test_what_is_handled_elsewhere_names_an_existing_file(file: str) -> None:
    assert (Path(headrace.__file__).parent / file).is_file()
