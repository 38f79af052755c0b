"""Digests by which two models or tokenizers are told apart. Imports no torch.

    file     [ first 16 MiB, whole ][....s.......s....t..s.......s..t....s ........ s]
    s        4 KiB of every MiB, and the last 4 KiB
    t        the first 4 KiB of every tensor (safetensors and GGUF)

Files of up to 16 MiB are read whole. In a larger one every change of a MiB or more, and every tensor that was replaced
as a whole, changes the digest; a smaller edit inside a tensor may not. The digests of large files are cached by path,
inode, size and times.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import msgspec

from headrace.config import EMBEDDED_MODEL
from headrace.errors import HeadraceError, ModelError
from headrace.models.cache import cache_directory, embedded_path

WHOLE_BYTES = 16 << 20
SAMPLE_BYTES = 4 << 10
SAMPLE_EVERY_BYTES = 1 << 20
NUM_READERS = 8  # concurrent reads, for stores with a long latency
SAMPLES_PER_TASK = 512

CACHE_NAME = "digests-1.json"  # the number changes with what is sampled
MAX_CACHED = 4096
SETTLED_NS = 2_000_000_000  # a file that changed later than this may change again without a new time

_TOKENIZER_FILES = ("*.json", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt")


def digest_of_model(path: Path) -> str:
    """Of the files of a directory, or of one file: names and contents."""
    return _digest_of_files(_files_of(path))


def digest_of_local_model(model: str) -> str | None:
    """Of the default model, a directory or a file; None for a model of the hub, or one that is not there."""
    path = embedded_path() if model == EMBEDDED_MODEL else Path(model).expanduser()
    return digest_of_model(path) if path.exists() else None


def digest_of_tokenizer(path: Path) -> str:
    """Of the tokenizer's files only: the directory may be that of a model."""
    if not path.is_dir():
        return _digest_of_files(_files_of(path))
    return _digest_of_files(sorted({file for name in _TOKENIZER_FILES for file in path.glob(name) if file.is_file()}))


def _files_of(path: Path) -> list[Path]:
    """The files of a directory and those of its modules for sentence-transformers; or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(child for child in (*path.iterdir(), *path.glob("[0-9]*_*/*")) if child.is_file())


def _digest_of_files(files: Iterable[Path]) -> str:
    cache = DigestCache(cache_directory() / CACHE_NAME)
    parts = [f"{file.name}\0{digest_of_file(file, cache)}\0" for file in files]
    cache.save()
    return blake2b("".join(parts).encode(), digest_size=16).hexdigest()


def digest_of_file(file: Path, cache: DigestCache | None = None) -> str:
    try:
        facts = os.stat(file)
        if facts.st_size <= WHOLE_BYTES:
            return blake2b(file.read_bytes(), digest_size=16).hexdigest()
        known = cache.find(file, facts) if cache is not None else None
        digest = known or _digest_of_samples(file, facts.st_size)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    if cache is not None and known is None:
        cache.add(file, facts, digest)
    return digest


def _digest_of_samples(file: Path, size: int) -> str:
    starts = {*range(WHOLE_BYTES, size, SAMPLE_EVERY_BYTES), size - SAMPLE_BYTES, *_tensor_starts(file)}
    offsets = sorted(start for start in starts if WHOLE_BYTES <= start < size)
    tasks = [offsets[first : first + SAMPLES_PER_TASK] for first in range(0, len(offsets), SAMPLES_PER_TASK)]
    digest = blake2b(f"{size}\0".encode(), digest_size=16)
    with open(file, "rb", buffering=0) as opened, ThreadPoolExecutor(NUM_READERS) as readers:
        descriptor = opened.fileno()
        digest.update(os.pread(descriptor, WHOLE_BYTES, 0))
        if hasattr(os, "posix_fadvise"):  # no read-ahead behind each sample
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def read(task: list[int]) -> bytes:
            return blake2b(b"".join([os.pread(descriptor, SAMPLE_BYTES, start) for start in task])).digest()

        for part in readers.map(read, tasks):
            digest.update(part)
    return digest.hexdigest()


def _tensor_starts(file: Path) -> list[int]:
    """Where the tensors of a file start; of one that cannot be parsed, none: loading it reports why."""
    try:
        if file.suffix == ".safetensors":
            return _safetensors_starts(file)
        if file.suffix == ".gguf":
            from headrace.models.gguf_file import read_gguf

            return [tensor.offset for tensor in read_gguf(file).tensors.values()]
    except (HeadraceError, ValueError, LookupError, TypeError, AttributeError):
        pass
    return []


def _safetensors_starts(file: Path) -> list[int]:
    """The file: the length of a JSON header in 8 bytes, the header, the data that its offsets refer to."""
    with open(file, "rb") as opened:
        header_len = int.from_bytes(opened.read(8), "little")
        if header_len > os.fstat(opened.fileno()).st_size:
            return []
        header = json.loads(opened.read(header_len))
    return [8 + header_len + int(entry["data_offsets"][0]) for name, entry in header.items() if name != "__metadata__"]


class _Entry(msgspec.Struct, frozen=True):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int  # of the inode: a write that restores the time of modification changes this one
    digest: str


class DigestCache:
    """Digests of large files in one JSON file. It only saves time: what cannot be read or written is computed again."""

    def __init__(self, path: Path, *, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns
        self._entries = _read_entries(path)
        self._is_changed = False

    def find(self, file: Path, facts: os.stat_result) -> str | None:
        entry = self._entries.get(str(file.absolute()))
        return entry.digest if entry is not None and entry == _entry(facts, entry.digest) else None

    def add(self, file: Path, facts: os.stat_result, digest: str) -> None:
        if self._now_ns() - max(facts.st_mtime_ns, facts.st_ctime_ns) < SETTLED_NS:
            return
        name = str(file.absolute())
        self._entries.pop(name, None)
        self._entries[name] = _entry(facts, digest)
        self._is_changed = True

    def save(self) -> None:
        if not self._is_changed:
            return
        kept = dict(list(self._entries.items())[-MAX_CACHED:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=f"{CACHE_NAME}.", dir=self._path.parent)
            try:
                with open(descriptor, "wb") as opened:
                    opened.write(msgspec.json.encode(kept))
                os.replace(temporary, self._path)
            except OSError:
                os.unlink(temporary)
        self._is_changed = False


def _read_entries(path: Path) -> dict[str, _Entry]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry])
    except (OSError, msgspec.MsgspecError):
        return {}


def _entry(facts: os.stat_result, digest: str) -> _Entry:
    return _Entry(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, digest)
