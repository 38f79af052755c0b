"""One line of a segment: a row's final result, which proves by its checksum that it is whole."""

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


class Record(msgspec.Struct, frozen=True, gc=False):  # made once a row, in less time than a dataclass takes
    index: int  # of the input line
    attempt: int  # the pass over the input in which it was made, from 1
    error: str | None  # its code, where the result is an error line
    result: bytes  # the output line without its line break


def encode(index: int, attempt: int, error: str | None, result: bytes) -> bytes:
    """With its line break. The checksum covers all that stands before it, too."""
    head = b'{"i":%d,"a":%d,' % (index, attempt)
    if error is not None:
        head += b'"e":%b,' % _encode_text(error)
    return b'%b"c":"%08x","r":%b}\n' % (head, crc32(result, crc32(head)), result)


def decode(line: bytes) -> Record | None:
    """None: torn or damaged."""
    head = _match(line)
    if head is None or line[-2:] != b"}\n":
        return None
    index, attempt, error, checksum = head.groups()
    result = line[head.end() : -2]
    if crc32(result, crc32(line[: head.start(4) - len(b'"c":"')])) != int(checksum, 16):
        return None
    return Record(int(index), int(attempt), None if error is None else msgspec.json.decode(error, type=str), result)


def results_of(lines: bytes) -> list[bytes]:
    """Of many whole lines, which were checked before."""
    return _find_results(lines)
