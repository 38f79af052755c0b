"""The batch directory: files, batches and their states. Survives the loss of the process at any moment.

batches.sqlite3        rows of files and batches (WAL, synchronous=FULL: a change that was answered is on the disk)
lock                   held by the server that uses the directory
files/<file id>        contents; without a row they are remains of a crash, removed at the next start
uploads/<name>         files that are being received
jobs/<batch id>/       input (a hard link: the file may be deleted meanwhile), job directory, results
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import msgspec

from headrace.errors import ConfigError, HeadraceError, JobError, reason_of
from headrace.jobs import crash_points
from headrace.jobs.files import sync_directory
from headrace.jobs.store.lock import JobLock, holder_of
from headrace.server.batch.records import UNFINISHED, Batch, Status, StoredFile

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, expires_at INTEGER, purpose TEXT NOT NULL, record BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL,
    status TEXT NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, number);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner, number);
CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, number);
"""
_VERSION = 1  # of the schema

_as_file = msgspec.json.Decoder(StoredFile).decode
_as_batch = msgspec.json.Decoder(Batch).decode
_encode = msgspec.json.encode


class StoreFullError(HeadraceError):
    """There is no room on the disk of the batch directory."""


class QuotaError(HeadraceError):
    """A key has reached one of its limits."""


