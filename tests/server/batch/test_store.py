from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.batch.records import BATCH_ID, FILE_ID, Batch, StoredFile, new_id
from headrace.server.batch.store import BatchStore, QuotaError


def add_file(store: BatchStore, owner: str = "", *, content: bytes = b"x", max_files: int = 9, max_bytes: int = 99):
    path = store.upload_path(new_id(""))
    path.write_bytes(content)
    file = StoredFile(
        id=new_id(FILE_ID),
        owner=owner,
        num_bytes=len(content),
        created_at=1,
        expires_at=100,
        filename="a",
        purpose="batch",
    )
    store.add_file(file, path, max_files=max_files, max_bytes=max_bytes)
    return file


def add_batch(
    store: BatchStore, file: StoredFile, *, created_at: int = 1, window_s: int = 10, max_unfinished: int = 9
) -> Batch:
    batch = Batch(
        id=new_id(BATCH_ID),
        owner=file.owner,
        endpoint="/v1/completions",
        input_file_id=file.id,
        created_at=created_at,
        expires_at=created_at + window_s,
    )
    store.add_batch(batch, max_unfinished=max_unfinished)
    return batch


def test_files_and_batches_are_there_after_a_restart(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store, "me")
    batch = add_batch(store, file)
    store.close()
    again = BatchStore(tmp_path)
    assert again.file(file.id, "me") == file and again.batch(batch.id, "me") == batch
    assert again.file_path(file.id).read_bytes() == b"x"
    assert again.unfinished() == [batch]
    again.close()


def test_another_owner_sees_nothing(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store, "me")
    batch = add_batch(store, file)
    assert store.file(file.id, "you") is None and store.batch(batch.id, "you") is None
    assert store.files("you", limit=9, after=None, purpose=None) == store.batches("you", limit=9, after=None) == []
    assert not store.delete_file(file.id, "you") and store.file(file.id, "me") == file
    assert store.files("you", limit=9, after=file.id, purpose=None) == []
    store.close()


def test_batches_are_listed_in_their_order_even_if_the_clock_went_back(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store)
    batches = [add_batch(store, file, created_at=at) for at in (100, 50, 75)]
    assert store.batches("", limit=9, after=None) == batches[::-1]
    assert store.batches("", limit=1, after=batches[1].id) == [batches[0]]
    assert store.unfinished() == batches
    store.close()


def test_quotas_hold_in_the_transaction(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    first = add_file(store, content=b"123456")
    with pytest.raises(QuotaError, match="7 bytes, the limit is 6"):
        add_file(store, max_bytes=6)
    with pytest.raises(QuotaError, match="already stores 1 files"):
        add_file(store, max_files=1)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [first.id]
    assert not list((tmp_path / "uploads").iterdir())
    add_batch(store, first, max_unfinished=1)
    with pytest.raises(QuotaError, match="1 batches of this key are unfinished"):
        add_batch(store, first, max_unfinished=1)
    assert len(list((tmp_path / "jobs").iterdir())) == 1
    add_file(store, "other", max_files=1)  # another key has its own limits
    store.close()


def test_a_batch_moves_only_from_the_named_states(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = add_batch(store, add_file(store))
    moved = store.move(batch.id, "in_progress", since=("validating",), change=lambda batch: {"model": "m"})
    assert moved is not None and moved.times.keys() == {"in_progress"} and moved.model == "m"
    assert store.move(batch.id, "in_progress", since=("validating",)) is None
    assert store.move(batch.id, "cancelling", since=("validating", "in_progress")) is not None
    assert store.move(batch.id, "finalizing", since=("in_progress",)) is None
    assert store.count_by_status() == {"cancelling": 1}
    store.close()


def test_a_wrong_order_of_states_is_our_bug(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    batch = add_batch(store, add_file(store))
    with pytest.raises(AssertionError, match="validating cannot become completed"):
        store.move(batch.id, "completed", since=("validating",))
    assert store.batch(batch.id) == batch  # rolled back
    store.close()


def test_what_a_crash_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store)
    finished = add_batch(store, file)
    store.move(finished.id, "failed", since=("validating",))
    running = add_batch(store, file)
    store.close()
    (tmp_path / "files" / "file-without-row").write_bytes(b"x")
    (tmp_path / "uploads" / "half").write_bytes(b"x")
    again = BatchStore(tmp_path)
    assert [path.name for path in (tmp_path / "files").iterdir()] == [file.id]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == [running.id]
    assert not list((tmp_path / "uploads").iterdir())
    again.close()


def test_expired_files_are_deleted(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store)
    assert store.delete_expired_files(99) == 0 and store.delete_expired_files(100) == 1
    assert store.file(file.id, "") is None and not store.file_path(file.id).exists()
    store.close()


def test_a_deleted_input_stays_with_its_batch(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    file = add_file(store)
    batch = add_batch(store, file)
    assert store.delete_file(file.id, "")
    assert (store.job_path(batch.id) / "input.jsonl").read_bytes() == b"x"
    store.close()


def _open_elsewhere(path: Path) -> None:
    try:
        BatchStore(path)
    except ConfigError as error:
        raise SystemExit(7 if "another server uses the batch directory" in str(error) else 1) from None


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    store = BatchStore(tmp_path)
    other = multiprocessing.get_context("fork").Process(target=_open_elsewhere, args=(tmp_path,))
    other.start()
    other.join()
    assert other.exitcode == 7
    store.close()
