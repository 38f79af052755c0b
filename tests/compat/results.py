"""What each test of another project did when it last ran: one line of JSON per test in results/, sorted.

A run of some files or tests replaces their lines and keeps the others, each with the date and the commit of its run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

OWN_CODE = "uses the project's own code"  # as the adapter says it
PASSED, FAILED, OUTSIDE = "passed", "failed", "own code"
STARTED = "started"  # in the adapter's notes only


@dataclass(frozen=True)
class Result:
    """What one test did."""

    test: str  # pytest's id
    outcome: str  # passed, failed, skipped, or own code: it calls functions of its project
    line: int | None
    model: str = ""  # what stood for the test's model
    date: str = ""
    commit: str = ""  # the last one that changed Headrace itself
    message: str = ""  # of a failure; not stored

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]

    @property
    def name(self) -> str:
        return self.test.partition("::")[2] or "(the file)"

    @property
    def _order(self) -> tuple[str, int, str]:
        return self.file, self.line or 0, self.test


def read_results(path: Path) -> list[Result]:
    if not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def write_results(path: Path, results: Iterable[Result]) -> None:
    lines = []
    for result in sorted(results, key=lambda result: result._order):
        fields = {name: value for name, value in asdict(result).items() if name != "message"}
        lines.append(json.dumps(fields, ensure_ascii=False))
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def merged(kept: Sequence[Result], new: Sequence[Result], *, file: str, is_whole: bool) -> list[Result]:
    """The results after one file has run. `is_whole`: all tests of it, so those that are gone are dropped."""
    replaced = {result.test for result in new}
    rest = [each for each in kept if each.test not in replaced and not (is_whole and each.file == file)]
    return [*rest, *new]


def read_notes(text: str, *, model: str, date: str, commit: str) -> list[Result]:
    """The notes of the adapter about one run. A test that fails and then errs in its teardown counts once; one that was
    started and did not end has failed."""
    found: dict[str, Result] = {}
    ended: set[str] = set()
    for line in text.splitlines():
        note = json.loads(line)
        if note["outcome"] == STARTED:
            note |= {"outcome": FAILED, "message": "it did not end"}
        elif note["test"] in ended and note["outcome"] == PASSED:
            continue
        else:
            ended.add(note["test"])
        outcome = OUTSIDE if OWN_CODE in note["message"] else note["outcome"]
        found[note["test"]] = Result(
            note["test"], outcome, note["line"], model=model, date=date, commit=commit, message=note["message"]
        )
    return list(found.values())
