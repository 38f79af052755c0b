from __future__ import annotations

import numpy as np

from headrace.sched.sequence import Sequence
from headrace.sched.slots import NEVER, SlotTable
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


def occupy(slots: SlotTable, sequence: Sequence | None = None, *, step: int = 0, num_computed: int = 0) -> int:
    return slots.occupy(sequence or make_sequence(), step=step, num_computed=num_computed, capacity=8)


def test_the_lowest_free_slot_is_occupied_first() -> None:
    slots = SlotTable(3, 16)
    assert [occupy(slots), occupy(slots), occupy(slots)] == [0, 1, 2]
    slots.vacate(2)
    slots.vacate(0)
    assert occupy(slots) == 0


def test_free_and_running_slots_add_up() -> None:
    slots = SlotTable(3, 16)
    occupy(slots)
    assert (slots.num_free, slots.num_running, len(slots.running())) == (2, 1, 1)
    slots.vacate(0)
    assert (slots.num_free, slots.num_running, slots.running()) == (3, 0, [])


def test_a_slot_starts_with_the_known_tokens_of_its_sequence() -> None:
    slots = SlotTable(1, 16)
    occupy(slots, make_sequence(watched=True), step=7, num_computed=3)
    assert slots.known_tokens(0).tolist() == PROMPT.tolist()
    assert (slots.total[0], slots.computed[0], slots.end[0], slots.since[0]) == (5, 3, 10, 7)
    assert slots.is_watched[0]


def test_a_chunk_of_a_prompt_samples_nothing_and_does_not_decode() -> None:
    slots = SlotTable(1, 16)
    occupy(slots)
    assert not slots.advance(0, 4)
    assert (slots.computed[0], slots.total[0]) == (4, 5)
    assert slots.decoding().tolist() == []


def test_the_end_of_a_prompt_samples_and_makes_the_slot_decode() -> None:
    slots = SlotTable(1, 16)
    occupy(slots)
    slots.advance(0, 4)
    assert slots.advance(0, 1)
    assert (slots.computed[0], slots.total[0]) == (5, 6)
    assert slots.decoding().tolist() == [0]


def test_a_slot_whose_first_token_is_its_last_never_decodes() -> None:
    slots = SlotTable(1, 16)
    occupy(slots, make_sequence(end_len=6))
    assert slots.advance(0, 5)
    assert slots.decoding().tolist() == []


def test_decoding_slots_are_ascending_and_the_same_array_while_nothing_changes() -> None:
    slots = SlotTable(4, 16)
    for _ in range(3):
        occupy(slots)
    for slot in (2, 0, 1):
        slots.advance(slot, 5)
    decoding = slots.decoding()
    assert decoding.tolist() == [0, 1, 2]
    slots.advance_decoding(decoding)
    assert slots.decoding() is decoding


def test_slots_stop_decoding_when_their_last_token_is_submitted() -> None:
    slots = SlotTable(2, 16)
    for end_len in (7, 8):
        slots.advance(occupy(slots, make_sequence(end_len)), 5)
    slots.advance_decoding(slots.decoding())
    assert slots.decoding().tolist() == [1]
    assert slots.total.tolist() == [7, 7]


def test_a_vacated_slot_does_not_decode_and_owns_no_result() -> None:
    slots = SlotTable(2, 16)
    for _ in range(2):
        slots.advance(occupy(slots), 5)
    slots.decoding()
    slots.vacate(0)
    assert slots.decoding().tolist() == [1]
    assert slots.since[0] == NEVER


def test_recorded_tokens_are_appended_to_each_slot() -> None:
    slots = SlotTable(3, 16)
    for _ in range(3):
        occupy(slots)
    slots.record(np.array([2, 0], np.int32), np.array([77, 88], np.int32))
    assert slots.known_tokens(2).tolist() == [*PROMPT, 77]
    assert slots.known_tokens(0).tolist() == [*PROMPT, 88]
    assert slots.known_tokens(1).tolist() == PROMPT.tolist()


def test_unused_positions_are_those_without_a_token() -> None:
    slots = SlotTable(2, 16)
    occupy(slots)
    assert slots.num_unused_positions() == 3
    slots.advance(0, 5)
    assert slots.num_unused_positions() == 2
    slots.vacate(0)
    assert slots.num_unused_positions() == 0
