from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.formats.line_index import Bitmap, LineOffsets


@given(st.lists(st.integers(0, 100_000)))
def test_a_bitmap_is_a_set(indexes: list[int]) -> None:
    bitmap, expected = Bitmap(), set()
    for index in indexes:
        assert bitmap.add(index) == (index not in expected)
        expected.add(index)
    assert len(bitmap) == len(expected)
    assert all(index in bitmap for index in expected)
    assert [i for i in range(200) if i in bitmap] == sorted(i for i in expected if i < 200)


def test_a_bitmap_of_twenty_million_lines_is_small() -> None:
    bitmap = Bitmap([19_999_999])
    assert 19_999_999 in bitmap and 19_999_998 not in bitmap and 10**12 not in bitmap
    assert bitmap.num_bytes <= 2_500_000 + 8192


@given(st.binary(max_size=200).map(lambda data: data.replace(b"\x00", b"\n")), st.integers(1, 50))
def test_offsets_are_those_of_splitlines(data: bytes, chunk_bytes: int) -> None:
    offsets = LineOffsets()
    for start in range(0, len(data), chunk_bytes):
        offsets.take(data[start : start + chunk_bytes])
    lines = data.split(b"\n")
    expected = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    spans = [offsets.span(index) for index in range(len(expected))]
    assert [data[begin:end] for begin, end in filter(None, spans)] == expected
    assert offsets.span(len(expected)) is None


def test_offsets_take_eight_bytes_a_line() -> None:
    offsets = LineOffsets()
    offsets.take(b"x\n" * 10_000)
    assert offsets.span(5_000) == (10_000, 10_002)
    assert offsets.num_bytes == pytest.approx(80_000)
