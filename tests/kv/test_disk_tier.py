from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.kv import disk_files
from headrace.kv.disk_files import BlockFiles, salt_secret
from headrace.kv.disk_tier import NUM_WRITERS, DiskTier
from headrace.kv.tiers import Finished

DOMAIN = b"d" * 32
BLOCK_BYTES = 5000
OPEN_S = 30.0  # longer than any load of the machine lasts


def digest(number: int) -> bytes:
    return bytes([number]) * 32


class Disk:
    """A tier of four places, and what it has done."""

    def __init__(self, root: Path, *, max_bytes: int = 1 << 30, domain: bytes = DOMAIN) -> None:
        self.memory = np.zeros((4, BLOCK_BYTES), np.uint8)
        self.tier = DiskTier(root, domain, memory=self.memory, wait_for_step=lambda *_: True, max_bytes=max_bytes)

    def write(self, number: int) -> bool:
        """Write the block of this number, whose content is the number."""
        self.memory[0] = number
        assert self.tier.write(digest(number), 0, 0)
        return self._end("written", number)

    def read(self, number: int) -> bool:
        self.memory[1] = 255
        self.tier.read(digest(number), 1, 0)
        is_good = self._end("read", number)
        assert not is_good or (self.memory[1] == number).all(), "another block was read"
        return is_good

    def _end(self, side: str, number: int) -> bool:
        found: list[Finished] = []
        while not found:
            self.tier.wait(OPEN_S)
            found += self.tier.finished()
        assert [(each.side, each.digest) for each in found] == [(side, digest(number))]
        return found[0].is_good


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    opened: list[Disk] = []

    def start(**options: object) -> Disk:
        opened.append(Disk(tmp_path / "kv", **options))  # type: ignore[arg-type]
        return opened[-1]

    yield start
    for disk in opened:
        disk.tier.close()


def path_of(tmp_path: Path, number: int) -> Path:
    return BlockFiles(tmp_path / "kv", DOMAIN).path_of(digest(number))


def test_a_later_process_reads_what_an_earlier_one_wrote(start: Callable[..., Disk]) -> None:
    assert start().write(1)
    later = start()
    assert digest(1) in later.tier and digest(2) not in later.tier
    assert later.read(1)


def test_blocks_of_another_model_or_layout_are_not_found(start: Callable[..., Disk]) -> None:
    start().write(1)
    assert digest(1) not in start(domain=b"e" * 32).tier


def _truncate(path: Path) -> None:
    os.truncate(path, 2000)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _make_foreign(path: Path) -> None:
    path.write_bytes(b"not ours" * 1000)


def _take_another_block(path: Path) -> None:
    other = BlockFiles(path.parents[2], DOMAIN)
    other.write(digest(9), np.full(BLOCK_BYTES, 9, np.uint8))
    os.replace(other.path_of(digest(9)), path)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, _append, _make_foreign, _take_another_block])
