"""Files of the disk tier, one for each block.

    DIRECTORY/salt.key                      secret of the salts of API keys
    DIRECTORY/<domain>/about.json           which model and cache layout a domain is, for people
    DIRECTORY/<domain>/ab/abcdef....kv      header, then the block's bytes; the name is the digest of the prefix

A file is written under another name and renamed, so it is complete or not there, unless the machine crashes; the
checksum finds that. Nothing is synced: a lost file is computed again. The time of modification is that of the last use.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.kv.chain import DIGEST_BYTES

SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
MAX_TEMPORARY_AGE_S = 3600.0  # an older one was left by a process that has died
_MAGIC = b"HRKVBLK\0"
_VERSION = 1
_HEADER = struct.Struct(f"<8sIIQ{DIGEST_BYTES}s{DIGEST_BYTES}s")  # magic, version, checksum, size, domain, digest
_SECRET_NAME = "salt.key"
_SECRET_BYTES = 32

Bytes = npt.NDArray[np.uint8]


class BadBlockError(Exception):
    """A file is not what its name says: damaged, truncated, or of something else."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: Path
    num_bytes: int
    used_at: float


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """The files of one domain below a directory that other domains, and other processes, may use too."""

    root: Path
    domain: bytes

    @property
    def folder(self) -> Path:
        return self.root / self.domain.hex()

    def path_of(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / f"{name}{SUFFIX}"

    def prepare(self, about: bytes) -> None:
        """Make the folders, which only this user may read: they hold what prompts left."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _replace(self.folder / "about.json", [about])

    def size_of(self, num_bytes: int) -> int:
        """Of the file of a block with so many bytes."""
        return _HEADER.size + num_bytes

    def write(self, digest: bytes, content: Bytes) -> None:
        path = self.path_of(digest)
        header = _HEADER.pack(_MAGIC, _VERSION, crc32(content.data), len(content), self.domain, digest)
        try:
            _replace(path, [header, content.data])
        except FileNotFoundError:  # the first block of its folder
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _replace(path, [header, content.data])

    def read(self, digest: bytes, target: Bytes) -> None:
        """Read a block into `target`, or raise FileNotFoundError or BadBlockError; `target` may hold anything then."""
        descriptor = os.open(self.path_of(digest), os.O_RDONLY)
        try:
            checksum = self._check_header(os.read(descriptor, _HEADER.size), digest, len(target))
            num_read = _read_into(descriptor, [target.data, memoryview(bytearray(1))])
            if num_read != len(target):
                raise BadBlockError(f"{num_read:,} bytes or more follow its header, not {len(target):,}")
            if crc32(target.data) != checksum:
                raise BadBlockError("its checksum is wrong")
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def _check_header(self, header: bytes, digest: bytes, num_bytes: int) -> int:
        if len(header) < _HEADER.size:
            raise BadBlockError("its header is incomplete")
        magic, version, checksum, size, domain, name = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise BadBlockError("it is not a block of this version")
        if domain != self.domain or name != digest:
            raise BadBlockError("it is the block of another model, cache layout or prefix")
        if size != num_bytes:
            raise BadBlockError(f"it holds {size:,} bytes, not {num_bytes:,}")
        return int(checksum)

    def digests(self) -> Iterator[bytes]:
        """Of all blocks of the domain, by the names of their files."""
        for folder in _entries(self.folder):
            for entry in _entries(Path(folder.path)) if folder.is_dir(follow_symlinks=False) else ():
                if (digest := _digest_of(entry.name)) is not None:
                    yield digest

    def remove(self, digest: bytes) -> None:
        _remove(self.path_of(digest))

    def all_files(self, now: float) -> list[StoredFile]:
        """The blocks of all domains. Removes what processes that died have left half written."""
        found: list[StoredFile] = []
        for entry in _walk(self.root):
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # another process removed it
            path = Path(entry.path)
            if entry.name.endswith(SUFFIX):
                found.append(StoredFile(path, facts.st_size, facts.st_mtime))
            elif entry.name.endswith(TEMPORARY_SUFFIX) and now - facts.st_mtime > MAX_TEMPORARY_AGE_S:
                _remove(path)
        return found

    def trim(self, max_bytes: int, now: float, *, keep: Collection[bytes] = ()) -> tuple[int, list[bytes]]:
        """Remove the least recently used blocks of all domains until the rest has `max_bytes`; returns its size, and
        the removed blocks of this domain. Those to `keep` are left alone, and not counted."""
        kept = {self.path_of(digest) for digest in keep}
        files = sorted((file for file in self.all_files(now) if file.path not in kept), key=lambda file: file.used_at)
        num_bytes, removed = sum(file.num_bytes for file in files), []
        for file in files:
            if num_bytes <= max_bytes:
                break
            _remove(file.path)
            num_bytes -= file.num_bytes
            if file.path.parent.parent == self.folder and (digest := _digest_of(file.path.name)) is not None:
                removed.append(digest)
        return num_bytes, removed


def salt_secret(root: Path) -> bytes:
    """The secret of a directory, made on first use: with it the salts of API keys are the same after a restart."""
    path = root / _SECRET_NAME
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        temporary = _write_temporary(path, [secrets.token_bytes(_SECRET_BYTES)])
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            _remove(temporary)
    secret = path.read_bytes()
    if len(secret) != _SECRET_BYTES:
        raise OSError(f"{path} has {len(secret)} bytes, not {_SECRET_BYTES}; delete it")
    return secret


def _digest_of(name: str) -> bytes | None:
    stem, dot, suffix = name.rpartition(".")
    if dot + suffix != SUFFIX or len(stem) != 2 * DIGEST_BYTES:
        return None
    try:
        return bytes.fromhex(stem)
    except ValueError:
        return None


def _walk(root: Path) -> Iterator[os.DirEntry[str]]:
    """The files in folders of folders of the root."""
    for domain in _entries(root):
        for folder in _entries(Path(domain.path)) if domain.is_dir(follow_symlinks=False) else ():
            if folder.is_dir(follow_symlinks=False):
                yield from _entries(Path(folder.path))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _replace(path: Path, parts: list[bytes | memoryview]) -> None:
    temporary = _write_temporary(path, parts)
    try:
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        raise


def _write_temporary(path: Path, parts: list[bytes | memoryview]) -> Path:
    temporary = path.with_name(f"{os.getpid()}-{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            for part in parts:
                _write_from(descriptor, memoryview(part))
        finally:
            os.close(descriptor)
    except OSError:
        _remove(temporary)
        raise
    return temporary


# A header has a call of its own, both ways: with one call for both, files that were not in memory were read half as
# fast (ext4; the small read starts reading ahead), and writes were slower and uneven.


def _write_from(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def _read_into(descriptor: int, parts: list[memoryview]) -> int:
    """Fill the parts as far as the file reaches; returns how many bytes were read."""
    num_read = 0
    while parts and (count := os.readv(descriptor, parts)):
        num_read += count
        parts = _without(parts, count)
    return num_read


def _without(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What follows the first bytes."""
    while parts and num_bytes >= len(parts[0]):
        num_bytes -= len(parts[0])
        parts = parts[1:]
    return [parts[0][num_bytes:], *parts[1:]] if num_bytes else parts


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # it is counted again the next time
