"""When the interpreter looks for garbage.

A full collection looks at every object of the process and stops all of its threads meanwhile: 120 to 170 ms with torch
loaded, in which a GPU runs out of work and no stream gets a token. What an engine does leaves no cycles behind.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 500_000  # between two looks at the new ones, which take 30 ms and more; Python's default is 700 to 2,000

_lock = threading.Lock()
_num_inside = 0
_thresholds = (0, 0, 0)
_has_frozen = False


def leave_loaded_alone() -> None:
    """For a process of our own, once it is ready: modules and the model stay for good."""
    gc.collect()
    gc.freeze()


@contextmanager
def looked_for_less() -> Iterator[None]:
    """For somebody's process, while an engine works in it: only new objects are looked at, and less often. All is as it
    was when the last of those inside has left."""
    _enter()
    try:
        yield
    finally:
        _leave()


def collect() -> None:
    """All garbage now, also what those inside leave alone: an engine that has died holds much, in cycles too."""
    with _lock:
        if _num_inside and _has_frozen:
            gc.unfreeze()
        gc.collect()
        if _num_inside and _has_frozen:
            gc.freeze()


def _enter() -> None:
    global _num_inside, _thresholds, _has_frozen  # noqa: PLW0603  there is one collector
    with _lock:
        _num_inside += 1
        if _num_inside > 1:
            return
        _thresholds = gc.get_threshold()
        if _thresholds[0]:  # 0 is "never", which stays so
            gc.set_threshold(max(NEW_OBJECTS, _thresholds[0]), *_thresholds[1:])
        _has_frozen = gc.get_freeze_count() == 0  # what others have frozen must not be thawed by us
        if _has_frozen:
            gc.freeze()


def _leave() -> None:
    global _num_inside  # noqa: PLW0603
    with _lock:
        _num_inside -= 1
        if _num_inside:
            return
        gc.set_threshold(*_thresholds)
        if _has_frozen:
            gc.unfreeze()
