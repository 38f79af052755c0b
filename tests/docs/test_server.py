"""The page of the server API names every parameter and route."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.anthropic import schema as anthropic
from headrace.openai.fields import HINTS, LABELS, UNSUPPORTED
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.schema.completions import CompletionRequest
from headrace.openai.schema.embeddings import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from headrace.openai.schema.responses import UNSUPPORTED_IN_RESPONSES, ResponsesRequest
from headrace.server.endpoints import ROUTES

PAGE = (Path(__file__).parents[2] / "docs/server.md").read_text()


def named(text: str) -> set[str]:
    return set(re.findall(r"`([\w/.{} ]+?)`", text))


@pytest.mark.parametrize(
    "request_type",
    [
        *(ChatRequest, CompletionRequest, EmbeddingRequest, ResponsesRequest, anthropic.MessagesRequest),
        *(ClassifyRequest, PoolingRequest, RerankRequest, ScoreRequest),
    ],
)
def test_every_parameter_is_on_the_page(request_type: type) -> None:
    table = PAGE.partition("## Parameters")[2].partition("## Streams")[0]
    assert set(request_type.__struct_fields__) - {"model"} <= named(table)  # type: ignore[attr-defined]


def test_everything_that_is_refused_or_without_effect_is_on_the_page() -> None:
    assert LABELS | HINTS | UNSUPPORTED.keys() | UNSUPPORTED_IN_RESPONSES.keys() <= named(PAGE)
    assert anthropic.HINTS | anthropic.UNSUPPORTED.keys() <= named(PAGE)


def test_every_route_is_on_the_page() -> None:
    routes = PAGE.partition("## Routes")[2].partition("## Parameters")[0]
    assert all(route.prefix in routes for route in ROUTES)
