"""Ends engines in a forked child: threads and sockets of an engine belong to the process that started it."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from headrace.errors import EngineDeadError


class EndedByFork(Protocol):
    def end_in_fork(self, failure: EngineDeadError) -> None:
        """Refuse all calls from now on with `failure`. Runs in the child, where no other thread exists."""


_engines: WeakSet[EndedByFork] = WeakSet()


def end_in_forks(engine: EndedByFork) -> None:
    """Call `engine.end_in_fork` in every process that is forked from this one."""
    _engines.add(engine)


def _end_all() -> None:
    failure = EngineDeadError(
        "this process was forked from the one that runs it; start an engine here, or use multiprocessing's start "
        "method 'spawn'"
    )
    for engine in list(_engines):
        engine.end_in_fork(failure)


os.register_at_fork(after_in_child=_end_all)