def test_a_damaged_or_foreign_file_is_dropped_with_one_warning(
    damage: Callable[[Path], None], start: Callable[..., Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = start()
    for number in (1, 2):
        disk.write(number)
        damage(path_of(tmp_path, number))
    with caplog.at_level(logging.WARNING):
        assert not disk.read(1)
        assert not disk.read(2)
    assert not path_of(tmp_path, 1).exists() and digest(1) not in disk.tier
    assert len(caplog.records) == 1 and str(path_of(tmp_path, 1)) in caplog.text


def test_a_full_disk_drops_blocks_with_one_warning_and_pauses(
    start: Callable[..., Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, really_open = start(), os.open
    monkeypatch.setattr(disk_files.os, "open", lambda *_: really_open("/dev/full", os.O_WRONLY))
    with caplog.at_level(logging.WARNING):
        assert not disk.write(1)
    assert "No space left on device" in caplog.text
    assert not disk.tier.write(digest(2), 0, 0)  # not tried for a while
    assert list((tmp_path / "kv").rglob("*.tmp")) == []


def test_the_least_recently_used_files_make_room(start: Callable[..., Disk], tmp_path: Path) -> None:
    disk = start(max_bytes=4 * BLOCK_BYTES + 1000)
    for number in (1, 2, 3):
        disk.write(number)
        os.utime(path_of(tmp_path, number), (number, number))
    assert disk.read(1)  # used now
    disk.write(4)
    disk.write(5)
    assert [number for number in range(1, 6) if path_of(tmp_path, number).exists()] == [1, 4, 5]
    assert digest(2) not in disk.tier


def test_a_smaller_limit_is_met_at_the_next_start(start: Callable[..., Disk], tmp_path: Path) -> None:
    first = start()
    for number in (1, 2, 3):
        first.write(number)
    smaller = start(max_bytes=2 * BLOCK_BYTES)
    smaller.write(4)
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 1


def test_a_file_that_another_server_deleted_is_a_miss_without_a_warning(
    start: Callable[..., Disk], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), start()
    first.write(1)
    third = start()
    second.tier.clear()
    assert second.tier.flush(OPEN_S)
    assert not third.read(1)
    assert caplog.records == []


def test_two_servers_may_write_the_same_block(start: Callable[..., Disk]) -> None:
    first, second = start(), start()
    assert first.write(1) and second.write(1)
    assert first.read(1) and second.read(1)


def test_a_file_is_written_only_after_the_copies_of_its_step(tmp_path: Path) -> None:
    memory, copied = np.zeros((1, BLOCK_BYTES), np.uint8), threading.Event()
    tier = DiskTier(
        tmp_path,
        DOMAIN,
        memory=memory,
        wait_for_step=lambda step, seconds: step == 7 and copied.wait(seconds),
        max_bytes=1 << 20,
    )
    assert tier.write(digest(5), 0, 7)
    memory[0] = 5
    copied.set()
    assert tier.flush(OPEN_S)
    tier.close()
    read = np.empty(BLOCK_BYTES, np.uint8)
    BlockFiles(tmp_path, DOMAIN).read(digest(5), read)
    assert (read == 5).all()


def test_a_tier_can_be_closed_while_it_waits_for_copies_that_never_come(tmp_path: Path) -> None:
    memory = np.zeros((1, BLOCK_BYTES), np.uint8)
    tier = DiskTier(tmp_path, DOMAIN, memory=memory, wait_for_step=lambda *_: False, max_bytes=1 << 20)
    tier.write(digest(5), 0, 7)
    tier.close()
    assert list(tmp_path.rglob("*.kv")) == []


# ---- several writers


class LateDisk:
    """A tier whose blocks of step n can be written once step n was let go. Place n has the content n."""

    def __init__(self, root: Path) -> None:
        self._memory = np.arange(64, dtype=np.uint8).repeat(BLOCK_BYTES).reshape(64, BLOCK_BYTES)
        self._files = BlockFiles(root, DOMAIN)
        self._free: set[int] = set()
        self._changed = threading.Condition()
        self.tier = DiskTier(root, DOMAIN, memory=self._memory, wait_for_step=self._wait, max_bytes=1 << 30)

    def _wait(self, step: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: step in self._free, seconds)

    def let_go(self, *steps: int) -> None:
        with self._changed:
            self._free.update(steps)
            self._changed.notify_all()

    def written(self, count: int) -> list[int]:
        """The next blocks that are written, by number, in the order of their ends."""
        found: list[Finished] = []
        while len(found) < count:
            self.tier.wait(OPEN_S)
            found += self.tier.finished()
        assert all(each.side == "written" and each.is_good for each in found)
        return [each.digest[0] for each in found]

    def content(self, number: int) -> int | None:
        read = np.empty(BLOCK_BYTES, np.uint8)
        try:
            self._files.read(digest(number), read)
        except FileNotFoundError:
            return None
        assert (read == read[0]).all()
        return int(read[0])


@pytest.fixture
def late(tmp_path: Path) -> Iterator[LateDisk]:
    disk = LateDisk(tmp_path)
    yield disk
    disk.tier.close()


def test_a_block_that_takes_long_does_not_hold_up_others(late: LateDisk) -> None:
    for number in (1, 2, 3):
        assert late.tier.write(digest(number), number, number)
    late.let_go(2, 3)
    assert sorted(late.written(2)) == [2, 3]
    assert not late.tier.flush(0.0)
    late.let_go(1)
    assert late.tier.flush(OPEN_S)
    assert [late.content(number) for number in (1, 2, 3)] == [1, 2, 3]


def test_a_block_is_not_written_twice_at_once(late: LateDisk) -> None:
    late.tier.write(digest(1), 1, 1)
    late.tier.write(digest(1), 2, 2)
    late.let_go(2)
    assert not late.tier.flush(0.1)
    assert late.tier.finished() == []  # the second one waits for the first
    late.let_go(1)
    assert late.tier.flush(OPEN_S)
    assert late.content(1) == 2


def test_files_are_deleted_after_earlier_writes_and_before_later_ones(late: LateDisk) -> None:
    late.tier.write(digest(1), 1, 1)
    late.tier.clear()
    late.tier.write(digest(2), 2, 2)
    late.let_go(2)
    assert not late.tier.flush(0.1)
    assert late.tier.finished() == []  # the second one waits for the deletion, and that for the first one
    late.let_go(1)
    assert late.tier.flush(OPEN_S)
    assert (late.content(1), late.content(2)) == (None, 2)
    assert digest(1) not in late.tier and digest(2) in late.tier


def test_files_that_were_to_be_deleted_are_when_the_tier_is_closed(late: LateDisk, tmp_path: Path) -> None:
    late.let_go(1)
    late.tier.write(digest(1), 1, 1)
    assert late.written(1) == [1]
    for number in range(2, 2 + NUM_WRITERS):  # all writers wait for copies that never come
        late.tier.write(digest(number), number, number)
    late.tier.clear()
    late.tier.close()
    assert list(tmp_path.rglob("*.kv")) == []


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["clear", "flush"])), max_size=40))
def test_the_files_are_those_of_the_index_and_within_the_limit(
    moves: list[int | str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, max_files = tmp_path_factory.mktemp("kv"), 6
    files = BlockFiles(root, DOMAIN)
    memory = np.arange(10, dtype=np.uint8).repeat(BLOCK_BYTES).reshape(10, BLOCK_BYTES)
    max_bytes = max_files * files.size_of(BLOCK_BYTES)
    tier = DiskTier(root, DOMAIN, memory=memory, wait_for_step=lambda *_: True, max_bytes=max_bytes)
    expected: set[int] = set()
    for move in moves:
        if move == "clear":
            tier.clear()
            expected.clear()
        elif move == "flush":
            assert tier.flush(OPEN_S)
        elif isinstance(move, int):
            assert tier.write(digest(move), move, 0)
            expected.add(move)
    assert tier.flush(OPEN_S)
    found = {name[0] for name in files.digests()}
    assert found == {number for number in range(10) if digest(number) in tier} <= expected
    assert len(found) <= max_files and (found == expected or len(found) > 0)
    for number in found:
        read = np.empty(BLOCK_BYTES, np.uint8)
        files.read(digest(number), read)
        assert (read == number).all()
    tier.close()
    assert list(root.rglob("*.tmp")) == []


def test_a_block_is_written_and_read_in_as_many_calls_as_the_system_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may write and read less than it is asked to."""
    write, readv = os.write, os.readv
    monkeypatch.setattr(disk_files.os, "write", lambda file, part: write(file, part[:77]))
    monkeypatch.setattr(disk_files.os, "readv", lambda file, parts: readv(file, [parts[0][:77]]))
    files, content = BlockFiles(tmp_path, DOMAIN), np.arange(BLOCK_BYTES, dtype=np.uint8)
    files.prepare(b"{}")
    files.write(digest(1), content)
    read = np.zeros(BLOCK_BYTES, np.uint8)
    files.read(digest(1), read)
    assert (read == content).all()


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigError, match=r"kv_offload_path=.*cannot be written to \(File exists\)"):
        Disk(tmp_path / "kv")


def test_others_cannot_read_the_files(start: Callable[..., Disk], tmp_path: Path) -> None:
    start().write(1)
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}


def test_the_secret_of_a_directory_stays_the_same(tmp_path: Path) -> None:
    assert salt_secret(tmp_path / "kv") == salt_secret(tmp_path / "kv") != salt_secret(tmp_path / "other")
