"""Opens outputs of every kind. A sink takes output lines as JSON and writes them in its format."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from headrace.errors import JobError
from headrace.jobs.formats.compression import compressed, zstandard
from headrace.jobs.formats.file_format import Format, format_of
from headrace.jobs.formats.locations import is_url, local_path, open_store, store_errors
from headrace.jobs.formats.object_store import SegmentSink
from headrace.jobs.formats.parquet import pyarrow
from headrace.jobs.formats.table_sinks import TableSink, csv_table, parquet_table
from headrace.jobs.formats.writer import ByteWriter, ResultWriter, create, shown_name

MIN_COMPRESSED_BYTES = 1024 * 1024  # lines are collected to this size before they are compressed


class Sink(Protocol):
    num_written: int

    def append(self, line: bytes) -> None: ...

    def flush(self) -> None:
        """Write what can be written; a table or a compressed file may wait for more lines."""

    def close(self) -> None: ...

    def __enter__(self) -> Sink: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_sink(path: str, *, format: str | None = None, overwrite: bool = False) -> Sink:
    """Local files are written in place. In a store, lines go into parts (`object_store`), and a table into an object
    that appears only when complete."""
    wanted = format_of(path, format)
    require_libraries(wanted)
    if is_url(path):
        if not wanted.is_table:
            return SegmentSink(path, compression=wanted.compression, overwrite=overwrite)
        return _table(_StoreFile(path, overwrite=overwrite), path, wanted)
    try:
        file = create(local_path(path), overwrite=overwrite)
    except OSError as error:
        raise JobError(f"the output {path} cannot be written: {error.strerror}") from error
    name = shown_name(path)
    if wanted.is_table:
        return _table(file, name, wanted)
    min_bytes = MIN_COMPRESSED_BYTES if wanted.compression else 0
    return ResultWriter(compressed(file, wanted.compression), name, min_bytes=min_bytes)


def require_libraries(format: Format) -> None:
    """Fail early: before a file is created or a model is loaded."""
    if format.kind == "parquet":
        pyarrow()
    if format.compression == "zst":
        zstandard()


def _table(file: ByteWriter, name: str, format: Format) -> TableSink:
    if format.kind == "parquet":
        return parquet_table(file, name)
    return csv_table(compressed(file, format.compression), name, delimiter="\t" if format.kind == "tsv" else ",")


class _StoreFile:
    """An object that appears when it is closed."""

    def __init__(self, url: str, *, overwrite: bool) -> None:
        self._url = url
        store, place = open_store(url)
        with store_errors(f"the output {url} cannot be written"):
            if not overwrite and store.exists(place):
                raise JobError(f"the output {url} exists; give another, or --overwrite to replace it")
            self._file: Any = store.open(place, "wb", autocommit=False)
        self.closed = False

    def write(self, data: Any) -> int:
        with store_errors(f"cannot write to {self._url}"):
            self._file.write(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with store_errors(f"cannot write to {self._url}"):
                self._file.close()
                self._file.commit()
