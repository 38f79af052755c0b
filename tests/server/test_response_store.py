"""Stored responses: per key, within limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.response_archive import ResponseArchive
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


def archived(directory: Path, *, max_responses: int = 100) -> tuple[ResponseStore, ResponseArchive]:
    archive = ResponseArchive(directory)
    return ResponseStore(max_responses=max_responses, max_bytes=1000, archive=archive), archive


def test_an_archive_has_the_finished_responses_for_the_next_server(tmp_path: Path) -> None:
    made, archive = archived(tmp_path)
    for one in (response("1"), response("2", owner="b"), response("3"), response("4", status="in_progress")):
        made.add(one)
    made.delete("a", "3")
    archive.close()
    again, archive = archived(tmp_path)
    assert again.num_responses == 2 and again.find("a", "4") is None
    found = again.find("b", "2")
    assert found is not None and found.output[0]["id"] == "msg_2" and again.find_item("a", "msg_1") is not None
    archive.close()


def test_a_response_in_the_background_is_archived_at_its_end(tmp_path: Path) -> None:
    made, archive = archived(tmp_path)
    running = response("1", status="queued")
    made.add(running)
    made.change(running, {"id": "1", "status": "completed", "output": []})
    archive.close()
    again, archive = archived(tmp_path)
    assert again.find("a", "1") is not None
    archive.close()


def test_a_smaller_limit_also_holds_for_what_was_archived(tmp_path: Path) -> None:
    made, archive = archived(tmp_path)
    for number in range(3):
        made.add(response(str(number)))
    archive.close()
    fewer, archive = archived(tmp_path, max_responses=1)
    archive.close()
    assert fewer.num_responses == 1
    again, archive = archived(tmp_path)
    assert again.num_responses == 1 and again.find("a", "2") is not None
    archive.close()


def test_two_servers_cannot_share_an_archive(tmp_path: Path) -> None:
    archive = ResponseArchive(tmp_path)
    with pytest.raises(ConfigError, match="another server"):
        ResponseArchive(tmp_path)
    archive.close()
