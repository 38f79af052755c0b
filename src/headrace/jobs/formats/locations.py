"""Opens what a name points to: a local path, '-', or a URL that fsspec knows (s3://, gs://, memory://)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from typing import Any, Protocol, cast

from headrace.errors import JobError, reason_of

STANDARD_STREAM = "-"  # as a file name: stdin or stdout

_LIBRARIES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
}

_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "tos", "r2"})


class ByteReader(Protocol):
    """A file as stored, not decompressed."""

    def read(self, size: int = -1, /) -> bytes | None: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def close(self) -> None: ...


def is_url(path: str) -> bool:
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> str:
    return path.removeprefix("file://")


def can_be_read_again(path: str) -> bool:
    """Whether it can be read twice: not stdin, pipes and devices. A file that was removed counts as a file."""
    if path == STANDARD_STREAM:
        return False
    try:
        return is_url(path) or stat.S_ISREG(os.stat(local_path(path)).st_mode)
    except FileNotFoundError:
        return True


def open_bytes(path: str) -> ByteReader:
    """Unbuffered if local: a read returns what is available, so that lines of a slow pipe are not delayed."""
    try:
        if path == STANDARD_STREAM:
            return FileIO(0, closefd=False)
        if is_url(path):
            store, place = open_store(path)
            with store_errors(f"the input {path} cannot be read"):
                return cast(ByteReader, _StoreReader(store.open(place, "rb"), path))
        return FileIO(local_path(path))
    except OSError as error:
        raise JobError(f"the input {path} cannot be read: {reason_of(error)}") from error


def num_bytes(path: str) -> int:
    if is_url(path):
        store, place = open_store(path)
        with store_errors(f"{path} cannot be looked up"):
            return int(store.size(place))
    return os.stat(local_path(path)).st_size


def exists(path: str) -> bool:
    if is_url(path):
        store, place = open_store(path)
        with store_errors(f"{path} cannot be looked up"):
            return bool(store.exists(place))
    return os.path.exists(local_path(path))


def open_store(url: str) -> tuple[Any, str]:
    """An fsspec filesystem and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise JobError(f"{url} needs fsspec: pip install 'headrace[files]'") from None
    protocol = url.partition("://")[0]
    try:
        store, place = fsspec.core.url_to_fs(url)
    except ImportError as error:
        library = _LIBRARIES.get(protocol)
        hint = f"pip install {library}" if library else str(error)
        raise JobError(f"{url} needs a library for {protocol}://: {hint}") from None
    except ValueError as error:
        raise JobError(f"{url}: fsspec does not know {protocol}:// ({error})") from None
    except Exception as error:  # see `store_errors`
        raise JobError(f"{url} cannot be opened: {reason_of(error)}") from error
    return store, place


@contextmanager
def store_errors(message: str) -> Iterator[None]:
    """Gives the errors of a store a message. Each store's library has errors of its own, which are no OSErrors:
    missing credentials, an endpoint that cannot be reached."""
    try:
        yield
    except JobError:
        raise
    except Exception as error:
        raise JobError(f"{message}: {reason_of(error)}") from error


class _StoreReader:
    """A file in a store, for libraries that expect a Python file."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def read(self, size: int = -1) -> bytes:
        with store_errors(f"the input {self._url} cannot be read any further"):
            data: bytes = self._file.read(size)
            return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def has_buckets(url: str) -> bool:
    """Whether the first part of the path is a bucket. There, directories need not exist, and creating one may create
    the bucket."""
    return url.partition("://")[0] in _BUCKETS


def check_bucket(url: str) -> None:
    """Refuse a bucket that does not exist. What else the store answers is left to the first write: listing a bucket
    may be forbidden where writing is not."""
    if not has_buckets(url):
        return
    store, place = open_store(url)
    bucket = place.lstrip("/").partition("/")[0]
    try:
        with store_errors(f"{url} cannot be looked up"):
            store.info(bucket)
    except JobError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise JobError(f"the output {url} cannot be written: there is no bucket {bucket!r}; create it") from error
        if not isinstance(error.__cause__, PermissionError):
            raise
