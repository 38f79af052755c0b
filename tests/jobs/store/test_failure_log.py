"""The failure log on disk: logs of earlier versions stay readable, and new ones have the same keys."""

from __future__ import annotations

from pathlib import Path

from headrace.jobs.store.failure_log import (
    EngineDeath,
    FailureLog,
    MemoryStep,
    PoisonLine,
    PoisonRequest,
    Retry,
    Suspicion,
    Trial,
    counts_of,
)

# Written before fields of the records were renamed.
OLD_LOG = """\
{"epoch":3,"turn":2,"event":{"what":"retry","row":7,"cause":"engine_error"}}
{"epoch":3,"turn":2,"event":{"what":"death","loss":"engine","reason":"x","rows":[1,2,5],"num_done":9,\
"suspicion":{"last":[4],"trials":[{"rows":[1,2],"is_twin":true,"num_rows":2,"evidence":0},\
{"rows":[5],"is_twin":false,"num_rows":1,"evidence":3}]},"num_idle":1,"epoch":2}}
{"epoch":3,"turn":2,"event":{"what":"poison","row":5,"num_answered":8}}
{"epoch":3,"turn":2,"event":{"what":"poison-request","digest":"ab"}}
{"epoch":3,"turn":2,"event":{"what":"memory","rung":"started again",\
"given":{"a":null},"settings":{"b":0.5},"num_done":9}}
"""
SUSPICION = Suspicion([4], [Trial([1, 2], True, 2, 0), Trial([5], False, 1, 3)])
EVENTS = [
    EngineDeath("engine", "x", [1, 2, 5], 9, SUSPICION, 1, 2),
    PoisonLine(5, 8),
    PoisonRequest("ab"),
    MemoryStep("started again", {"a": None}, {"b": 0.5}, 9),
]


def test_a_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trouble.jsonl"
    path.write_text(OLD_LOG)
    log = FailureLog(path, epoch=4, first_epoch=1, pass_number=2)
    assert log.events == EVENTS
    assert log.num_retries == {7: 1}
    assert FailureLog(path, epoch=4, pass_number=3).events == [], "events of another pass do not count"
    assert counts_of(tmp_path, first_epoch=1).deaths == {"engine": 1}


def test_the_keys_on_disk_have_not_changed(tmp_path: Path) -> None:
    log = FailureLog(tmp_path / "trouble.jsonl", epoch=3, pass_number=2)
    for event in (Retry(7, "engine_error"), *EVENTS):
        log.append(event)
    assert (tmp_path / "trouble.jsonl").read_text() == OLD_LOG
