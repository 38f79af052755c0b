"""Parses multipart/form-data as it arrives. Holds one chunk and a delimiter's length, never a whole part.

--boundary CRLF headers CRLF CRLF data CRLF --boundary ... --boundary--
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import RequestError

MAX_HEADER_BYTES = 16 * 2**10  # of one part
MAX_BOUNDARY = 70  # RFC 2046

_BOUNDARY = re.compile(rb'boundary="?([^";\s]+)"?', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*([a-zA-Z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^;\s]+))')


@dataclass(frozen=True, slots=True)
class PartBegun:
    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnded:
    pass


Event = PartBegun | PartData | PartEnded


def boundary_of(content_type: bytes | None) -> bytes:
    """The boundary in a Content-Type header."""
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    found = _BOUNDARY.search(content_type or b"")
    if kind != b"multipart/form-data" or found is None or len(found[1]) > MAX_BOUNDARY:
        raise _wrong("the body must be multipart/form-data with a boundary of at most 70 characters")
    return found[1]


class MultipartParser:
    """Used by one task. Feed it the body in parts of any size, then call `close`."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # the first delimiter has no line end before it
        self._state = "preamble"  # preamble, delimiter, headers, data, end

    def feed(self, data: bytes) -> Iterator[Event]:
        self._buffer += data
        while True:
            before = (self._state, len(self._buffer))
            yield from self._step()
            if before == (self._state, len(self._buffer)):
                return

    def close(self) -> None:
        """Refuse a body that ended too early."""
        if self._state != "end":
            raise _wrong("the multipart body ended before its last boundary")

    def _step(self) -> Iterator[Event]:
        match self._state:
            case "preamble" | "data":
                yield from self._read_data(is_part=self._state == "data")
            case "delimiter":
                self._read_after_delimiter()
            case "headers":
                yield from self._read_headers()
            case "end":
                self._buffer = b""

    def _read_data(self, *, is_part: bool) -> Iterator[Event]:
        """Everything up to the next delimiter; what may be the start of one stays in the buffer."""
        end = self._buffer.find(self._delimiter)
        has_ended = end >= 0
        if not has_ended:
            end = max(0, len(self._buffer) - len(self._delimiter) + 1)
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        if is_part and data:
            yield PartData(data)
        if has_ended:
            self._buffer = self._buffer[len(self._delimiter) :]
            self._state = "delimiter"
            if is_part:
                yield PartEnded()

    def _read_after_delimiter(self) -> None:
        if self._buffer.startswith(b"--"):
            self._state, self._buffer = "end", b""
        elif (end := self._buffer.find(b"\r\n")) >= 0:
            if self._buffer[:end].strip(b" \t"):
                raise _wrong("a multipart boundary is followed by other characters")
            self._state, self._buffer = "headers", self._buffer[end:]  # with the line end, as headers may be missing
        elif len(self._buffer) > MAX_HEADER_BYTES:
            raise _wrong("a multipart boundary is followed by no line end")

    def _read_headers(self) -> Iterator[Event]:
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_HEADER_BYTES or (end < 0 and len(self._buffer) > MAX_HEADER_BYTES):
            raise _wrong(f"the headers of a part are longer than {MAX_HEADER_BYTES:,} bytes")
        if end >= 0:
            lines, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            self._state = "data"
            yield _part_of(lines)


def _part_of(headers: bytes) -> PartBegun:
    for line in headers.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            given = {key.lower(): _text(quoted, bare) for key, quoted, bare in _PARAMETER.findall(";" + value)}
            if "name" not in given:
                break
            return PartBegun(given["name"], given.get("filename"))
    raise _wrong("a part of the multipart body has no Content-Disposition with a name")


def _text(quoted: str, bare: str) -> str:
    """Browsers and httpx write quotes and line ends as %22, %0D and %0A; others put a backslash before them."""
    text = re.sub(r"\\(.)", r"\1", quoted) if quoted else bare
    for code, character in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        text = text.replace(code, character)
    return text


def _wrong(message: str) -> RequestError:
    return RequestError(message, param="file", code="invalid_multipart")
