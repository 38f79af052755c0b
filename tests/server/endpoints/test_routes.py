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
from headrace.server.options import ServerOptions
from tests.server.serving import FakeMetrics

PUBLIC = {"/", "/docs", "/health", "/ping", "/ready"}


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


def test_the_document_has_the_admin_routes_only_where_there_is_an_admin_key() -> None:
    admin = {route.path for route in ROUTES if route.auth == "admin"}
    assert admin and admin <= document(ROUTES, has_admin=True)["paths"].keys()
    assert not admin & document(ROUTES)["paths"].keys()


def test_the_document_says_whether_a_key_is_needed() -> None:
    assert {} in document(ROUTES)["security"]
    with_keys = document(ROUTES, needs_key=True)
    assert with_keys["security"] == [{"key": []}]
    open_routes = [path for path, methods in with_keys["paths"].items() if methods.get("get", {}).get("security") == []]
    assert set(open_routes) == PUBLIC


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_document_names_the_errors_of_a_route(needs_key: bool) -> None:
    paths = document(ROUTES, needs_key=needs_key)["paths"]
    chat = paths["/v1/chat/completions"]["post"]["responses"].keys()
    assert {"200", "400", "404", "408", "413", "415", "429", "500", "503", "504"} <= chat
    assert "504" not in paths["/tokenize"]["post"]["responses"]
    assert {"403", "409"} <= paths["/start_profile"]["post"]["responses"].keys()
    for path, methods in paths.items():
        for operation in methods.values():
            assert ("401" in operation["responses"]) == (needs_key and path not in PUBLIC), path


def test_the_document_has_no_schema_for_streams() -> None:
    """Tools read a schema there as that of each event."""
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert document(ROUTES)["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"] == {}


def test_the_server_shows_the_document_of_its_own_keys() -> None:
    async def shown(**facts: bool) -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/openapi.json", "headers": [], "headrace": facts}
        services: Any = SimpleNamespace(metrics=FakeMetrics(), options=ServerOptions())
        await App(services, ROUTES)(scope, None, send)  # type: ignore[arg-type]
        return msgspec.json.decode(sent[1]["body"])

    assert "/admin/info" not in asyncio.run(shown())["paths"]
    both = asyncio.run(shown(has_admin=True, needs_key=True))
    assert "/admin/info" in both["paths"] and both["security"] == [{"key": []}]


def test_only_health_readiness_and_the_empty_pages_need_no_key() -> None:
    assert Router(ROUTES).public_paths == PUBLIC
    assert Router(ADDED).public_paths == {*PUBLIC, "/v1/echo"}


def test_an_admin_route_outside_the_prefix_of_the_gate_is_a_mistake() -> None:
    for path, auth in (("/v1/secret", "admin"), ("/admin/open", "key")):
        with pytest.raises(AssertionError, match="prefix"):
            Route(path=path, method="GET", handler=echo, summary="", auth=auth)  # type: ignore[arg-type]


def test_a_route_that_is_there_twice_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Router((*ROUTES, ROUTES[0]))


def test_an_upload_and_its_errors_are_documented() -> None:
    upload = document(ROUTES)["paths"]["/v1/files"]["post"]
    (schema,) = [content["schema"] for content in upload["requestBody"]["content"].values()]
    assert list(upload["requestBody"]["content"]) == ["multipart/form-data"] and schema["required"] == [
        "file",
        "purpose",
    ]
    assert {"400", "408", "413"} <= upload["responses"].keys()
