"""One record of a segment: the final result of a line, with a checksum that shows whether it is complete."""

from __future__ import annotations

import re
from zlib import crc32

import msgspec

_HEAD = rb'\{"i":(\d+),"a":(\d+),(?:"e":("(?:[^"\\]|\\.)*"),)?"c":"([0-9a-f]{8})","r":'
_match = re.compile(_HEAD).match
_find_results = re.compile(
    rb"^" + _HEAD.replace(b"(", b"(?:").replace(b"(?:?:", b"(?:") + rb"(.*)\}$", re.MULTILINE
).findall
_encode_text = msgspec.json.Encoder().encode


class Record(msgspec.Struct, frozen=True, gc=False):  # one per line: cheaper than a dataclass
    index: int  # of the input line
    attempt: int  # the pass that made it, from 1
    error: str | None  # its code, if the result is an error line
    result: bytes  # the output line without its line break


def encode(index: int, attempt: int, error: str | None, result: bytes) -> bytes:
    """Encode with a line break. The checksum covers the fields before it and the result."""
    head = b'{"i":%d,"a":%d,' % (index, attempt)
    if error is not None:
        head += b'"e":%b,' % _encode_text(error)
    return b'%b"c":"%08x","r":%b}\n' % (head, crc32(result, crc32(head)), result)


def decode(line: bytes) -> Record | None:
    """Returns None if the record is torn or damaged."""
    head = _match(line)
    if head is None or line[-2:] != b"}\n":
        return None
    index, attempt, error, checksum = head.groups()
    result = line[head.end() : -2]
    if crc32(result, crc32(line[: head.start(4) - len(b'"c":"')])) != int(checksum, 16):
        return None
    return Record(int(index), int(attempt), None if error is None else msgspec.json.decode(error, type=str), result)


def results_of(lines: bytes) -> list[bytes]:
    """The results of many complete records, whose checksums were verified before."""
    return _find_results(lines)
