"""Receives a multipart upload: the file goes to the disk in blocks as it arrives, on a thread beside the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path, PurePosixPath

from headrace.errors import RequestError
from headrace.jobs.files import is_no_room
from headrace.server.batch.multipart import MultipartParser, PartBegun, PartData, PartEnded
from headrace.server.batch.store import StoreFullError

BLOCK_BYTES = 2**20  # written at once
MAX_FIELD_BYTES = 4 * 2**10  # of a part that is not the file
MAX_FIELDS = 16
MAX_FILENAME = 255


class Upload:
    """One upload, owned by its task. Afterwards `path` holds the file, on the disk. Leaving the `with` block removes it
    if nobody has taken it."""

    def __init__(self, path: Path, boundary: bytes, *, max_bytes: int, too_large: Callable[[], Exception]) -> None:
        self.path = path
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no file has come
        self.num_bytes = 0
        self._parser = MultipartParser(boundary)
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._name = ""  # of the part that is being read
        self._is_file = False
        self._field = b""
        self._blocks: list[bytes] = []
        self._num_buffered = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    async def receive(self, body: AsyncIterator[bytes]) -> None:
        """Read the whole body and sync the file."""
        async for part in body:
            for event in self._parser.feed(part):
                match event:
                    case PartBegun():
                        self._begin(event)
                    case PartData(data):
                        self._take(data)
                    case PartEnded():
                        self._end()
            if self._num_buffered >= BLOCK_BYTES:
                await self._write()
        self._parser.close()
        await self._write(is_last=True)

    def _begin(self, part: PartBegun) -> None:
        self._name, self._is_file, self._field = part.name, part.name == "file", b""
        if self._is_file:
            if self.filename is not None:
                raise RequestError("the body has more than one file", param="file")
            self.filename = _safe_name(part.filename or "")
        elif len(self.fields) >= MAX_FIELDS:
            raise RequestError("the body has too many fields", param=part.name[:64])

    def _take(self, data: bytes) -> None:
        if not self._is_file:
            self._field += data
            if len(self._field) > MAX_FIELD_BYTES:
                raise RequestError(
                    f"{self._name[:64]!r} is longer than {MAX_FIELD_BYTES:,} bytes", param=self._name[:64]
                )
            return
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise self._too_large()
        self._blocks.append(data)
        self._num_buffered += len(data)

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._field.decode("utf-8", "replace")

    async def _write(self, *, is_last: bool = False) -> None:
        blocks, self._blocks, self._num_buffered = self._blocks, [], 0
        try:
            await asyncio.to_thread(write_blocks, self._descriptor, blocks, is_last=is_last)
        except OSError as error:
            if not is_no_room(error):
                raise
            raise StoreFullError("there is no room on the server's disk for this file; try again later") from error


def write_blocks(descriptor: int, blocks: list[bytes], *, is_last: bool) -> None:
    for block in blocks:
        left = memoryview(block)
        while left:
            left = left[os.write(descriptor, left) :]
    if is_last:
        os.fsync(descriptor)


def _safe_name(given: str) -> str:
    """The last part of a path, without control characters. It is shown, and never used as a path."""
    name = PurePosixPath(given.replace("\\", "/")).name
    return "".join(character for character in name if character.isprintable())[:MAX_FILENAME] or "file"
