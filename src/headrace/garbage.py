"""Controls when Python's garbage collector runs.

A full collection visits every object of the process and stops all of its threads for 120 to 170 ms with torch loaded. A
GPU runs out of work meanwhile, and no stream gets a token. An engine's steps leave no reference cycles behind.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

NEW_OBJECTS = 500_000  # between two young collections, which take 30 ms and more; Python's default is 700 to 2,000

_lock = threading.Lock()
_num_inside = 0
_thresholds = (0, 0, 0)
_has_frozen = False


def freeze_loaded_objects() -> None:
    """Exclude all existing objects from collection: for a process of our own, once modules and model are loaded."""
    gc.collect()
    gc.freeze()


@contextmanager
def collecting_less_often() -> Iterator[None]:
    """While an engine works in the user's process, collect only new objects, and less often. The last one to leave
    restores the former state."""
    _enter()
    try:
        yield
    finally:
        _leave()


def collect() -> None:
    """Collect all garbage now, frozen objects too: a dead engine holds much memory, also in cycles."""
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
        if _thresholds[0]:  # 0 disables collection, which stays so
            gc.set_threshold(max(NEW_OBJECTS, _thresholds[0]), *_thresholds[1:])
        _has_frozen = gc.get_freeze_count() == 0  # objects that others have frozen must stay frozen
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
