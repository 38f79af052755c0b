"""Starts and stops the profiler of a live server over HTTP: Headrace's, with the whole report, or vLLM's, which only
writes a trace on its own machine."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from time import sleep
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import ConfigError
from headrace.profile.report import Overhead

START_TIMEOUT_S = 120.0  # the first start of the profiler takes seconds
STOP_TIMEOUT_S = 900.0  # vLLM writes large traces before it answers
MAX_SECONDS = 60.0  # of a profile on a server (`engine/profiler.py`)
SPARE_S = 30.0  # the server ends a profile by itself so long after it should have been stopped
WARM_UP_S = 0.3


class ServerRefusedError(ConfigError):
    """The server's answer was an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RemoteProfile:
    """What a server answered. `report` is None if it is not Headrace's."""

    report: dict[str, Any] | None
    table: str
    page: str | None
    files: dict[str, str]
    overhead: Overhead | None
    device: str = ""
    serve_arguments: tuple[str, ...] = ()  # how the server was started, without its keys


class RemoteServer:
    """A server that has /start_profile and /stop_profile."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            self._address = urlsplit(url)
            _ = self._address.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no address: {error}") from error
        if self._address.scheme not in ("http", "https") or not self._address.hostname:
            raise ConfigError(f"the address must start with http:// or https:// and name a host, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def start(self, **options: Any) -> dict[str, Any]:
        return self._ask("POST", "/start_profile", options or None, timeout_s=START_TIMEOUT_S) or {}

    def stop(self, **options: Any) -> dict[str, Any]:
        return self._ask("POST", "/stop_profile", options or None, timeout_s=STOP_TIMEOUT_S) or {}

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float) -> Any:
        """One request. Redirects are not followed: the key is for this server."""
        headers = self._headers if body is not None else {k: v for k, v in self._headers.items() if k != "Content-Type"}
        data = b"" if body is None else json.dumps(body).encode()
        connection = self._connection(timeout_s)
        try:
            prefix = urlsplit(self.url).path
            connection.request(method, prefix + path, body=None if method == "GET" else data, headers=headers)
            answer = connection.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(
                f"{self.url}{path} does not answer: {error or type(error).__name__}; check --url"
            ) from error
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            message = f"{self.url}{path} answered {answer.status}: {_message(text) or answer.reason}"
            raise ServerRefusedError(message, answer.status)
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return None

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        assert self._address.hostname is not None
        return kind(self._address.hostname, self._address.port, timeout=timeout_s)


def profile_server(
    server: RemoteServer,
    *,
    seconds: float,
    tool: str = "torch",
    print_line: Callable[[str], None] = lambda line: None,
) -> RemoteProfile:
    """Record windows of a live server, and of the time between them without the profiler."""
    limit = min(MAX_SECONDS, seconds + SPARE_S)
    print_line("starting the profiler")
    if tool == "cuda":
        server.start(tool=tool, max_seconds=limit)
        sleep(seconds)
        server.stop()
        return RemoteProfile(None, "", None, {}, None)
    started = server.start(max_seconds=limit)
    if "num_finished_steps" not in started:
        print_line(f"{server.url} is no Headrace server; it records {seconds:g} s and writes its trace by itself")
        sleep(seconds)
        server.stop()
        return RemoteProfile(None, "", None, {}, None)
    sleep(min(WARM_UP_S, seconds))
    first = server.stop(keep=False)  # the first start is slow; the time after it is without the profiler
    print_line(f"{seconds:g} s without the profiler")
    sleep(seconds)
    print_line(f"recording {seconds:g} s")
    started = server.start(max_seconds=limit)
    sleep(seconds)
    answer = server.stop(picture=True)
    overhead = overhead_of(first, started, answer)
    return RemoteProfile(
        report=answer.get("report"),
        table=str(answer.get("table", "")),
        page=answer.get("page"),
        files=answer.get("files", {}),
        overhead=overhead,
        device=str(answer.get("device", "")),
        serve_arguments=tuple(answer.get("serve_arguments") or ()),
    )


def overhead_of(first: dict[str, Any], started: dict[str, Any], stopped: dict[str, Any]) -> Overhead | None:
    """Steps per second between two profiles, and in the second one."""
    try:
        off = (started["num_finished_steps"] - first["num_finished_steps"]) / (started["at"] - first["resumed_at"])
        on = (stopped["num_finished_steps"] - started["num_finished_steps"]) / (stopped["stopped_at"] - started["at"])
    except (KeyError, ZeroDivisionError):
        return None
    return Overhead((round(on, 3),), (round(off, 3),))


def _message(text: bytes) -> str | None:
    """The message of an error object."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
