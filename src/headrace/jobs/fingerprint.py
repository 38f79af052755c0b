"""What a job's results depend on, so that results of two different jobs never end up in one output."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import JobError

CHUNK_BYTES = 64 << 20
SMALL_FILE_BYTES = 1 << 20

# Of the engine's settings, those that change answers. The others may be changed when a job is resumed.
_SETTINGS = (
    "model",
    "revision",
    "tokenizer",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "seed",
)


@dataclass(frozen=True)
class InputIdentity:
    """An input's bytes. Another input is the same one, or has more lines, if it begins with these."""

    size: int
    chunks: list[str]  # hashes of CHUNK_BYTES each, the last one of what is left
    ends_with_break: bool = True


def fingerprint_of(config: EngineConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flat, with a name for each thing that may differ."""
    settings = {name: value for name, value in asdict(config).items() if name in _SETTINGS}
    sampling = {f"sampling.{name}": value for name, value in sorted(defaults.items())}
    return {**settings, "model_files": _digest_of_model(config.model), **sampling}


def first_difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Its name and both values; None where a value was not given."""
    for name in sorted({*earlier, *now}):
        if earlier.get(name) != now.get(name):
            return name, earlier.get(name), now.get(name)
    return None


def digest_of_template(templates: Mapping[str, str] | None) -> str | None:
    return None if templates is None else _digest(repr(sorted(templates.items())).encode())


def identify_input(path: str) -> InputIdentity | None:
    """None for what cannot be read twice."""
    if path == "-" or not stat.S_ISREG(os.stat(path).st_mode):
        return None
    return _identify(path, os.stat(path).st_size)


def check_input(path: str, earlier: InputIdentity) -> None:
    """Refuse an input whose earlier lines were changed."""
    size = os.stat(path).st_size
    if size < earlier.size:
        raise JobError(
            f"the input {path} had {earlier.size:,} bytes when the job began and has {size:,} now; {_WAY_OUT}"
        )
    now = _identify(path, earlier.size)
    for number, (old, new) in enumerate(zip(earlier.chunks, now.chunks, strict=True)):
        if old != new:
            start, end = number * CHUNK_BYTES, min(earlier.size, (number + 1) * CHUNK_BYTES)
            raise JobError(
                f"the input {path} was changed since the job began: the hash of bytes {start:,} to {end:,} was {old}, "
                f"now it is {new}; {_WAY_OUT}"
            )
    if not earlier.ends_with_break and size > earlier.size and _byte_at(path, earlier.size) not in b"\r\n":
        raise JobError(f"the input {path} was changed since the job began: its last line has become longer; {_WAY_OUT}")


_WAY_OUT = "lines may be added at its end, not changed; give another output with -o, or start anew with --overwrite"


def _identify(path: str, size: int) -> InputIdentity:
    chunks, last = [], b""
    with open(path, "rb") as file:
        left = size
        while left:
            hashed, chunk_left = blake2b(digest_size=16), min(left, CHUNK_BYTES)
            left -= chunk_left
            while chunk_left and (piece := file.read(min(chunk_left, 1 << 20))):
                hashed.update(piece)
                chunk_left -= len(piece)
                last = piece
            chunks.append(hashed.hexdigest())
    return InputIdentity(size, chunks, not size or last.endswith((b"\n", b"\r")))


def _byte_at(path: str, offset: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(1)


def _digest_of_model(model: str) -> str | None:
    """Names and sizes of a local model's files, and what its small files say; None for one that the hub names."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(child for child in path.iterdir() if child.is_file()) if path.is_dir() else [path]
    return _digest(b"".join(_summary(file) for file in files))


def _summary(file: Path) -> bytes:
    size = file.stat().st_size
    content = file.read_bytes() if size <= SMALL_FILE_BYTES else b""
    return f"{file.name}\0{size}\0{_digest(content)}\0".encode()


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
