"""A request that crosses a process border is restored as it was, and not checked again."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.engine.process import wire
from headrace.types import Request, SamplingParams, StructuredOutputs

PARAMS: list[dict[str, Any]] = [
    {},
    {"stop": ["a", "b"], "stop_token_ids": [5], "seed": 2**63},
    {"logit_bias": {"7": 1.5}, "allowed_token_ids": [1, 2], "bad_words": ["no"], "bad_words_token_ids": [[1], [2, 3]]},
    {"structured_outputs": {"json": {"type": "object"}}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": StructuredOutputs(json_object=True, asked_as="response_format")},
]


def received(params: SamplingParams) -> SamplingParams:
    request = Request("one", np.arange(3, dtype=np.int32), params)
    return wire.request_of(wire.submission(request)).params


@pytest.mark.parametrize("given", PARAMS)
def test_parameters_arrive_as_they_were_sent(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    arrived = received(params)
    assert arrived == params and repr(arrived) == repr(params)  # a list equals no tuple, and types are shown


def test_the_receiver_trusts_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    submission = wire.submission(Request("one", np.arange(3, dtype=np.int32), SamplingParams(stop=["a"])))

    def fail(self: SamplingParams) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(SamplingParams, "__post_init__", fail)
    assert wire.request_of(submission).params.stop == ("a",)


def test_parameters_are_sent_by_all_their_fields() -> None:
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams()))
    assert SamplingParams.of_checked(sent) == SamplingParams()
