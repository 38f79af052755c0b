from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.jobs.formats.line_index import Bitmap


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
