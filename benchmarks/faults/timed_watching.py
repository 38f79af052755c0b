"""Times what a server does to watch itself, where it does it: CPU time of the thread, for each slice of work.

Imported by `sitecustomize.py` if HEADRACE_WATCHING_TIMES names a file. Each line there has the moment, by the clock of
all processes, the part and the CPU seconds of one slice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from headrace.hardware import nvml
from headrace.monitor.metrics import ServerMetrics
from headrace.server.bottleneck import BottleneckWatch
from headrace.server.http.gate import Gate
from headrace.server.self_monitor import SelfMonitor

PATHS = ("/dashboard/data", "/metrics", "/alerts", "/bottleneck")
FILE = os.environ["HEADRACE_WATCHING_TIMES"]


def note(part: str, seconds: float) -> None:
    with open(FILE, "a") as file:  # outside of what is timed
        file.write(f"{time.monotonic():.6f} {part} {seconds:.9f}\n")


class Timed:
    """Awaits a coroutine and notes the CPU time of each slice that it runs on the event loop."""

    def __init__(self, part: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._part, self._coroutine = part, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            started = time.thread_time()
            try:
                waits_for = resume()
            except StopIteration as end:
                note(self._part, time.thread_time() - started)
                return end.value
            note(self._part, time.thread_time() - started)
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001  what the event loop throws in belongs to the coroutine
                resume = partial(self._coroutine.throw, error)
            else:
                resume = partial(self._coroutine.send, value)


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*args)
        finally:
            note(part, time.thread_time() - started)

    return call


SelfMonitor.sample = timed("samples and alerts", SelfMonitor.sample)  # type: ignore[method-assign]
nvml._NvmlReader._read = timed("GPU figures", nvml._NvmlReader._read)  # type: ignore[method-assign]
ServerMetrics.render = timed("rendered metrics", ServerMetrics.render)  # type: ignore[method-assign]
_tick, _gate = BottleneckWatch.tick, Gate.__call__


async def tick(self: BottleneckWatch) -> None:
    await Timed("diagnosis and log", _tick(self))


async def gate(self: Gate, scope: Any, receive: Any, send: Any) -> None:
    if scope.get("path") in PATHS:
        await Timed(scope["path"], _gate(self, scope, receive, send))
    else:
        await _gate(self, scope, receive, send)


BottleneckWatch.tick = tick  # type: ignore[method-assign]
Gate.__call__ = gate  # type: ignore[method-assign]
