"""Requests to an ASGI application without a socket, and an application that records them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.server.endpoints import ROUTES
from headrace.server.http.gate import Application, Gate, Message, Receive, Scope, Send
from headrace.server.http.keys import Keys
from headrace.server.http.routes import Router
from headrace.server.options import ServerOptions

PUBLIC_PATHS = Router(ROUTES).public_paths


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


@dataclass
class Echo:
    """Responds to every request with the length of its body, and keeps its scope."""

    scopes: list[Scope] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        message = await receive()
        assert not message["more_body"]
        self.bodies.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len(message["body"])).encode()})


class GateBench:
    """A gate in front of `Echo`. `refused` holds the reasons of refusals."""

    def __init__(
        self, app: Application | None = None, *, environ: dict[str, str] | None = None, **options: Any
    ) -> None:
        self.echo = Echo()
        self.refused: list[str] = []
        made = ServerOptions(**options)
        self.keys = Keys(made, environ=environ or {}, print_line=lambda line: None)
        self.gate = Gate(app or self.echo, made, self.keys, public_paths=PUBLIC_PATHS, on_refused=self.refused.append)

    def ask(
        self,
        path: str = "/v1/models",
        headers: dict[str, str] | Iterable[tuple[str, str]] = (),
        *,
        method: str = "GET",
        body: Iterable[bytes] = (),
        ends: bool = True,
    ) -> Answer:
        """Send a request in a new event loop and return the response."""
        return asyncio.run(self.send(path, headers, method=method, body=body, ends=ends))

    async def send(
        self,
        path: str = "/v1/models",
        headers: dict[str, str] | Iterable[tuple[str, str]] = (),
        *,
        method: str = "GET",
        body: Iterable[bytes] = (),
        ends: bool = True,
    ) -> Answer:
        """Send a request with its body in parts. Without `ends` the client falls silent after them."""
        given = headers.items() if isinstance(headers, dict) else headers
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given],
        }
        return await self._exchange(scope, list(body), ends)

    async def _exchange(self, scope: Scope, parts: list[bytes], ends: bool) -> Answer:
        messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if ends:
            messages.append({"type": "http.request", "body": b"", "more_body": False})
        sent: list[Message] = []

        async def receive() -> Message:
            if messages:
                return messages.pop(0)
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

        async def send(message: Message) -> None:
            sent.append(message)

        await asyncio.wait_for(self.gate(scope, receive, send), 30)
        assert sent[0]["type"] == "http.response.start" and not sent[-1].get("more_body", False)
        headers = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))
