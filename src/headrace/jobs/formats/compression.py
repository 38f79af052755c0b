"""gzip and zstd as streams. A truncated file is an error, never a short file."""

from __future__ import annotations

import gzip
import zlib
from collections import deque
from typing import Any, cast

from headrace.errors import JobError
from headrace.jobs.formats.file_format import Compression
from headrace.jobs.formats.locations import ByteReader
from headrace.jobs.formats.writer import ByteWriter

READ_BYTES = 16 * 1024  # compressed bytes per read; their contents are held in memory
GZIP_LEVEL, ZSTD_LEVEL = 6, 3


def decompressed(file: ByteReader, compression: Compression | None, name: str) -> ByteReader:
    if compression == "gz":
        return cast(ByteReader, _GzipReader(file, name))
    return cast(ByteReader, _ZstdReader(file, name)) if compression == "zst" else file


def compressed(file: ByteWriter, compression: Compression | None) -> ByteWriter:
    """Returns a writer that compresses into `file`. Closing it ends the stream and closes the file."""
    if compression == "gz":
        # No timestamp in the header: the same lines give the same bytes.
        return _CompressedWriter(file, zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 31))
    return (
        _CompressedWriter(file, zstandard().ZstdCompressor(level=ZSTD_LEVEL).compressobj())
        if compression == "zst"
        else file
    )


class _GzipReader:
    def __init__(self, file: ByteReader, name: str) -> None:
        self._file = file
        self._decompressed = gzip.GzipFile(fileobj=cast(Any, file), mode="rb")
        self._name = name
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._decompressed.read1(size)
        except EOFError:
            raise _truncated(self._name, self._num_bytes) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(self._name, self._num_bytes, error) from None
        self._num_bytes += len(data)
        return data

    def close(self) -> None:
        self._decompressed.close()
        self._file.close()


class _ZstdReader:
    """Detects truncated files: zstandard's own reader takes the end of the file for the end of the data."""

    def __init__(self, file: ByteReader, name: str) -> None:
        self._file = file
        self._name = name
        self._zstandard = zstandard()
        self._frame: Any = None  # one that is not complete yet
        self._ready: deque[bytes] = deque()
        self._num_bytes = 0

    def read(self, size: int) -> bytes:
        """The next piece, which may be larger than `size`."""
        while not self._ready:
            data = self._file.read(READ_BYTES)
            if not data:
                if self._frame is not None:
                    raise _truncated(self._name, self._num_bytes)
                return b""
            self._take(data)
        return self._ready.popleft()

    def _take(self, data: bytes) -> None:
        while data:
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                piece = self._frame.decompress(data)
            except self._zstandard.ZstdError as error:
                raise _damaged(self._name, self._num_bytes, error) from None
            if piece:
                self._ready.append(piece)
                self._num_bytes += len(piece)
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        self._file.close()


class _CompressedWriter:
    def __init__(self, file: ByteWriter, compressor: Any) -> None:
        self._file = file
        self._compressor = compressor

    def write(self, data: Any) -> int:
        if piece := self._compressor.compress(data):
            self._file.write(piece)
        return len(data)

    def close(self) -> None:
        try:
            self._file.write(self._compressor.flush())
        finally:
            self._file.close()


def zstandard() -> Any:
    try:
        import zstandard as library
    except ImportError:
        raise JobError(".zst files need zstandard: pip install 'headrace[files]'") from None
    return library


def _truncated(name: str, num_bytes: int) -> JobError:
    return JobError(f"{name} is truncated after {num_bytes:,} decompressed bytes; copy it again")


def _damaged(name: str, num_bytes: int, error: Exception) -> JobError:
    return JobError(f"{name} cannot be decompressed past byte {num_bytes:,}: {error}")
