"""The table of who has computed which prefix."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.balance.prefix_table import PrefixTable


def common(one: list[int], two: list[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def test_the_match_is_the_longest_start_that_a_replica_got() -> None:
    table = PrefixTable()
    table.record([1, 2, 3], 0)
    table.record([1, 2, 9], 5)
    table.record([7, 2, 3], 6)
    assert table.matched([1, 2, 3, 4], [0, 5, 6, 8]) == [3, 2, 0, 0]
    assert table.matched([1, 2, 3], [5, 0]) == [2, 3]
    assert table.matched([], [0, 5]) == [0, 0]


def test_numbers_that_are_no_longer_in_use_are_forgotten() -> None:
    table = PrefixTable()
    table.record([1], 0)
    table.record([1], 2, live=0b110)
    assert table.matched([1], [0, 1, 2]) == [0, 0, 1]


def test_the_least_recently_used_prefix_is_dropped_from_its_end() -> None:
    table = PrefixTable(max_entries=4)
    table.record([1, 2, 3], 0)
    table.record([4, 5], 0)
    assert len(table) == 4
    assert table.matched([1, 2, 3], [0]) == [2]
    assert table.matched([4, 5], [0]) == [2]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 3)), max_size=30),
    st.lists(st.integers(0, 5), max_size=6),
)
def test_a_match_is_never_longer_than_what_was_recorded(records: list[tuple[list[int], int]], asked: list[int]) -> None:
    """Chunks are named by their whole prefix here, as hashes are."""
    table = PrefixTable(max_entries=8)

    def named(path: list[int]) -> list[int]:
        return [hash(tuple(path[: end + 1])) for end in range(len(path))]

    for path, number in records:
        table.record(named(path), number)
        assert len(table) <= 8
    for number, found in enumerate(table.matched(named(asked), [0, 1, 2, 3])):
        longest = max((common(named(path), named(asked)) for path, who in records if who == number), default=0)
        assert 0 <= found <= longest
