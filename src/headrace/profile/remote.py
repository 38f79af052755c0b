"""Starts and stops the profiler of a live server over HTTP: Headrace's, with the whole report, or vLLM's, which only
writes a trace on its own machine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
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
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"the address must start with http:// or https://, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def start(self, **options: Any) -> dict[str, Any]:
        return self._ask("POST", "/start_profile", options or None, timeout_s=START_TIMEOUT_S) or {}

    def stop(self, **options: Any) -> dict[str, Any]:
        return self._ask("POST", "/stop_profile", options or None, timeout_s=STOP_TIMEOUT_S) or {}

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float) -> Any:
        data = json.dumps(body).encode() if body is not None else (b"" if method == "POST" else None)
        headers = self._headers if body is not None else {k: v for k, v in self._headers.items() if k != "Content-Type"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerRefusedError(_refusal(self.url + path, error), error.code) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"{self.url}{path} does not answer: {reason}") from error
        try:
            return json.loads(text) if text.strip() else None
        except ValueError:
            return None


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


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        message = error.reason
    return f"{url} answered {error.code}: {message}"
