from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.sweep.journal import Journal, JournalError
from headrace.bench.sweep.result import Failure
from headrace.tune.journal import Entry, TrialJournal, key_of
from headrace.tune.trial import Asked, EngineFacts, Trial

DEFAULT = SweepConfig("default", {})
ASKED = Asked("race", 1, 0, 64)
KEY = key_of(DEFAULT, ASKED)
TRIAL = Trial("race", 1, 0, 64, 100.0, {"seconds": 1.0}, "now", 2.5, 5.0)


def entry(outcome: Trial | Failure) -> Entry:
    return Entry(outcome, EngineFacts(launch_command="run") if isinstance(outcome, Trial) else None, 7.5)


def test_a_trial_is_read_as_it_was_written(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path / "j", "id")
    journal.add(KEY, DEFAULT, entry(TRIAL))
    journal.close()
    again = TrialJournal(tmp_path / "j", "id")
    assert again.find(KEY) == entry(TRIAL)
    assert again.num_trials == 1
    again.close()


def test_trials_of_another_search_are_ignored(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path / "j", "id")
    journal.add(KEY, DEFAULT, entry(TRIAL))
    journal.close()
    other = TrialJournal(tmp_path / "j", "another")
    assert other.find(KEY) is None
    other.close()


def test_failures_are_kept_unless_they_are_passing_or_tried_again(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path / "j", "id")
    journal.add("a", DEFAULT, entry(Failure("start", "oom", "no memory")))
    journal.add("b", DEFAULT, entry(Failure("start", "unreachable", "no network")))
    assert journal.find("a") == entry(Failure("start", "oom", "no memory"))
    assert journal.find("b") is None
    journal.close()
    again = TrialJournal(tmp_path / "j", "id", retries_failed=True)
    assert again.find("a") is None
    again.close()


def test_a_note_is_no_trial(tmp_path: Path) -> None:
    journal = TrialJournal(tmp_path / "j", "id")
    journal.add_note("shortlist", [{"settings": {}}])
    assert journal.note("shortlist") == [{"settings": {}}] and journal.note("other") is None
    assert journal.num_trials == 0
    journal.close()


def test_the_keys_of_different_trials_differ() -> None:
    keys = {key_of(DEFAULT, ASKED), key_of(DEFAULT, ASKED, 1), key_of(DEFAULT, Asked("noise", 1, 0, 64))}
    keys.add(key_of(SweepConfig("x", {"block_size": 8}), ASKED))
    assert len(keys) == 4


def test_the_journal_of_a_sweep_is_not_taken_for_one_of_a_search(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:
        journal.append({"identity": "id"})
    with pytest.raises(JournalError, match=r"headrace\.tune/1"):
        TrialJournal(tmp_path / "j", "id")
