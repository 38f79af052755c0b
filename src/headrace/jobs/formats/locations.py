"""Opens what a name points to: a local path, '-', or a URL that fsspec knows (s3://, gs://, memory://)."""

from __future__ import annotations

import os
import stat
from io import FileIO
from typing import Any, Protocol

from headrace.errors import JobError

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
            opened: ByteReader = store.open(place, "rb")
            return opened
        return FileIO(local_path(path))
    except OSError as error:
        raise JobError(f"the input {path} cannot be read: {reason_of(error)}") from error


def num_bytes(path: str) -> int:
    if is_url(path):
        store, place = open_store(path)
        return int(store.size(place))
    return os.stat(local_path(path)).st_size


def exists(path: str) -> bool:
    if is_url(path):
        store, place = open_store(path)
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
    return store, place


def reason_of(error: Exception) -> str:
    """A readable reason; errors of fsspec are often a bare path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return str(error) or type(error).__name__
