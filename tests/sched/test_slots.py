from __future__ import annotations

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.sched.slots import NEVER, RowTable
from headrace.types import Request, SamplingParams

PROMPT = np.array([11, 12, 13, 14, 15], np.int32)


def make_sequence(end_len: int = 10, *, watched: bool = False) -> Sequence:
    return Sequence(
        request=Request("request", PROMPT, SamplingParams(), watched=watched),
        index=0,
        seed=0,
        arrival=0,
        end_len=end_len,
        stop_token_ids=(),
        token_ids=PROMPT,
    )


def occupy(rows: RowTable, sequence: Sequence | None = None, *, step: int = 0, num_computed: int = 0) -> int:
    return rows.occupy(sequence or make_sequence(), step=step, num_computed=num_computed, capacity=8)


def test_the_lowest_free_row_is_occupied_first() -> None:
    rows = RowTable(3, 16)
    assert [occupy(rows), occupy(rows), occupy(rows)] == [0, 1, 2]
    rows.vacate(2)
    rows.vacate(0)
    assert occupy(rows) == 0


def test_free_and_running_rows_add_up() -> None:
    rows = RowTable(3, 16)
    occupy(rows)
    assert (rows.num_free, rows.num_running, len(rows.running())) == (2, 1, 1)
    rows.vacate(0)
    assert (rows.num_free, rows.num_running, rows.running()) == (3, 0, [])


def test_a_row_starts_with_the_known_tokens_of_its_sequence() -> None:
    rows = RowTable(1, 16)
    occupy(rows, make_sequence(watched=True), step=7, num_computed=3)
    assert rows.known_tokens(0).tolist() == PROMPT.tolist()
    assert (rows.total[0], rows.computed[0], rows.end[0], rows.since[0]) == (5, 3, 10, 7)
    assert rows.is_watched[0]


def test_a_part_of_a_prompt_draws_nothing_and_is_not_steady() -> None:
    rows = RowTable(1, 16)
    occupy(rows)
    assert not rows.advance(0, 4)
    assert (rows.computed[0], rows.total[0]) == (4, 5)
    assert rows.steady().tolist() == []


def test_the_end_of_a_prompt_draws_and_makes_the_row_steady() -> None:
    rows = RowTable(1, 16)
    occupy(rows)
    rows.advance(0, 4)
    assert rows.advance(0, 1)
    assert (rows.computed[0], rows.total[0]) == (5, 6)
    assert rows.steady().tolist() == [0]


def test_a_row_whose_first_token_is_its_last_never_becomes_steady() -> None:
    rows = RowTable(1, 16)
    occupy(rows, make_sequence(end_len=6))
    assert rows.advance(0, 5)
    assert rows.steady().tolist() == []


def test_steady_rows_are_ascending_and_the_same_array_while_nothing_changes() -> None:
    rows = RowTable(4, 16)
    for _ in range(3):
        occupy(rows)
    for row in (2, 0, 1):
        rows.advance(row, 5)
    steady = rows.steady()
    assert steady.tolist() == [0, 1, 2]
    rows.advance_steady(steady)
    assert rows.steady() is steady


def test_rows_leave_the_steady_ones_when_their_last_token_is_submitted() -> None:
    rows = RowTable(2, 16)
    for end_len in (7, 8):
        rows.advance(occupy(rows, make_sequence(end_len)), 5)
    rows.advance_steady(rows.steady())
    assert rows.steady().tolist() == [1]
    assert rows.total.tolist() == [7, 7]


def test_a_vacated_row_is_not_steady_and_owns_no_result() -> None:
    rows = RowTable(2, 16)
    for _ in range(2):
        rows.advance(occupy(rows), 5)
    rows.steady()
    rows.vacate(0)
    assert rows.steady().tolist() == [1]
    assert rows.since[0] == NEVER


def test_recorded_tokens_are_appended_to_each_row() -> None:
    rows = RowTable(3, 16)
    for _ in range(3):
        occupy(rows)
    rows.record(np.array([2, 0], np.int32), np.array([77, 88], np.int32))
    assert rows.known_tokens(2).tolist() == [*PROMPT, 77]
    assert rows.known_tokens(0).tolist() == [*PROMPT, 88]
    assert rows.known_tokens(1).tolist() == PROMPT.tolist()


def test_unused_places_are_those_that_no_token_has() -> None:
    rows = RowTable(2, 16)
    occupy(rows)
    assert rows.num_unused_slots() == 3
    rows.advance(0, 5)
    assert rows.num_unused_slots() == 2
    rows.vacate(0)
    assert rows.num_unused_slots() == 0
