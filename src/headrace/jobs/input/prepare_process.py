"""The job's end of a process that prepares its lines, so that the job's own has a core for the rest.

    reader's thread   lines ─▶ frames ─▶ the process: parse, render, tokenize ─▶ frames ─▶ items

Batches come back in their order. Should the process end, those that it had are prepared here, and all that follow.
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

LEAST_LINES = 50_000  # for fewer it is not worth a process, which takes a second to start
NUM_AHEAD = 4  # batches that the process has or has done, at most
EXIT_S = 5.0

_log = logging.getLogger(__name__)


class PreparingProcess:
    """Used by one thread, once: the process ends with the lines. `local` prepares what the process cannot."""

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
        """As long as the process lives. `waiting` are the batches that it was sent and has not given back."""
        try:
            frame = encode_setup(self._setup())
        except (TypeError, ValueError, OverflowError) as error:
            _log.info("lines are prepared by the job's own process: %s", error)
            return
        ours, theirs = socket.socketpair()
        channel, reader = Channel(ours), ItemReader()
        try:
            with theirs:
                self.process = _spawn(theirs)
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
            _log.warning("the process that prepares lines has ended; the job goes on without it (%r)", error)
        finally:
            channel.close()
            if self.process is not None:
                _end(self.process)

    def _received(self, frame: bytes, reader: ItemReader, waiting: deque[list[InputLine]]) -> Items:
        items = reader.items(frame)
        waiting.popleft()
        return items


def is_worth_a_process(num_lines: int | None, *, least_lines: int = LEAST_LINES) -> bool:
    return num_lines is not None and num_lines >= least_lines and num_cores() > 1


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _frames(channel: Channel) -> Iterator[bytes]:
    while (frames := channel.receive()) is not None:
        yield from frames


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # Tokenizers free thousands of small pieces of memory at once: glibc keeps more of them at hand than its seven.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=64"} | child_environment()
    if num_cores() <= 2:  # the job has the other core: threads would only get in each other's way
        environment = {"TOKENIZERS_PARALLELISM": "false"} | environment
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.jobs.input.prepare_child", str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=2,  # what is written there is for people
        pass_fds=[theirs.fileno()],
        env=environment,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """It has been hung up on."""
    try:
        process.wait(EXIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
