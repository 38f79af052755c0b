"""Frames over one end of a socket pair: a length of four bytes, then the payload.

sender's thread: send ─▶ the socket, as much as it takes at once ─▶ the peer's receive
                    └──▶ the rest into the backlog ─▶ a thread that waits for the socket
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from struct import Struct
from typing import Protocol

_LENGTH = Struct("<I")
_READ_BYTES = 1 << 18
_SOCKET_BYTES = 1 << 20  # asked for; a system may give less


class FrameChannel(Protocol):
    """What an engine and its front need of a channel, whatever carries the frames."""

    def send(self, payload: bytes) -> None: ...

    def receive(self, timeout_s: float | None = None) -> list[bytes] | None: ...

    def hang_up(self) -> None: ...

    def close(self) -> None: ...


class Channel:
    """Owns the socket. Any thread may send; one receives."""

    def __init__(self, end: socket.socket, *, max_backlog_bytes: int | None = None) -> None:
        self._socket = end
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._received = bytearray()
        self._max_backlog_bytes = max_backlog_bytes
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._changed = threading.Condition()
        self._flusher: threading.Thread | None = None
        self._is_closed = False

    def send(self, payload: bytes) -> None:
        """Send a frame. Never waits for the peer, unless the backlog is full. ConnectionError: the peer has gone."""
        frame = memoryview(_LENGTH.pack(len(payload)) + payload)
        with self._changed:
            if self._is_closed:
                raise ConnectionError("the channel is closed")
            if not self._backlog:
                frame = frame[self._send_at_once(frame) :]
            if frame:
                self._enqueue(frame)

    def receive(self, timeout_s: float | None = None) -> list[bytes] | None:
        """The frames that have arrived: at least one, or none after the timeout. None: the peer has gone."""
        while True:
            if timeout_s is not None and not self._poll.poll(1e3 * timeout_s):
                return []
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
            frames = self._take_frames()
            if frames:
                return frames

    def drain(self, timeout_s: float) -> None:
        """Wait until the backlog is empty, for at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not self._backlog, timeout_s)

    def hang_up(self) -> None:
        """End both directions. `receive` returns None then, here and at the peer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was first

    def close(self) -> None:
        """Close the socket. Called by the receiving thread, or when there is none."""
        self.hang_up()
        if self._flusher is not None:
            self._flusher.join()
        self._socket.close()

    def _send_at_once(self, frame: memoryview) -> int:
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _enqueue(self, frame: memoryview) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush, name="headrace-sender", daemon=True)
            self._flusher.start()
        limit = self._max_backlog_bytes
        while limit is not None and self._backlog_bytes > limit and not self._is_closed:
            self._changed.wait()
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        self._changed.notify_all()

    def _flush(self) -> None:
        while True:
            with self._changed:
                while not (self._backlog or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                frame = self._backlog[0]
            try:
                self._socket.sendall(frame)
            except OSError:
                return self.hang_up()
            with self._changed:
                self._backlog_bytes -= len(self._backlog.popleft())
                self._changed.notify_all()

    def _take_frames(self) -> list[bytes]:
        data, start, frames = self._received, 0, []
        while len(data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, start)
            end = start + _LENGTH.size + length
            if len(data) < end:
                break
            frames.append(bytes(memoryview(data)[start + _LENGTH.size : end]))
            start = end
        del data[:start]
        return frames
