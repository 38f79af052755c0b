"""Output to an object store, where nothing can be appended: complete parts, and a manifest that lists them.

    answers.jsonl.parts/part-000001-000000.jsonl   written once, never changed
    answers.jsonl.parts/manifest.json              replaced after each part: the commit
    answers.jsonl                                  all parts in one, at the end; then the parts are removed

A part that the manifest does not list was not committed and is written again.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import msgspec

from headrace.errors import JobError
from headrace.jobs.formats.compression import compressed, decompressed
from headrace.jobs.formats.file_format import Compression
from headrace.jobs.formats.locations import has_buckets, open_store, store_errors

SEGMENT_BYTES = 16 * 1024 * 1024
COPY_BYTES = 1024 * 1024


class Part(msgspec.Struct, frozen=True):
    name: str
    num_lines: int
    num_bytes: int
    crc32: int


class Manifest(msgspec.Struct, frozen=True):
    target: str
    epoch: int
    parts: list[Part]
    version: int = 1


class SegmentSink:
    """Owns the parts of one output. Their names contain `epoch`: an older process cannot overwrite newer parts."""

    def __init__(
        self,
        url: str,
        *,
        compression: Compression | None = None,
        epoch: int = 1,
        overwrite: bool = False,
        resume: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._url = url
        self._store, self._target = open_store(url)
        self._compression = compression
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._directory = f"{self._target}.parts"
        self._buffered: list[bytes] = []
        self._num_buffered_bytes = 0
        self._parts = self._begin(overwrite=overwrite, resume=resume)
        self._num_own_parts = 0
        self.num_written = sum(part.num_lines for part in self._parts)

    def append(self, line: bytes) -> None:
        self._buffered.append(line)
        self._num_buffered_bytes += len(line) + 1

    def flush(self) -> None:
        if self._num_buffered_bytes >= self._segment_bytes:
            self.commit()

    def commit(self) -> None:
        """All lines so far are durable when this returns."""
        if not self._buffered:
            return
        data = _compress(b"\n".join([*self._buffered, b""]), self._compression)
        name = f"part-{self._epoch:06}-{self._num_own_parts:06}.jsonl"
        part = Part(name, len(self._buffered), len(data), zlib.crc32(data))
        with self._failures():
            if not has_buckets(self._url):
                self._store.makedirs(self._directory, exist_ok=True)  # a store with directories needs them created
            self._store.pipe_file(f"{self._directory}/{name}", data)
            self._write_manifest([*self._parts, part])
        self._parts.append(part)
        self._num_own_parts += 1
        self.num_written += part.num_lines
        self._buffered.clear()
        self._num_buffered_bytes = 0

    def lines(self) -> Iterator[bytes]:
        """Committed lines, in the order of commit."""
        for part in self._parts:
            file = decompressed(io.BytesIO(self._read(part)), self._compression, part.name)
            text = b"".join(iter(lambda file=file: file.read(COPY_BYTES) or b"", b""))  # type: ignore[misc]
            yield from text.split(b"\n")[:-1]

    def publish(self) -> None:
        """Merge all parts into one object, which appears only when complete; then remove the parts."""
        self.commit()
        with self._failures():
            file = self._store.open(self._target, "wb", autocommit=False)
            for part in self._parts:
                file.write(self._read(part))
            file.close()
            file.commit()
            if self._store.exists(self._directory):
                self._store.rm(self._directory, recursive=True)

    def close(self) -> None:
        self.publish()

    def __enter__(self) -> SegmentSink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Publish the object. After an error the parts are kept and nothing is published."""
        if kind is None:
            self.publish()
        else:
            self.commit()

    def _begin(self, *, overwrite: bool, resume: bool) -> list[Part]:
        with store_errors(f"the output {self._url} cannot be written"):
            manifest = self._read_manifest()
            if manifest is not None and resume:
                return [*manifest.parts]
            if not overwrite and self._store.exists(self._target):
                raise JobError(f"the output {self._url} exists; give another, or --overwrite to replace it")
            if manifest is not None and not overwrite:
                raise JobError(
                    f"{self._url}.parts has {sum(part.num_lines for part in manifest.parts):,} lines of a job that did "
                    "not end; give another output, or --overwrite to start over"
                )
            if self._store.exists(self._directory):
                self._store.rm(self._directory, recursive=True)
        return []

    def _read_manifest(self) -> Manifest | None:
        place = f"{self._directory}/manifest.json"
        if not self._store.exists(place):
            return None
        return msgspec.json.decode(self._store.cat_file(place), type=Manifest)

    def _write_manifest(self, parts: list[Part]) -> None:
        manifest = Manifest(self._url, self._epoch, parts)
        self._store.pipe_file(f"{self._directory}/manifest.json", msgspec.json.encode(manifest))

    def _read(self, part: Part) -> bytes:
        data: bytes = self._store.cat_file(f"{self._directory}/{part.name}")
        if zlib.crc32(data) != part.crc32:
            raise JobError(f"{self._url}.parts/{part.name} is damaged: its checksum differs from the manifest's")
        return data

    def _failures(self) -> AbstractContextManager[None]:
        return store_errors(
            f"cannot write to {self._url} ({self.num_written:,} lines are committed in {self._url}.parts)"
        )


def _compress(data: bytes, compression: Compression | None) -> bytes:
    if compression is None:
        return data
    buffer = _Kept()
    file: Any = compressed(buffer, compression)
    file.write(data)
    file.close()
    return buffer.kept


class _Kept(io.BytesIO):
    """A buffer whose bytes stay available after `close`."""

    kept = b""

    def close(self) -> None:
        if not self.closed:
            self.kept = self.getvalue()
        super().close()
