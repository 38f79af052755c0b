"""A Unix socket to listen on: its file is there as long as the listener is open."""

from __future__ import annotations

import errno
import os
import socket
import stat

from headrace.errors import ConfigError, reason_of


class UnixListener(socket.socket):
    """Bound to a path and not listening yet. `close` removes the file."""

    def __init__(self, path: str) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        self._path: str | None = None
        try:
            _remove_unused(path)
            self.bind(path)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot listen on the Unix socket {path}: {reason_of(error)}; --uds chooses another path"
            ) from error
        self._path = path

    def close(self) -> None:
        super().close()
        path, self._path = self._path, None
        if path is not None:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass


def _remove_unused(path: str) -> None:
    """Remove the socket of a server that was killed; refuse one that a server listens on, and any other file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "there is a file of this name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")
