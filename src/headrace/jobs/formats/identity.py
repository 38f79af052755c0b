"""The identity of an input: its size and a hash per chunk. Finds out whether, and where, the input has changed."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.errors import JobError
from headrace.jobs.formats.locations import ByteReader, is_url, num_bytes, open_bytes, open_store, store_errors

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
    file = open_bytes(path)
    try:
        return identify_file(file, path, size)
    finally:
        file.close()


def identify_file(file: ByteReader, path: str, size: int) -> SourceIdentity:
    """The identity of the first `size` bytes of an open local file, or of all if it has fewer."""
    size = min(size, file.seek(0, os.SEEK_END))
    file.seek(0)
    hashes = [_hash(file, min(CHUNK_BYTES, size - begin), path) for begin in range(0, size, CHUNK_BYTES)]
    return SourceIdentity(size, CHUNK_BYTES, tuple(hashes))


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


def _hash(file: ByteReader, size: int, path: str) -> str:
    digest = hashlib.sha256()
    while size:
        piece = file.read(min(PIECE_BYTES, size))
        if not piece:
            raise JobError(f"{path} was truncated while it was read")
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()[:32]
