"""Prepares lines in a second process, which leaves the job's own core free for the rest.

    reader thread   lines ─▶ frames ─▶ the process: parse, render, tokenize ─▶ frames ─▶ items

Batches come back in order. If the process ends, this process prepares the batches that it had and all later ones.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import child_environment
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.prepare import Items, LinePreparer
from headrace.jobs.input.prepare_wire import ItemReader, Setup, encode_lines, encode_setup

MIN_LINES_FOR_PROCESS = 50_000  # for fewer lines the second that a process takes to start does not pay off
NUM_AHEAD = 4  # most batches that the process holds, prepared or not
EXIT_S = 5.0

_log = logging.getLogger(__name__)


class PreparingProcess:
    """Used by one thread, once: the process ends with the input. `local` prepares what the process cannot."""

    num_ahead = NUM_AHEAD

    def __init__(self, setup: Callable[[], Setup], local: LinePreparer) -> None:
        self._setup = setup
        self._local = local
        self.process: subprocess.Popen[bytes] | None = None

    def prepare_all(self, batches: Iterable[list[InputLine]]) -> Iterator[Items]:
        left = iter(batches)
        waiting: deque[list[InputLine]] = deque()
        yield from self._prepare_there(left, waiting)
        while waiting:
            yield self._local.prepare(waiting.popleft())
        yield from map(self._local.prepare, left)

    def _prepare_there(self, left: Iterator[list[InputLine]], waiting: deque[list[InputLine]]) -> Iterator[Items]:
        """Prepare lines in the process while it lives. `waiting`: the batches that it was sent and has not returned."""
        try:
            frame = encode_setup(self._setup())
        except (TypeError, ValueError, OverflowError) as error:
            _log.info("lines are prepared by the job's own process: %s", error)
            return
        ours, theirs = socket.socketpair()
        channel, reader = Channel(ours), ItemReader()
        try:
            with theirs:
                self.process = spawn(theirs)
            channel.send(frame)
            frames = _frames(channel)
            for batch in left:
                waiting.append(batch)
                channel.send(encode_lines(batch))
                if len(waiting) == NUM_AHEAD:
                    yield self._received(next(frames), reader, waiting)
            while waiting:
                yield self._received(next(frames), reader, waiting)
        except (OSError, StopIteration) as error:
            _log.warning("the process that prepares lines has ended; the job continues without it (%r)", error)
        finally:
            channel.close()
            if self.process is not None:
                _join(self.process)

    def _received(self, frame: bytes, reader: ItemReader, waiting: deque[list[InputLine]]) -> Items:
        items = reader.items(frame)
        waiting.popleft()
        return items


def is_worth_a_process(num_lines: int | None, *, min_lines: int = MIN_LINES_FOR_PROCESS) -> bool:
    return num_lines is not None and num_lines >= min_lines and num_cores() > 1


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _frames(channel: Channel) -> Iterator[bytes]:
    while (frames := channel.receive()) is not None:
        yield from frames


def spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # Tokenizers free thousands of small allocations at once: let glibc cache more of them than its default of seven.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=64"} | child_environment()
    if num_cores() <= 2:  # the job uses the other core: more threads would only compete
        environment = {"TOKENIZERS_PARALLELISM": "false"} | environment
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.jobs.input.prepare_child", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # stdout may be the job's output; messages go to stderr
        pass_fds=[theirs.fileno()],
        env=environment,
    )


def _join(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process. Its socket is closed, so it ends by itself."""
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
