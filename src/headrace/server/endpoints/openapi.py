"""GET /openapi.json: the routes, and the schemas of their bodies as msgspec checks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from headrace.anthropic.errors import PATH_PREFIX
from headrace.openai.schema.invocations import InvocationRequest
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Route
from headrace.server.services import Services
from headrace.version import __version__

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
_MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": ["string", "null"]},
    },
}
_BATCH_ROUTES = ("/v1/files", "/v1/batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Which keys the server has."""

    has_admin: bool
    needs_key: bool

    def guards(self, route: Route) -> bool:
        """Whether the route needs a key."""
        return route.auth != "none" and (self.needs_key or (self.has_admin and _is_control(route)))


_UPLOAD = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}},
    "required": ["file", "purpose"],
}


async def show(services: Services, exchange: Exchange, routes: tuple[Route, ...]) -> None:
    facts = exchange.scope.get("headrace", {})
    keys = _Keys(has_admin=facts.get("has_admin", False), needs_key=facts.get("needs_key", False))
    await exchange.reply(200, _encoded(routes, services.options.root_path, keys))


@cache
def _encoded(routes: tuple[Route, ...], root_path: str, keys: _Keys) -> bytes:
    shown = document(routes, root_path, has_admin=keys.has_admin, needs_key=keys.needs_key)
    return msgspec.json.encode(shown)


def document(
    routes: Iterable[Route], root_path: str = "", *, has_admin: bool = False, needs_key: bool = False
) -> dict[str, Any]:
    """The document of a server with these keys. Without an admin key there are no admin routes."""
    routes = [route for route in routes if has_admin or route.auth != "admin"]
    keys = _Keys(has_admin=has_admin, needs_key=needs_key)
    bodies = [route.body for route in routes if route.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if needs_key else [{"key": []}, {}],
    }


def _operation(route: Route, keys: _Keys) -> dict[str, Any]:
    schema_name = "MessagesError" if route.path.startswith(PATH_PREFIX) else "Error"
    errors = {status: _error(text, schema_name) for status, text in sorted(_errors(route, keys).items())}
    shown: dict[str, Any] = {"summary": route.summary, "responses": {**_answers(route), **errors}}
    if route.body is not None:
        schema = {"$ref": f"#/components/schemas/{route.body.__name__}"}
        shown["requestBody"] = {"required": route.needs_body, "content": {"application/json": {"schema": schema}}}
    if route.streams_body:
        shown["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    if route.parameter is not None:
        shown["parameters"] = [{"name": route.parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    if route.auth == "none":
        shown["security"] = []
    elif keys.guards(route):
        shown["security"] = [{"key": []}]
    return shown


def _answers(route: Route) -> dict[str, Any]:
    if route.auth == "admin":
        return {"2XX": {"description": "done", "content": {"application/json": {}}}}
    if route.body is None:
        return {"200": {"description": "answered", "content": {route.content_type: {}}}}
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.generates and "stream" in route.body.__struct_fields__:
        content["text/event-stream"] = {}  # a schema would be read as that of each event
    return {"200": {"description": "answered", "content": content}}


def _errors(route: Route, keys: _Keys) -> dict[str, str]:
    """The statuses of errors, and what they mean. Any route can have 403 for an origin, and 500."""
    errors = {"403": "an origin that is not allowed", "500": "an error inside the server", "503": "not now"}
    if keys.guards(route):
        errors["401"] = "no valid key"
    if route.parameter is not None:
        errors["404"] = "not found"
    if route.body is not None:
        errors |= {"400": "refused", "404": "another model", "408": "the body came too slowly"}
        errors |= {"413": "too long", "415": "not JSON"}
    if route.streams_body:
        errors |= {"400": "refused", "408": "the body came too slowly", "413": "too long"}
    if route.body is InvocationRequest:
        errors |= {"424": "a session is closed that is not named"}
    if route.generates:
        errors |= {"429": "the queue is full, where the server is set to say so", "504": "not done in time"}
    if route.path.startswith(_BATCH_ROUTES):
        errors |= {"501": "the server was started without a directory for batches"}
    if _is_control(route):
        errors |= {"403": "not the admin key", "404": "the server does not offer it", "409": "not in this state"}
    return errors


def _is_control(route: Route) -> bool:
    return route.auth == "admin" or route.is_control


def _error(description: str, schema_name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{schema_name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
