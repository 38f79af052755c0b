"""`BatchService`: what the endpoints of files and batches do, with their checks.

It runs on the event loop; the disk is used on threads beside it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from time import time
from typing import Any

from headrace.errors import HeadraceError
from headrace.jobs.files import is_no_room
from headrace.jobs.input.openai_lines import ENDPOINTS
from headrace.openai.errors import bad_request
from headrace.openai.schema.batches import BatchRequest
from headrace.server.batch.multipart import boundary_of
from headrace.server.batch.records import BATCH_ID, FILE_ID, PRIORITIES, WINDOW, Batch, StoredFile, new_id
from headrace.server.batch.runner import BatchRunner
from headrace.server.batch.store import BatchStore, QuotaError, StoreFullError, check_quota
from headrace.server.batch.upload import Upload
from headrace.server.http.errors import ApiError
from headrace.server.options import ServerOptions

WINDOW_S = 24 * 3600
FILE_LIFE_S = 30 * 24 * 3600
OUTPUT_LIVES_S = (3600, 2_592_000)  # that a client may ask for
MULTIPART_BYTES = 2**20  # of an upload beside its file, at most
MAX_UPLOADS = 16  # at once
MAX_METADATA = (16, 64, 512)  # pairs, characters of a key and of a value


class BatchService:
    """Owned by the server."""

    def __init__(
        self, store: BatchStore, runner: BatchRunner, options: ServerOptions, *, window_s: int = WINDOW_S
    ) -> None:
        self.store = store
        self.runner = runner
        self._options = options
        self._window_s = window_s
        self._num_uploads = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Go on with the batches of the directory, and stop at the end."""
        self.runner.start()
        try:
            yield
        finally:
            if self.runner.close():
                self.store.close()

    # ---- files

    async def upload(
        self,
        owner: str,
        *,
        content_type: bytes | None,
        content_length: int,
        body: Callable[[int], AsyncIterator[bytes]],
    ) -> StoredFile:
        """Receive a file. `body` is called with the maximum length of the body."""
        boundary = boundary_of(content_type)
        max_bytes = self._options.max_file_bytes
        if content_length > max_bytes + MULTIPART_BYTES:
            raise self._too_large()
        if self._num_uploads >= MAX_UPLOADS:
            raise ApiError(
                503, "too many uploads at once", type="overloaded_error", code="uploads", headers={"Retry-After": "1"}
            )
        self._num_uploads += 1
        try:
            with _errors_as_answers():
                await asyncio.to_thread(self._check_quota, owner, max(0, content_length - MULTIPART_BYTES))
                path = self.store.upload_path(new_id(""))
                with Upload(path, boundary, max_bytes=max_bytes, too_large=self._too_large) as upload:
                    await upload.receive(body(max_bytes + MULTIPART_BYTES))
                    return await asyncio.to_thread(self._store_upload, upload, owner)
        finally:
            self._num_uploads -= 1

    def _check_quota(self, owner: str, num_bytes: int) -> None:
        num_files, num_held = self.store.held_by(owner)
        check_quota(
            num_files + 1,
            num_held + num_bytes,
            max_files=self._options.max_files_per_key,
            max_bytes=self._options.max_file_bytes_per_key,
        )

    def _store_upload(self, upload: Upload, owner: str) -> StoredFile:
        purpose = upload.fields.get("purpose")
        if purpose != "batch":
            raise bad_request(f"purpose must be 'batch', got {purpose!r}", "purpose")
        if upload.filename is None:
            raise bad_request("the body has no file", "file")
        now = int(time())
        file = StoredFile(
            id=new_id(FILE_ID),
            owner=owner,
            num_bytes=upload.num_bytes,
            created_at=now,
            expires_at=now + _life_s(upload.fields),
            filename=upload.filename,
            purpose="batch",
        )
        self.store.add_file(
            file,
            upload.path,
            max_files=self._options.max_files_per_key,
            max_bytes=self._options.max_file_bytes_per_key,
        )
        return file

    def _too_large(self) -> ApiError:
        most = self._options.max_file_bytes
        return ApiError(413, f"the file is larger than {most:,} bytes", param="file", code="file_too_large")

    async def find_file(self, file_id: str, owner: str, *, param: str | None = None) -> StoredFile:
        file = await asyncio.to_thread(self.store.file, file_id, owner)
        if file is None:
            raise ApiError(404, f"there is no file {file_id[:80]!r}", param=param, code="not_found")
        return file

    async def delete_file(self, file_id: str, owner: str) -> None:
        await self.find_file(file_id, owner)
        with _errors_as_answers():
            await asyncio.to_thread(self.store.delete_file, file_id, owner)

    # ---- batches

    async def create_batch(self, request: BatchRequest, owner: str) -> Batch:
        _check_request(request)
        file = await self.find_file(request.input_file_id, owner, param="input_file_id")
        if file.purpose != "batch":
            raise bad_request(f"the file's purpose must be 'batch', it is {file.purpose!r}", "input_file_id")
        now, expiry = int(time()), request.output_expires_after
        batch = Batch(
            id=new_id(BATCH_ID),
            owner=owner,
            endpoint=request.endpoint,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + self._window_s,
            metadata=request.metadata,
            output_expires_after_s=None if expiry is None else expiry.seconds,
            priority=request.priority,
        )
        with _errors_as_answers():
            try:
                await asyncio.to_thread(self.store.add_batch, batch, max_unfinished=self._options.max_batches_per_key)
            except FileNotFoundError:  # deleted just now
                raise ApiError(404, "the file was deleted", param="input_file_id", code="not_found") from None
        self.runner.wake()
        return batch

    async def find_batch(self, batch_id: str, owner: str) -> Batch:
        batch = await asyncio.to_thread(self.store.batch, batch_id, owner)
        if batch is None:
            raise ApiError(404, f"there is no batch {batch_id[:80]!r}", code="not_found")
        return batch

    async def cancel_batch(self, batch_id: str, owner: str) -> Batch:
        batch = await self.find_batch(batch_id, owner)
        with _errors_as_answers():
            moved = await asyncio.to_thread(
                self.store.move, batch_id, "cancelling", since=("validating", "in_progress")
            )
        if moved is None:
            batch = await self.find_batch(batch_id, owner)
            if batch.status != "cancelling":
                raise ApiError(409, f"a batch that is {batch.status} cannot be cancelled", code="batch_not_cancellable")
            return batch
        await asyncio.to_thread(self.runner.cancel, batch_id)
        return moved

    def shown(self, batch: Batch) -> dict[str, Any]:
        """OpenAI's object, with the counts of this moment."""
        return batch.as_object(counts=self.runner.counts_now(batch))


