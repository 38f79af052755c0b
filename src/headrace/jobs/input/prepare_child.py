"""The process that prepares the lines of a job: `python -m headrace.jobs.input.prepare_child SOCKET`.

It ends when the job closes the socket.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from collections.abc import Iterator

from headrace.engine.process.channel import Channel
from headrace.jobs.input.prepare_wire import ItemWriter, decode_lines, decode_setup

GARBAGE_OBJECTS = 50_000
MAX_BACKLOG_BYTES = 1 << 24


def main(argv: list[str]) -> None:
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the job handles them and then ends this process
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_OBJECTS)
    channel = Channel(socket.socket(fileno=int(argv[0])), max_backlog_bytes=MAX_BACKLOG_BYTES)
    frames, writer = _frames(channel), ItemWriter()
    preparer = decode_setup(next(frames)).preparer()
    for frame in frames:
        channel.send(writer.frame(preparer.prepare(decode_lines(frame))))


def _frames(channel: Channel) -> Iterator[bytes]:
    """Yields frames until the job closes the socket or dies."""
    while (frames := channel.receive()) is not None:
        yield from frames


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ConnectionError, StopIteration):
        pass  # the job has ended
    os._exit(0)
