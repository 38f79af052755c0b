"""Digests tell models apart whose files have the same names and sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.models import digests
from headrace.models.digests import DigestCache, digest_of_file, digest_of_model, digest_of_tokenizer


@pytest.fixture(autouse=True)
def _small_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "WHOLE_BYTES", 1024)
    monkeypatch.setattr(digests, "SAMPLE_BYTES", 16)
    monkeypatch.setattr(digests, "SAMPLE_EVERY_BYTES", 256)
    monkeypatch.setattr(digests, "SAMPLES_PER_TASK", 3)


def overwrite(file: Path, offset: int, data: bytes) -> None:
    """In place: name, size, inode and time of modification stay."""
    before = os.stat(file)
    with open(file, "r+b") as opened:
        opened.seek(offset)
        opened.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("offset", [0, 777, 1024, 5000, 9000, 10_000 - 256])
def test_a_change_as_long_as_the_distance_of_samples_is_noticed_anywhere(tmp_path: Path, offset: int) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(10_000))
    before = digest_of_file(file)
    overwrite(file, offset, b"x" * 256)
    assert digest_of_file(file) != before


def test_a_change_of_the_last_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(10_001))
    before = digest_of_file(file)
    overwrite(file, 10_000, b"x")
    assert digest_of_file(file) != before


def test_a_small_tensor_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    names = {"a": (0, 5000), "norm": (5000, 5008), "b": (5008, 9000)}
    header = json.dumps(
        {
            name: {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
            for name, (start, end) in names.items()
        }
    ).encode()
    start = 8 + len(header) + 5000
    assert (start - 1024) % 256 >= 16, "the samples at equal distances must miss it"
    plain, weights = tmp_path / "model.bin", tmp_path / "model.safetensors"
    for file in (plain, weights):
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(9000))
    before = digest_of_file(plain), digest_of_file(weights)
    for file in (plain, weights):
        overwrite(file, start, b"12345678")
    assert digest_of_file(plain) == before[0]
    assert digest_of_file(weights) != before[1]


def test_equal_copies_have_equal_digests(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"\xff" * 5000)  # not parsed: its header is damaged
    assert digest_of_model(tmp_path / "one") == digest_of_model(tmp_path / "two")


def test_the_digest_of_a_tokenizer_ignores_weights(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = digest_of_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert digest_of_tokenizer(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("[]")
    assert digest_of_tokenizer(tmp_path) != before


def cache_of(tmp_path: Path, *, file: Path, age_s: int = 60) -> DigestCache:
    return DigestCache(tmp_path / "digests.json", now_ns=lambda: os.stat(file).st_ctime_ns + age_s * 10**9)


def test_a_cached_digest_is_used_as_long_as_the_file_has_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(5000))
    cache = cache_of(tmp_path, file=file)
    digest = digest_of_file(file, cache)
    cache.save()
    monkeypatch.setattr(digests, "_digest_of_samples", lambda *arguments: "computed again")
    assert digest_of_file(file, cache_of(tmp_path, file=file)) == digest
    os.utime(file, ns=(1, 1))
    assert digest_of_file(file, cache_of(tmp_path, file=file)) == "computed again"


def test_a_file_that_has_just_changed_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(5000))
    cache = cache_of(tmp_path, file=file, age_s=1)
    digest_of_file(file, cache)
    cache.save()
    assert not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("content", [b"{broken", b"[]", b'{"/a": {"size": "x"}}'])
def test_a_damaged_cache_is_ignored(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(5000))
    (tmp_path / "digests.json").write_bytes(content)
    assert digest_of_file(file, cache_of(tmp_path, file=file)) == digest_of_file(file)


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(bytes(5000))
    (tmp_path / "not-a-directory").write_text("")
    cache = DigestCache(tmp_path / "not-a-directory" / "digests.json", now_ns=lambda: 2**62)
    digest_of_file(file, cache)
    cache.save()
