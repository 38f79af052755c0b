"""The identity of an input: its size and a hash per chunk. Finds out whether, and where, the input has changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import JobError
from headrace.jobs.formats.locations import is_url, num_bytes, open_bytes, open_store, store_errors

if TYPE_CHECKING:
    from headrace.jobs.formats.source import Source

CHUNK_BYTES = 16 * 1024 * 1024
PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    size: int  # bytes, as stored
    chunk_bytes: int
    hashes: tuple[str, ...]  # one per chunk; for an object, the store's own key of its version


def identify(path: str, size: int | None = None) -> SourceIdentity:
    whole = num_bytes(path)
    size = whole if size is None else min(size, whole)
    if is_url(path):
        store, place = open_store(path)
        with store_errors(f"{path} cannot be looked up"):
            return SourceIdentity(size, 0, (str(store.ukey(place)),))
    return SourceIdentity(size, CHUNK_BYTES, _chunk_hashes(path, size))


def what_changed(source: Source, known: SourceIdentity) -> str | None:
    """A message if the earlier lines are not the same any more. Lines added at the end are no change."""
    now = source.identity(known.size)
    if now is None:
        return f"{source.name} is a stream and cannot be read again"
    if now.size < known.size:
        return f"{source.name} had {known.size:,} bytes and has {now.size:,}"
    if now != known:
        return f"{source.name} has changed{_place(now, known)}"
    whole = num_bytes(source.name)
    if whole == known.size:
        return None
    if not source.is_appendable:
        return f"{source.name} had {known.size:,} bytes and has {whole:,}"
    if not _ends_a_line(source.name, known.size):
        return f"the last line of {source.name} has changed"
    return None


def _place(now: SourceIdentity, known: SourceIdentity) -> str:
    for index, (mine, other) in enumerate(zip(now.hashes, known.hashes, strict=False)):
        if mine != other and known.chunk_bytes:
            begin = index * known.chunk_bytes
            return f" between byte {begin:,} and byte {min(begin + known.chunk_bytes, known.size):,}"
    return ""


def _ends_a_line(path: str, size: int) -> bool:
    """Whether the bytes added at `size` start a new line."""
    if size == 0:
        return True
    file = open_bytes(path)
    try:
        file.seek(size - 1)
        around = file.read(3) or b""
    finally:
        file.close()
    return around[:1] == b"\n" or around[1:2] == b"\n" or around[1:3] == b"\r\n"


def _chunk_hashes(path: str, size: int) -> tuple[str, ...]:
    hashes = []
    file = open_bytes(path)
    try:
        for begin in range(0, size, CHUNK_BYTES):
            hashes.append(_hash(file, min(CHUNK_BYTES, size - begin), path))
    finally:
        file.close()
    return tuple(hashes)


def _hash(file: object, size: int, path: str) -> str:
    digest = hashlib.sha256()
    while size:
        piece = file.read(min(PIECE_BYTES, size))  # type: ignore[attr-defined]
        if not piece:
            raise JobError(f"{path} was truncated while it was read")
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()[:32]
