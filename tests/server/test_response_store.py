"""Stored responses: per key, within limits."""

from __future__ import annotations

from headrace.server.response_store import ResponseStore, StoredResponse


def response(id: str, *, owner: str = "a", num_bytes: int = 10, status: str = "completed") -> StoredResponse:
    item = {"id": f"msg_{id}", "type": "message"}
    return StoredResponse(owner, {"id": id, "status": status, "output": [item]}, [], num_bytes)


def store(*added: StoredResponse, max_responses: int = 100, max_bytes: int = 1000) -> ResponseStore:
    made = ResponseStore(max_responses=max_responses, max_bytes=max_bytes)
    for one in added:
        made.add(one)
    return made


def test_a_response_exists_only_for_its_key() -> None:
    made = store(response("1"), response("2", owner="b"))
    assert made.find("a", "1") is not None and made.find("b", "1") is None
    assert made.find_item("a", "msg_1") is not None and made.find_item("b", "msg_1") is None
    assert not made.delete("b", "1") and made.delete("a", "1")
    assert made.find("a", "1") is None and made.find_item("a", "msg_1") is None


def test_the_least_recently_used_is_dropped_first() -> None:
    made = store(response("1"), response("2"), max_responses=2)
    made.find("a", "1")
    made.add(response("3"))
    assert [made.find("a", id) is not None for id in "123"] == [True, False, True]


def test_the_key_that_stores_the_most_loses_first() -> None:
    made = store(response("1", owner="b"), max_bytes=100)
    for number in range(50):
        made.add(response(str(number), num_bytes=30))
    assert made.find("b", "1") is not None and made.num_bytes <= 100 and made.num_responses == 4


def test_bytes_are_counted_when_a_response_changes_is_replaced_or_deleted() -> None:
    first = response("1")
    made = store(first, response("1", num_bytes=20))
    made.change(first, first.response, num_bytes=500)  # it was replaced
    assert made.num_bytes == 20
    second = made.find("a", "1")
    assert second is not None
    made.change(second, second.response, num_bytes=5)
    assert made.num_bytes == 25
    made.delete("a", "1")
    assert made.num_bytes == 0 == made.num_responses


def test_a_response_that_is_generated_is_not_dropped() -> None:
    running = response("1", status="in_progress")
    made = store(running, response("2"), max_responses=1)
    assert made.find("a", "1") is running and made.find("a", "2") is None
    made.change(running, {**running.response, "status": "completed"})
    made.add(response("3"))
    assert made.find("a", "1") is None and made.find("a", "3") is not None
