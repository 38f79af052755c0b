"""One line of a segment: a row's final result, which proves by its checksum that it is whole."""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

import msgspec

_HEAD = re.compile(rb'\{"i":(\d+),"a":(\d+),"c":"([0-9a-f]{8})",(?:"e":("(?:[^"\\]|\\.)*"),)?"r":')
_encode_text = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Record:
    index: int  # of the input line
    attempt: int  # the pass over the input in which it was made, from 1
    error: str | None  # its code, where the result is an error line
    result: bytes  # the output line without its line break


def encode(record: Record) -> bytes:
    """With its line break. The checksum covers the index, the attempt and the error too."""
    error = b"" if record.error is None else b'"e":%b,' % _encode_text(record.error)
    checksum = _checksum(b"%d" % record.index, b"%d" % record.attempt, error, record.result)
    return b'{"i":%d,"a":%d,"c":"%08x",%b"r":%b}\n' % (record.index, record.attempt, checksum, error, record.result)


def decode(line: bytes) -> Record | None:
    """None: torn or damaged."""
    head = _HEAD.match(line)
    if head is None or not line.endswith(b"}\n"):
        return None
    index, attempt, checksum, error = head.groups()
    result = line[head.end() : -2]
    if _checksum(index, attempt, b"" if error is None else b'"e":%b,' % error, result) != int(checksum, 16):
        return None
    return Record(int(index), int(attempt), None if error is None else msgspec.json.decode(error, type=str), result)


def _checksum(index: bytes, attempt: bytes, error: bytes, result: bytes) -> int:
    return crc32(result, crc32(b"%b,%b,%b" % (index, attempt, error)))
