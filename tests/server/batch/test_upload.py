"""Uploads through the whole stack: openai's client, uvicorn, the gate, the disk."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from headrace.server.batch import upload as upload_module
from tests.engine.process.process_tools import wait_until
from tests.server.batch.batch_server import BatchServer

MIB = 2**20


def multipart(size: int) -> Iterator[bytes]:
    """The body of an upload, in parts."""
    yield b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="big.jsonl"\r\n\r\n'
    for start in range(0, size, MIB):
        yield b"x" * min(MIB, size - start)
    yield b"\r\n--xyz--\r\n"


def stored(server: BatchServer) -> list[Path]:
    path = server.service.store.path
    return [*(path / "files").iterdir(), *(path / "uploads").iterdir()]


def test_a_large_upload_takes_little_memory(server: BatchServer) -> None:
    size = 200 * MIB
    tracemalloc.start()
    try:
        answer = httpx2.post(
            f"{server.url}/v1/files",
            content=multipart(size),
            headers={"Content-Type": "multipart/form-data; boundary=xyz"},
            timeout=120,
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == size == server.service.store.file_path(answer.json()["id"]).stat().st_size
    assert peak < 32 * MIB, f"{peak / MIB:.1f} MiB, client included"


def test_an_uploaded_file_is_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = "".join(f"line {number} äöü\n" for number in range(10_000)).encode()
    file = client.files.create(file=("../dir/täst.jsonl", content), purpose="batch")
    assert file.id.startswith("file-") and file.object == "file" and file.purpose == "batch"
    assert (file.bytes, file.filename, file.status) == (len(content), "täst.jsonl", "processed")
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    assert [each.id for each in client.files.list()] == [file.id]
    assert not list(client.files.list(purpose="batch_output"))
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_are_listed_in_pages(client: openai.OpenAI) -> None:
    ids = [client.files.create(file=(f"{number}", b""), purpose="batch").id for number in range(5)]
    assert [each.id for each in client.files.list(limit=2)] == ids[::-1]
    assert [each.id for each in client.files.list(limit=2, order="asc")] == ids
    with pytest.raises(openai.BadRequestError, match="limit must be between 1 and 10,000"):
        client.files.list(limit=0)


def test_a_query_with_too_many_digits_or_fields_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="limit must be between 1 and 10,000"):
        client.files.list(extra_query={"limit": "9" * 5000})
    with pytest.raises(openai.BadRequestError, match="more than 32 fields"):
        client.files.list(extra_query={f"a{number}": "1" for number in range(33)})


def test_an_upload_may_set_its_expiry(client: openai.OpenAI) -> None:
    expiry = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry)  # type: ignore[arg-type]
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="seconds between 3,600"):
        client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry | {"seconds": 7})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"--xyz--\r\n", "purpose must be 'batch'"),
        (b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyz--\r\n', "has no file"),
        (b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--xyz--\r\n', "must be 'batch'"),
        (b"nothing", "ended before its last boundary"),
    ],
)
def test_a_wrong_upload_leaves_nothing_behind(server: BatchServer, content: bytes, message: str) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    answer = httpx2.post(f"{server.url}/v1/files", content=content, headers=headers)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]
    assert not stored(server)


def test_a_file_that_is_too_large_leaves_nothing_behind(server: BatchServer) -> None:
    object.__setattr__(server.service._options, "max_file_bytes", 2 * MIB)  # of this server
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    for headers_given in (headers, headers | {"Content-Length": str(sum(map(len, multipart(3 * MIB))))}):
        answer = httpx2.post(f"{server.url}/v1/files", content=multipart(3 * MIB), headers=headers_given)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert not stored(server)
    assert httpx2.post(f"{server.url}/v1/files", content=multipart(2 * MIB), headers=headers).status_code == 200


def test_a_full_disk_is_a_507_and_leaves_nothing_behind(
    client: openai.OpenAI, server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(descriptor: int, blocks: list[bytes], *, is_last: bool) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(upload_module, "write_blocks", no_room)
        with pytest.raises(openai.InternalServerError) as raised:
            client.files.create(file=("a", b"x" * 3 * MIB), purpose="batch")
    assert raised.value.status_code == 507 and raised.value.code == "insufficient_storage"
    assert not stored(server)
    assert client.files.create(file=("a", b"x"), purpose="batch").bytes == 1


def test_a_client_that_leaves_leaves_nothing_behind(server: BatchServer) -> None:
    def broken() -> Iterator[bytes]:
        body = multipart(8 * MIB)
        for _ in range(5):
            yield next(body)
        raise ConnectionAbortedError

    with pytest.raises(ConnectionAbortedError):
        httpx2.post(
            f"{server.url}/v1/files",
            content=broken(),
            headers={"Content-Type": "multipart/form-data; boundary=xyz"},
        )
    wait_until(lambda: not stored(server))
