"""Stores that fail: every error has a message, and nothing is created by mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from headrace.engine.start import Engine
from headrace.errors import JobError
from headrace.jobs.formats import locations, open_source
from headrace.jobs.formats.identity import identify
from headrace.jobs.formats.sinks import open_sink
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec


class NoCredentialsError(Exception):
    """No OSError, as in the libraries of stores."""


class Store(MemoryFileSystem):
    """A store with buckets, which a directory creates; it may be out of reach."""

    protocol = "shaky"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = [""]  # noqa: RUF012
    buckets: set[str] = set()  # noqa: RUF012
    is_gone = False
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("shaky://").strip("/")

    def _check(self) -> None:
        if Store.is_gone:
            raise NoCredentialsError("Unable to locate credentials")

    def info(self, path: str, **options: Any) -> Any:
        self._check()
        name = path.strip("/")
        if "/" not in name:
            if name not in Store.buckets:
                raise FileNotFoundError(name)
            return {"name": name, "size": 0, "type": "directory"}
        return super().info(self._strip_protocol(path), **options)

    def exists(self, path: str, **options: Any) -> bool:
        self._check()
        return bool(super().exists(path, **options))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        Store.buckets.add(path.strip("/").partition("/")[0])

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._check()
        if mode == "wb" and path.strip("/").partition("/")[0] not in Store.buckets:
            raise FileNotFoundError("The specified bucket does not exist")
        return super()._open(path, mode, **options)


@pytest.fixture(autouse=True)
def _store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(locations, "_BUCKETS", frozenset({"shaky"}))
    fsspec.register_implementation("shaky", Store, clobber=True)
    Store.store, Store.buckets, Store.is_gone = {}, {"bucket"}, False
    yield
    Store.is_gone = False


def put(name: str, data: bytes) -> str:
    with fsspec.open(f"shaky://{name}", "wb") as file:
        file.write(data)
    return f"shaky://{name}"


@pytest.mark.parametrize(
    "call",
    [
        locations.exists,
        locations.num_bytes,
        locations.open_bytes,
        identify,
        open_source,
        open_sink,
        lambda url: open_sink(url, format="csv"),
        lambda url: JobSpec(input=url, output="out.jsonl").check_paths(),
    ],
)
def test_an_error_of_the_stores_library_is_a_message(call: Callable[[str], Any]) -> None:
    url = put("bucket/in.jsonl", b"{}\n")
    Store.is_gone = True
    with pytest.raises(JobError, match=r"shaky://bucket/in.jsonl .*: Unable to locate credentials"):
        call(url)


def test_a_store_that_vanishes_while_it_is_read_is_a_message() -> None:
    url = put("bucket/in.jsonl", b"{}\n")

    class Gone:
        def read(self, size: int) -> bytes:
            raise NoCredentialsError("Connection was closed")

    with pytest.raises(JobError, match="cannot be read any further: Connection was closed"):
        locations._StoreReader(Gone(), url).read(10)


def never(*arguments: Any, **options: Any) -> Engine:
    raise AssertionError("the model was loaded")


def test_a_bucket_that_does_not_exist_is_refused_and_not_created(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(JobError, match="there is no bucket 'buckte'; create it"):
        run_job(JobSpec(input="in.jsonl", output="shaky://buckte/out.jsonl"), start=never, quiet=True)
    with (
        pytest.raises(JobError, match=r"cannot write to .* it does not exist"),
        open_sink("shaky://buckte/out.jsonl") as sink,
    ):
        sink.append(b"{}")
    assert Store.buckets == {"bucket"}


def test_results_are_safe_when_the_store_vanishes_before_they_are_published(
    tmp_path: Path, start: Callable[..., Engine]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 2}\n')
    job = JobSpec(input="in.jsonl", output="shaky://bucket/out.jsonl")

    def vanish(*arguments: Any, **options: Any) -> Engine:
        Store.is_gone = True
        return start(*arguments, **options)

    with pytest.raises(JobError, match=r"cannot be written: Unable to locate credentials; its results are safe in"):
        run_job(job, start=vanish, quiet=True)
    Store.is_gone = False
    assert run_job(job, start=never, quiet=True).num_before == 1
    with fsspec.open("shaky://bucket/out.jsonl", "rb") as file:
        assert json.loads(file.read())["index"] == 0
