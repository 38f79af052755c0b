"""The journal alone: what is committed, what is cut off, which results count."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import JobError, ResumableJobError
from headrace.jobs.store import journal as journal_module
from headrace.jobs.store.committed import Committed
from headrace.jobs.store.journal import GROUP_RESULTS, Journal
from headrace.jobs.store.record import Record, decode, encode


def result_of(index: int) -> bytes:
    return b'{"index":%d,"text":"answer %d"}' % (index, index)


def write(directory: Path, *indexes: int, epoch: int = 1, attempt: int = 1, error: str | None = None) -> None:
    journal = Journal.open(directory, epoch=epoch)
    for index in indexes:
        journal.append(index, result_of(index), attempt=attempt, error=error)
    journal.commit()
    journal.close()


def reopen(directory: Path, epoch: int = 2) -> Journal:
    return Journal.open(directory, epoch=epoch)


@given(st.integers(0, 10**12), st.integers(1, 127), st.none() | st.text(), st.text())
def test_a_record_is_read_as_it_was_written(index: int, attempt: int, error: str | None, text: str) -> None:
    import msgspec

    record = Record(index, attempt, error, msgspec.json.encode({"text": text}))
    line = encode(index, attempt, error, record.result)
    assert decode(line) == record
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["r"] == {"text": text}


def test_a_record_with_any_byte_changed_is_not_read() -> None:
    line = encode(123, 4, "engine_error", result_of(123))
    for place in range(len(line)):
        damaged = line[:place] + bytes([line[place] ^ 1]) + line[place + 1 :]
        assert decode(damaged) is None, place


def test_committed_results_are_read_back_in_order(tmp_path: Path) -> None:
    write(tmp_path, 3, 0, 7)
    journal = reopen(tmp_path)
    assert list(journal.results()) == [(index, result_of(index)) for index in (3, 0, 7)]
    assert [record.index for record in journal.records(in_order=True)] == [0, 3, 7]
    assert (journal.num_done, journal.num_errors, journal.num_damaged) == (3, 0, 0)
    assert [journal.is_done(index) for index in range(9)] == [True, False, False, True, *[False] * 3, True, False]


@pytest.mark.parametrize("buffer_bytes", [2, 50, 1 << 20])
def test_the_output_lines_are_the_committed_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int
) -> None:
    monkeypatch.setattr("headrace.jobs.store.segments.BUFFER_BYTES", buffer_bytes)
    write(tmp_path, 3, 0, 7)
    journal = Journal.open(tmp_path, epoch=2)
    with open(tmp_path / "seg-000001-0001.jsonl", "ab") as file:
        file.write(encode(9, 1, None, b"too late"))
    journal.append(5, result_of(5), error='a "code"\\')
    journal.commit()
    expected = [result_of(index) for index in (3, 0, 7, 5)]
    assert list(journal.output_lines(in_order=False)) == expected == [result for _, result in journal.results()]
    assert list(journal.output_lines(in_order=True)) == sorted(expected)
    journal.close()


def test_the_first_result_of_a_line_wins(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, epoch=1)
    assert journal.append(5, b'"first"')
    assert not journal.append(5, b'"second"')
    journal.commit()
    assert list(journal.results()) == [(5, b'"first"')]
    journal.close()


def test_a_tail_torn_at_any_byte_costs_only_the_records_it_tears(tmp_path: Path) -> None:
    write(tmp_path, *range(5))
    (segment,) = tmp_path.glob("seg-*")
    whole = segment.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        segment.write_bytes(whole[:size])
        journal = reopen(tmp_path)
        num_whole = sum(end <= size for end in ends)
        assert [index for index, _ in journal.results()] == list(range(num_whole))
        assert segment.read_bytes() == whole[: ends[num_whole - 1] if num_whole else 0], "the tail is cut"


@pytest.mark.parametrize("junk", [b"\0" * 4096, b"\0" * 10 + b"\n", b'{"i":9,"a":1', b"\n\n"])
def test_junk_at_the_end_is_cut(tmp_path: Path, junk: bytes) -> None:
    write(tmp_path, 0, 1)
    (segment,) = tmp_path.glob("seg-*")
    whole = segment.read_bytes()
    segment.write_bytes(whole + junk)
    assert reopen(tmp_path).num_done == 2
    assert segment.read_bytes() == whole


def test_a_damaged_record_loses_only_its_own_line(tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    (segment,) = tmp_path.glob("seg-*")
    segment.write_bytes(segment.read_bytes().replace(b"answer 1", b"answer 9"))
    journal = reopen(tmp_path)
    assert ([index for index, _ in journal.results()], journal.num_damaged) == ([0, 2], 1)


def test_records_appended_after_an_epoch_was_sealed_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, epoch=1)
    second = Journal.open(tmp_path, epoch=2)
    sealed = second.sealed
    second.append(1, result_of(1))
    second.commit()
    second.close()
    (first,) = tmp_path.glob("seg-000001-*")
    with open(first, "ab") as file:  # the process of epoch 1 still runs
        file.write(encode(2, 1, None, result_of(2)))
    (tmp_path / "seg-000001-0002.jsonl").write_bytes(encode(3, 1, None, result_of(3)))
    journal = Journal.open(tmp_path, epoch=3, sealed=sealed)
    assert [index for index, _ in journal.results()] == [0, 1]


def test_segments_of_discarded_epochs_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 0, epoch=1)
    assert Journal.open(tmp_path, epoch=2, first_epoch=2).num_done == 0


def test_a_full_segment_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    journal = Journal.open(tmp_path, epoch=1)
    for index in range(10):
        journal.append(index, result_of(index))
        journal.flush()
    journal.commit()
    journal.close()
    assert len(list(tmp_path.glob("seg-*"))) > 2
    assert [index for index, _ in reopen(tmp_path).results()] == list(range(10))
    assert [record.index for record in reopen(tmp_path).records(in_order=True)] == list(range(10))


# Which result of a line counts.


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans())))
def test_an_answer_beats_an_error_and_then_the_later_attempt_the_earlier(added: list[tuple[int, int, bool]]) -> None:
    """Compared with the rule applied to whole histories, in which the attempts of a line only increase."""
    committed, best, last = Committed(), dict[int, tuple[bool, int]](), dict[int, int]()
    for index, attempt, is_error in added:
        is_new = attempt > last.get(index, 0)
        assert committed.add(index, attempt, is_error=is_error) == is_new
        if is_new:
            last[index] = attempt
            best[index] = max(best.get(index, (False, 0)), (not is_error, attempt))
    assert committed.num_done == len(best)
    assert committed.num_errors == sum(not is_answer for is_answer, _ in best.values())
    assert all(committed.last_attempt(index) == attempt for index, attempt in last.items())


def test_replay_finds_the_same_results_as_the_process_that_wrote_them(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, epoch=1)
    journal.append(0, b'"answer"')
    journal.append(1, b'"error"', error="engine_error")
    journal.append(0, b'"failed later"', attempt=2, error="engine_error")
    journal.append(1, b'"answered later"', attempt=2)
    journal.commit()
    expected = [(0, b'"answer"'), (1, b'"answered later"')]
    assert (list(journal.results()), journal.num_errors) == (expected, 0)
    journal.close()
    again = reopen(tmp_path)
    assert (list(again.results()), again.num_errors, again.last_attempt(0)) == (expected, 0, 2)


# When it reaches the disk.


def test_results_count_as_synced_only_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "GROUP_SECONDS", 1e6)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    journal = Journal.open(tmp_path, epoch=1)
    for index in range(GROUP_RESULTS - 1):
        journal.append(index, result_of(index))
    journal.flush()
    assert (synced, journal.num_unsynced) == ([], GROUP_RESULTS - 1)
    journal.append(GROUP_RESULTS, result_of(GROUP_RESULTS))
    journal.commit()
    (segment,) = tmp_path.glob("seg-*")
    assert (synced[-1], journal.num_unsynced) == (segment.stat().st_size, 0)
    journal.close()


def test_a_group_is_due_when_it_is_old_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(journal_module, "monotonic", lambda: now[0])
    journal = Journal.open(tmp_path, epoch=1)
    assert journal.seconds_to_flush is None
    journal.append(0, b"0")
    journal.flush()
    assert journal.seconds_to_flush == pytest.approx(0.05)
    now[0] = 0.06
    assert journal.seconds_to_flush == 0.0
    journal.flush()
    assert journal.seconds_to_flush is None
    journal.close()


def test_a_failed_sync_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    journal = Journal.open(tmp_path, epoch=1)
    journal.append(0, b"0")
    with pytest.raises(JobError, match="cannot be written: Input/output error"):
        journal.commit()
    journal.close()


def test_half_a_record_on_a_full_disk_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(tmp_path, epoch=1)
    journal.append(0, result_of(0))
    journal.commit()
    (segment,) = tmp_path.glob("seg-*")
    whole, real = segment.read_bytes(), os.write

    def write_some(descriptor: int, data: bytes) -> int:
        if segment.stat().st_size > len(whole):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, bytes(data)[:10])

    monkeypatch.setattr(os, "write", write_some)
    journal.append(1, result_of(1))
    with pytest.raises(ResumableJobError, match=r"No space left on device; .* make room"):
        journal.flush()
    assert segment.read_bytes() == whole
    journal.close()


def test_a_write_after_the_directory_was_removed_says_so(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    journal = Journal.open(directory, epoch=1)
    journal.guard(directory.exists)  # its manifest is gone too
    journal.append(0, result_of(0), attempt=1, error=None)
    shutil.rmtree(directory)
    with pytest.raises(JobError, match=r"job directory .*job was removed"):
        journal.commit()


def test_a_write_after_another_process_took_over_says_so(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, epoch=1)
    journal.guard(lambda: False)
    journal.append(0, result_of(0), attempt=1, error=None)
    with pytest.raises(JobError, match="another process has taken over"):
        journal.commit()