def _check_request(request: BatchRequest) -> None:
    if request.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint must be one of {', '.join(ENDPOINTS)}, got {request.endpoint!r}", "endpoint")
    if request.completion_window != WINDOW:
        raise bad_request(
            f"completion_window must be {WINDOW!r}, got {request.completion_window!r}", "completion_window"
        )
    max_pairs, max_key, max_value = MAX_METADATA
    metadata = request.metadata or {}
    if len(metadata) > max_pairs or any(len(k) > max_key or len(v) > max_value for k, v in metadata.items()):
        raise bad_request(
            f"metadata may have {max_pairs} pairs, keys of {max_key} and values of {max_value} characters", "metadata"
        )
    first, last = PRIORITIES
    if not first <= request.priority <= last:
        raise bad_request(f"priority must be between {first} and {last:,}, got {request.priority}", "priority")
    expiry = request.output_expires_after
    if expiry is not None:
        _check_life(expiry.anchor, expiry.seconds, "output_expires_after")


def _check_life(anchor: str | None, seconds: int, param: str) -> None:
    least, most = OUTPUT_LIVES_S
    if anchor != "created_at" or not least <= seconds <= most:
        raise bad_request(f"{param} needs anchor 'created_at' and seconds between {least:,} and {most:,}", param)


def _life_s(fields: dict[str, str]) -> int:
    """From the fields of an upload: expires_after[anchor] and expires_after[seconds]."""
    text = fields.get("expires_after[seconds]")
    if text is None:
        return FILE_LIFE_S
    _check_life(fields.get("expires_after[anchor]"), int(text) if text.isdecimal() else 0, "expires_after")
    return int(text)


@contextmanager
def _errors_as_answers() -> Iterator[None]:
    try:
        yield
    except StoreFullError as error:
        raise _full(str(error)) from error
    except QuotaError as error:
        raise ApiError(
            429, str(error), type="insufficient_quota", code="quota_exceeded", headers={"x-should-retry": "false"}
        ) from error
    except HeadraceError:
        raise
    except OSError as error:
        if is_no_room(error):
            raise _full("there is no room on the disk of the batch directory") from error
        raise ApiError(500, "the batch directory cannot be used; the server's log says more", code="storage") from error


def _full(message: str) -> ApiError:
    return ApiError(507, message, type="server_error", code="insufficient_storage")
