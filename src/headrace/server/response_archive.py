"""Stored responses in a directory, for the next server: responses.sqlite3, and a lock.

A thread writes, in the order of the calls, so that the event loop never waits for a disk. What was stored in the last
moments before a crash may be lost; the end of a server is not the end of what it has queued.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec

from headrace.errors import ConfigError, JobError, reason_of
from headrace.jobs.store.lock import JobLock, holder_of
from headrace.server.response_store import StoredResponse

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL, num_bytes INTEGER NOT NULL,
    response BLOB NOT NULL, items BLOB NOT NULL, UNIQUE (owner, id)
)
"""
_WRITE = "INSERT OR REPLACE INTO responses (owner, id, num_bytes, response, items) VALUES (?, ?, ?, ?, ?)"
_REMOVE = "DELETE FROM responses WHERE owner = ? AND id = ?"
_VERSION = 1  # of the schema

_log = logging.getLogger(__name__)
_Statement = tuple[str, tuple[object, ...]]


class ResponseArchive:
    """Owned by one server. `write` and `remove` are for its event loop; a thread carries them out."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = JobLock.take(directory / "lock")
        except JobError as error:
            holder = holder_of(directory / "lock")
            raise ConfigError(f"another server uses the directory {directory}: {holder}; give another") from error
        except OSError as error:
            raise ConfigError(f"the directory of responses {directory} cannot be used: {reason_of(error)}") from error
        try:
            self._database = _open(directory / "responses.sqlite3")
        except sqlite3.Error as error:
            self._lock.release()
            raise ConfigError(f"the database in {directory} cannot be opened: {error}") from error
        self._todo: SimpleQueue[_Statement | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-responses", daemon=True)
        self._thread.start()

    def read(self) -> Iterator[StoredResponse]:
        """What an earlier server has left, the oldest first. Called before anything is written."""
        rows = self._database.execute("SELECT owner, num_bytes, response, items FROM responses ORDER BY number")
        for owner, num_bytes, response, items in rows.fetchall():
            yield StoredResponse(owner, msgspec.json.decode(response), msgspec.json.decode(items), num_bytes)

    def write(self, stored: StoredResponse) -> None:
        response, items = msgspec.json.encode(stored.response), msgspec.json.encode(stored.items)
        self._todo.put((_WRITE, (stored.owner, stored.id, stored.num_bytes, response, items)))

    def remove(self, owner: str, id: str) -> None:
        self._todo.put((_REMOVE, (owner, id)))

    def close(self) -> None:
        """Return when everything is written."""
        self._todo.put(None)
        self._thread.join()
        self._database.close()
        self._lock.release()

    def _run(self) -> None:
        while (statement := self._todo.get()) is not None:
            try:
                self._database.execute(*statement)
            except sqlite3.Error as error:  # a full disk: the response is in memory, and the server goes on
                _log.error("a stored response was not written: %s", error)


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > _VERSION:
        raise sqlite3.DatabaseError(f"its version is {version}, which a newer Headrace has written")
    database.execute(_SCHEMA)
    database.execute(f"PRAGMA user_version = {_VERSION}")
    return database
