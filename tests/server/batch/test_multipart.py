from __future__ import annotations

import pytest

from headrace.errors import RequestError
from headrace.server.batch.multipart import MAX_HEADER_BYTES, MultipartParser, PartBegun, PartData, boundary_of

BODY = (
    b"--xyz\r\n"
    b'Content-Disposition: form-data; name="purpose"\r\n\r\n'
    b"batch\r\n"
    b"--xyz\r\n"
    b'Content-Disposition: form-data; name="file"; filename="a %22b%22.jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n"
    b"one\r\n--xy\r\n--xy two\r\n\r\n"
    b"\r\n--xyz\r\n"
    b'content-disposition: form-data; name="empty"\r\n\r\n'
    b"\r\n--xyz--\r\n"
)
PARTS = [
    (PartBegun("purpose", None), b"batch"),
    (PartBegun("file", 'a "b".jsonl'), b"one\r\n--xy\r\n--xy two\r\n\r\n"),
    (PartBegun("empty", None), b""),
]


def parsed(*pieces: bytes, boundary: bytes = b"xyz") -> list[tuple[PartBegun, bytes]]:
    parser = MultipartParser(boundary)
    parts: list[tuple[PartBegun, bytes]] = []
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, PartBegun):
                parts.append((event, b""))
            elif isinstance(event, PartData):
                parts[-1] = (parts[-1][0], parts[-1][1] + event.data)
    parser.close()
    return parts


def test_parts_are_found_wherever_the_body_is_cut() -> None:
    assert parsed(BODY) == PARTS
    assert parsed(*(BODY[at : at + 1] for at in range(len(BODY)))) == PARTS
    for cut in range(len(BODY)):
        assert parsed(BODY[:cut], BODY[cut:]) == PARTS


def test_data_is_passed_on_as_it_arrives() -> None:
    parser = MultipartParser(b"xyz")
    list(parser.feed(b'--xyz\r\nContent-Disposition: form-data; name="file"\r\n\r\n'))
    given = b"x" * 100_000
    (event,) = parser.feed(given)
    assert isinstance(event, PartData) and len(given) - len(event.data) < len(b"\r\n--xyz")


@pytest.mark.parametrize("cut", [10, 60, len(BODY) - 10])
def test_a_body_that_ends_early_is_refused(cut: int) -> None:
    with pytest.raises(RequestError, match="ended before its last boundary"):
        parsed(BODY[:cut])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"--xyzw\r\n\r\n", "followed by other characters"),
        (b'--xyz\r\nContent-Disposition: form-data; filename="a"\r\n\r\nx\r\n--xyz--', "with a name"),
        (b"--xyz\r\nContent-Type: text/plain\r\n\r\nx\r\n--xyz--", "no Content-Disposition"),
        (b"--xyz\r\n" + b"a" * (MAX_HEADER_BYTES + 1), "headers of a part are longer"),
    ],
)
def test_malformed_bodies_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parsed(body)


def test_the_boundary_is_read_from_the_content_type() -> None:
    assert boundary_of(b"multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of(b'Multipart/Form-Data; charset=utf-8; boundary="a=b"') == b"a=b"
    for wrong in (None, b"application/json", b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 71):
        with pytest.raises(RequestError, match="multipart/form-data"):
            boundary_of(wrong)
