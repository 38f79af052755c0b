"""GET /openapi.json: the routes, and the schemas of their bodies as msgspec checks them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Route
from headrace.server.services import Services
from headrace.version import __version__

_DENIED = {"401": "no key", "403": "not the admin key", "404": "there is no admin key", "503": "not now"}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


async def show(services: Services, exchange: Exchange, routes: tuple[Route, ...]) -> None:
    await exchange.reply(200, _encoded(routes, services.options.root_path))


@cache
def _encoded(routes: tuple[Route, ...], root_path: str) -> bytes:
    return msgspec.json.encode(document(routes, root_path))


def document(routes: Iterable[Route], root_path: str = "") -> dict[str, Any]:
    routes = list(routes)
    bodies = [route.body for route in routes if route.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route) -> dict[str, Any]:
    if route.auth == "admin":
        return _admin(route)
    return _get(route) if route.body is None else _post(route, route.body)


def _post(route: Route, body: type[msgspec.Struct]) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.generates and "stream" in body.__struct_fields__:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    errors = {"400": "refused", "404": "another model", "413": "too long", "415": "not JSON", "503": "not now"}
    return {
        "summary": route.summary,
        "requestBody": {"required": route.needs_body, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "answered", "content": content},
            **{status: _error(text) for status, text in errors.items()},
        },
    }


def _get(route: Route) -> dict[str, Any]:
    answer = {"description": "answered", "content": {route.content_type: {}}}
    shown: dict[str, Any] = {"summary": route.summary, "responses": {"200": answer, "503": _error("not now")}}
    if route.parameter is not None:
        shown["parameters"] = [{"name": route.parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
        shown["responses"]["404"] = _error("not found")
    return shown


def _admin(route: Route) -> dict[str, Any]:
    return {
        "summary": route.summary,
        "security": [{"key": []}],
        "responses": {
            "2XX": {"description": "done", "content": {"application/json": {}}},
            **{status: _error(text) for status, text in _DENIED.items()},
        },
    }


def _error(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
