"""One list of routes: what is in it is served, guarded and described."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.server.endpoints import ROUTES
from headrace.server.endpoints.openapi import document
from headrace.server.http.app import App
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Route, Router
from tests.server.serving import FakeMetrics


class EchoRequest(msgspec.Struct):
    text: str


async def echo(services: Any, exchange: Exchange) -> None:
    await exchange.reply(200, b'{"echo":true}')


ADDED = (
    *ROUTES,
    Route(path="/v1/echo", method="POST", handler=echo, summary="Echo", body=EchoRequest, auth="none"),
    Route(path="/v1/echoes/{name}", method="GET", handler=echo, summary="An echo"),
)


def ask(path: str, method: str) -> int:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    services: Any = SimpleNamespace(metrics=FakeMetrics(), num_in_flight=0)
    scope = {"type": "http", "method": method, "path": path, "headers": []}
    asyncio.run(App(services, ADDED)(scope, receive, send))
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/echo", "POST", 200),
        ("/v1/echo", "GET", 405),
        ("/v1/echoes/a/b", "GET", 200),
        ("/v1/echoes/", "GET", 404),
        ("/v1/echoes", "GET", 404),
        ("/v1/nothing", "GET", 404),
    ],
)
def test_an_added_route_is_served(path: str, method: str, status: int) -> None:
    assert ask(path, method) == status


def test_an_added_route_is_in_the_document_with_its_body() -> None:
    described = document(ADDED)
    assert described["paths"]["/v1/echo"]["post"]["summary"] == "Echo"
    assert described["paths"]["/v1/echoes/{name}"]["get"]["parameters"][0]["name"] == "name"
    assert "EchoRequest" in described["components"]["schemas"]


def test_only_health_readiness_and_the_empty_page_need_no_key() -> None:
    assert Router(ROUTES).public_paths == {"/", "/health", "/ready"}
    assert Router(ADDED).public_paths == {"/", "/health", "/ready", "/v1/echo"}


def test_an_admin_route_outside_the_prefix_of_the_gate_is_a_mistake() -> None:
    for path, auth in (("/v1/secret", "admin"), ("/admin/open", "key")):
        with pytest.raises(AssertionError, match="prefix"):
            Route(path=path, method="GET", handler=echo, summary="", auth=auth)  # type: ignore[arg-type]


def test_a_route_that_is_there_twice_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Router((*ROUTES, ROUTES[0]))
