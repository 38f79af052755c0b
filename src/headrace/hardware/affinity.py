"""Pins the calling thread to CPUs. Threads that it starts meanwhile are pinned too: they inherit its mask."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

CAN_PIN = hasattr(os, "sched_setaffinity")

_log = logging.getLogger(__name__)


@contextmanager
def pinned_to(cpus: Collection[int]) -> Iterator[None]:
    """Pins the calling thread within the block. Empty: leaves it as it is. CPUs that the system refuses are logged."""
    if not cpus or not CAN_PIN:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(cpus)
    try:
        yield
    finally:
        with suppress(OSError):  # the mask that it had may be forbidden by now
            os.sched_setaffinity(0, before)


def pin(cpus: Collection[int]) -> None:
    """Pins the calling thread for good."""
    if not cpus or not CAN_PIN:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        _log.warning("threads are not pinned to CPUs %s: %s", sorted(cpus), error.strerror)
