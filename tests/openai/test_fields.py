from __future__ import annotations

import logging

import pytest

from headrace.openai.body import convert
from headrace.openai.fields import note_ignored
from headrace.openai.schema.completions import CompletionRequest


def test_an_ignored_hint_is_noted_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    note_ignored.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            convert(CompletionRequest, {"prompt": "a", "store": True, "user": "me"})
    (record,) = caplog.records
    assert record.getMessage().startswith("store in a request is ignored")