class BatchStore:
    """Owned by one server. Its methods may be called from any thread; each is one transaction.

    Rows are listed by a number that only grows: a clock that jumps changes no order."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        try:
            for name in ("files", "uploads", "jobs"):
                (directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = JobLock.take(directory / "lock")
        except JobError as error:
            holder = holder_of(directory / "lock")
            raise ConfigError(f"another server uses the batch directory {directory}: {holder}; give another") from error
        except OSError as error:
            raise ConfigError(f"the batch directory {directory} cannot be used: {reason_of(error)}") from error
        self._guard = threading.Lock()
        try:
            self._database = _open(directory / "batches.sqlite3")
        except sqlite3.Error as error:
            self._lock.release()
            raise ConfigError(f"the database of the batch directory {directory} cannot be opened: {error}") from error
        self._remove_remains()

    def close(self) -> None:
        with self._guard:
            self._database.close()
        self._lock.release()

    # ---- paths

    def file_path(self, file_id: str) -> Path:
        return self.path / "files" / file_id

    def upload_path(self, name: str) -> Path:
        return self.path / "uploads" / name

    def job_path(self, batch_id: str) -> Path:
        return self.path / "jobs" / batch_id

    # ---- files

    def add_file(self, file: StoredFile, content: Path, *, max_files: int, max_bytes: int) -> None:
        """Take over a synced file. `content` is moved; on an error it is gone."""
        path = self.file_path(file.id)
        try:
            os.replace(content, path)
            sync_directory(path.parent)
            crash_points.reach("batch-file-moved")
            with self._change() as database:
                num_files, num_bytes = _held_by(database, file.owner)
                check_quota(num_files + 1, num_bytes + file.num_bytes, max_files=max_files, max_bytes=max_bytes)
                _insert_file(database, file)
        except BaseException:
            path.unlink(missing_ok=True)
            content.unlink(missing_ok=True)
            raise

    def held_by(self, owner: str) -> tuple[int, int]:
        """How many files and bytes a key stores."""
        with self._guard:
            return _held_by(self._database, owner)

    def file(self, file_id: str, owner: str) -> StoredFile | None:
        rows = self._rows("SELECT record FROM files WHERE id = ? AND owner = ?", (file_id, owner))
        return _as_file(rows[0][0]) if rows else None

    def files(
        self, owner: str, *, limit: int, after: str | None, purpose: str | None, newest_first: bool = True
    ) -> list[StoredFile]:
        """The next `limit` files."""
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")
        where, values = ["owner = ?"], [owner]
        if after is not None:
            where.append(f"number {compare} (SELECT number FROM files WHERE id = ? AND owner = ?)")
            values += [after, owner]
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        query = f"SELECT record FROM files WHERE {' AND '.join(where)} ORDER BY number {order} LIMIT {int(limit)}"
        return [_as_file(row[0]) for row in self._rows(query, values)]

    def delete_file(self, file_id: str, owner: str) -> bool:
        with self._change() as database:
            deleted = database.execute("DELETE FROM files WHERE id = ? AND owner = ?", (file_id, owner)).rowcount
        if deleted:
            self.file_path(file_id).unlink(missing_ok=True)
        return bool(deleted)

    def delete_expired_files(self, now: int) -> int:
        with self._change() as database:
            rows = database.execute("DELETE FROM files WHERE expires_at <= ? RETURNING id", (now,)).fetchall()
        for (file_id,) in rows:
            self.file_path(file_id).unlink(missing_ok=True)
        return len(rows)

    # ---- batches

    def add_batch(self, batch: Batch, *, max_unfinished: int) -> None:
        """The input is linked into the job's directory first, so that deleting the file harms no batch."""
        directory = self.job_path(batch.id)
        try:
            directory.mkdir(mode=0o700)
            _link(self.file_path(batch.input_file_id), directory / "input.jsonl")
            sync_directory(directory)
            sync_directory(directory.parent)
            with self._change() as database:
                marks = ", ".join("?" * len(UNFINISHED))
                (num_unfinished,) = database.execute(
                    f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({marks})", (batch.owner, *UNFINISHED)
                ).fetchone()
                if num_unfinished >= max_unfinished:
                    raise QuotaError(
                        f"{num_unfinished:,} batches of this key are unfinished, the limit is {max_unfinished:,}; wait "
                        "until some are finished, or cancel one"
                    )
                database.execute(
                    "INSERT INTO batches (id, owner, status, record) VALUES (?, ?, ?, ?)",
                    (batch.id, batch.owner, batch.status, _encode(batch)),
                )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        crash_points.reach("batch-added")

    def batch(self, batch_id: str, owner: str | None = None) -> Batch | None:
        """With `owner`, only one of that owner."""
        rows = self._rows("SELECT record FROM batches WHERE id = ?", (batch_id,))
        batch = _as_batch(rows[0][0]) if rows else None
        return batch if batch is not None and owner in (None, batch.owner) else None

    def batches(self, owner: str, *, limit: int, after: str | None) -> list[Batch]:
        """The next `limit` batches, newest first."""
        query, values = "SELECT record FROM batches WHERE owner = ?", [owner]
        if after is not None:
            query += " AND number < (SELECT number FROM batches WHERE id = ? AND owner = ?)"
            values += [after, owner]
        return [_as_batch(row[0]) for row in self._rows(f"{query} ORDER BY number DESC LIMIT {int(limit)}", values)]

    def unfinished(self) -> list[Batch]:
        """Of all owners, in the order in which they run: by priority, then oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        query = f"SELECT record FROM batches WHERE status IN ({marks}) ORDER BY number"
        found = [_as_batch(row[0]) for row in self._rows(query, UNFINISHED)]
        return sorted(found, key=lambda batch: batch.priority)

    def count_by_status(self) -> dict[str, int]:
        return dict(self._rows("SELECT status, COUNT(*) FROM batches GROUP BY status", ()))

    def move(
        self,
        batch_id: str,
        status: Status,
        *,
        since: Sequence[Status],
        change: Callable[[Batch], dict[str, object]] = lambda batch: {},
        files: Sequence[StoredFile] = (),
    ) -> Batch | None:
        """Change a batch's state and add its files, in one transaction. None: its state is none of `since` (any more),
        and nothing was changed."""
        with self._change() as database:
            row = database.execute("SELECT record FROM batches WHERE id = ?", (batch_id,)).fetchone()
            batch = None if row is None else _as_batch(row[0])
            if batch is None or batch.status not in since:
                return None
            moved = batch.moved(status, at=int(time()), **change(batch))
            database.execute(
                "UPDATE batches SET status = ?, record = ? WHERE id = ?", (moved.status, _encode(moved), batch_id)
            )
            for file in files:
                _insert_file(database, file)
        return moved

    # ---- internals

    def _rows(self, query: str, values: Sequence[object]) -> list[Any]:
        with self._guard:
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            try:
                self._database.execute("BEGIN IMMEDIATE")
                yield self._database
                self._database.execute("COMMIT")
            except BaseException as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                if isinstance(error, sqlite3.OperationalError) and _is_full(error):
                    raise StoreFullError("there is no room on the disk of the batch directory") from error
                raise

    def _remove_remains(self) -> None:
        """Remove what a killed server left: uploads, files without a row, jobs of finished batches."""
        for path in (self.path / "uploads").iterdir():
            path.unlink()
        known = {row[0] for row in self._rows("SELECT id FROM files", ())}
        for path in (self.path / "files").iterdir():
            if path.name not in known:
                path.unlink()
        running = {batch.id for batch in self.unfinished()}
        for path in (self.path / "jobs").iterdir():
            if path.name not in running:
                shutil.rmtree(path)


def check_quota(num_files: int, num_bytes: int, *, max_files: int, max_bytes: int) -> None:
    way_out = "delete files that you no longer need"
    if num_files > max_files:
        raise QuotaError(f"this key already stores {num_files - 1:,} files, the limit is {max_files:,}; {way_out}")
    if num_bytes > max_bytes:
        raise QuotaError(f"the files of this key would take {num_bytes:,} bytes, the limit is {max_bytes:,}; {way_out}")


def _held_by(database: sqlite3.Connection, owner: str) -> tuple[int, int]:
    query = "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?"
    num_files, num_bytes = database.execute(query, (owner,)).fetchone()
    return num_files, num_bytes


def _insert_file(database: sqlite3.Connection, file: StoredFile) -> None:
    database.execute(
        "INSERT INTO files (id, owner, num_bytes, expires_at, purpose, record) VALUES (?, ?, ?, ?, ?, ?)",
        (file.id, file.owner, file.num_bytes, file.expires_at, file.purpose, _encode(file)),
    )


def _open(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > _VERSION:
        database.close()
        raise sqlite3.DatabaseError(f"it was written by a newer version of Headrace (schema {version})")
    database.executescript(_SCHEMA)
    database.execute(f"PRAGMA user_version={_VERSION}")
    return database


def _is_full(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
