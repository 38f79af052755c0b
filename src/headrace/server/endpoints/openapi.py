"""GET /openapi.json: the routes, with the bodies as msgspec checks them."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from headrace.server.endpoints.schema.chat import ChatRequest
from headrace.server.endpoints.schema.completions import CompletionRequest
from headrace.server.endpoints.schema.responses import ResponsesRequest
from headrace.server.endpoints.schema.tokenize import DetokenizeRequest, TokenizeRequest
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services
from headrace.version import __version__

_POSTS: dict[str, tuple[type[msgspec.Struct], str, bool]] = {  # the body, what it does, whether it can stream
    "/v1/chat/completions": (ChatRequest, "The assistant's next message in a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue prompts", True),
    "/v1/responses": (ResponsesRequest, "The assistant's next message, in the form of OpenAI's Responses API", True),
    "/tokenize": (TokenizeRequest, "The tokens of a prompt or a conversation", False),
    "/detokenize": (DetokenizeRequest, "The text of tokens", False),
}
_GETS = {
    "/v1/models": "The model, as a list",
    "/v1/models/{model}": "The model",
    "/tokenizer_info": "What a client needs to tokenize as the model does",
    "/health": "Whether the server is alive",
    "/ready": "Whether it takes requests",
    "/version": "Its version",
    "/load": "How many requests it is answering",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This document",
}
_CONTROLS = {  # with the admin key
    "/admin/info": ("get", "What the server runs with, and why"),
    "/admin/drain": ("post", "Finish what runs, take on nothing, and end"),
    "/admin/reload_keys": ("post", "Read the file of keys again"),
    "/admin/reset_prefix_cache": ("post", "Empty the prefix cache"),
}
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


async def show(services: Services, exchange: Exchange) -> None:
    await exchange.reply(200, _encoded(services.options.root_path))


@cache
def _encoded(root_path: str) -> bytes:
    return msgspec.json.encode(document(root_path))


def document(root_path: str = "") -> dict[str, Any]:
    bodies = [body for body, _, _ in _POSTS.values()]
    _, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"post": _post(*entry)} for path, entry in _POSTS.items()}
    paths |= {path: {"get": _get(path, summary)} for path, summary in _GETS.items()}
    paths |= {path: {method: _control(summary)} for path, (method, summary) in _CONTROLS.items()}
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


def _post(body: type[msgspec.Struct], summary: str, can_stream: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if can_stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    errors = {"400": "refused", "404": "another model", "413": "too long", "415": "not JSON", "503": "not now"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "answered", "content": content},
            **{status: _error(text) for status, text in errors.items()},
        },
    }


def _get(path: str, summary: str) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    shown: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "answered", "content": {kind: {}}}, "503": _error("not now")},
    }
    if "{model}" in path:
        shown["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        shown["responses"]["404"] = _error("another model")
    return shown


def _control(summary: str) -> dict[str, Any]:
    return {
        "summary": summary,
        "security": [{"key": []}],
        "responses": {
            "2XX": {"description": "done", "content": {"application/json": {}}},
            **{status: _error(text) for status, text in _DENIED.items()},
        },
    }


def _error(description: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
