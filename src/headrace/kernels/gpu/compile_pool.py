"""Compiles launches in forks of this process while they are being found: a kernel takes up to seconds of one core.

add ─▶ waiting, the slowest first ─▶ an idle fork ─▶ Triton's cache
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import perf_counter
from types import TracebackType

from headrace.errors import ModelError
from headrace.kernels.gpu.launches import Launch, compile_launch, prepare_to_compile
from headrace.parent_death import die_with

Progress = Callable[[int, int], None]  # kernels done, and their number as far as it is known

# Seconds that kernels take to compile, of Llama 3.2 1B with Triton 3.7 on one core of an EPYC, 2026-11-17. They decide
# the order, so only ratios matter, and only of the slow ones.
_SECONDS = {
    "_rope_and_attend": 1.6,
    "_prefill": 1.3,
    "_decode": 1.2,
    "_shared": 1.2,
    "_search_thresholds": 0.7,
    "_choose": 0.6,
    "_histogram": 0.5,
    "_settle": 0.5,
}
_OTHER_SECONDS = 0.3


@dataclass(frozen=True, slots=True, eq=False)
class _Fork:
    process: BaseProcess
    connection: Connection


class CompilePool:
    """Owns the forks. The target must be set (`launches.set_target`), and kernels imported, before it is built.

    >>> with CompilePool(15, progress) as pool:
    ...     start.launches(pool.add)
    ...     pool.finish()
    """

    def __init__(
        self,
        num_processes: int,
        progress: Progress = lambda done, total: None,
        compiled: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        """`compiled` gets the name of each kernel that was compiled, and the seconds that it took."""
        self._progress, self._compiled = progress, compiled
        self._numbers = count()
        self._waiting: list[tuple[float, int, Launch]] = []  # a heap, the slowest first
        self._num_added = self._num_done = 0
        self._busy: dict[Connection, Launch] = {}
        prepare_to_compile()  # before the forks, or each of them would
        self._forks = [_fork() for _ in range(max(1, num_processes))]
        self._idle = [fork.connection for fork in self._forks]

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fork in self._forks:
            fork.process.kill()  # it waits, or nobody wants what it does; Triton's cache is written atomically
        for fork in self._forks:
            fork.process.join()
            fork.connection.close()

    def add(self, launch: Launch) -> None:
        """Compile this launch as soon as a fork has time. Does not wait."""
        seconds = _SECONDS.get(launch.function, _OTHER_SECONDS)
        heappush(self._waiting, (-seconds, next(self._numbers), launch))
        self._num_added += 1
        self._collect(timeout_s=0.0)
        self._assign()

    def finish(self) -> int:
        """Wait until everything that was added is compiled. Returns the number of launches."""
        self._progress(self._num_done, self._num_added)
        while self._busy:
            self._collect(timeout_s=None)
            self._assign()
        if self._num_done < self._num_added:
            failed = self._num_added - self._num_done
            raise ModelError(f"{failed} of {self._num_added} kernels could not be compiled; see the messages above")
        return self._num_added

    def _assign(self) -> None:
        while self._idle and self._waiting:
            connection, (_, _, launch) = self._idle.pop(), heappop(self._waiting)
            try:
                connection.send(launch)
            except OSError:  # this fork has died
                heappush(self._waiting, (0.0, next(self._numbers), launch))
                continue
            self._busy[connection] = launch

    def _collect(self, *, timeout_s: float | None) -> None:
        """Take back forks that are done; those that have died take their launch with them."""
        for connection in wait(list(self._busy), timeout_s):
            assert isinstance(connection, Connection)
            launch = self._busy.pop(connection)
            with suppress(EOFError, OSError):
                self._compiled(launch.function, connection.recv())
                self._idle.append(connection)
                self._num_done += 1
                self._progress(self._num_done, self._num_added)


def compile_all(launches: Iterable[Launch], *, num_processes: int) -> None:
    with CompilePool(num_processes) as pool:
        for launch in launches:
            pool.add(launch)
        pool.finish()


def _fork() -> _Fork:
    context = multiprocessing.get_context("fork")  # what was imported need not be imported again
    ours, theirs = context.Pipe()
    process = context.Process(target=_compile_all, args=(theirs, os.getpid()), daemon=True)
    process.start()
    theirs.close()
    return _Fork(process, ours)


def _compile_all(connection: Connection, parent: int) -> None:
    """In a fork, until it is killed: compiles what it is sent. Later forks have the parent's end of the pipe too, so
    the parent's death is not seen by it."""
    die_with(parent)
    while True:
        launch, began = connection.recv(), perf_counter()
        compile_launch(launch)
        connection.send(perf_counter() - began)
