"""/v1/files: the files of the Batch API."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from headrace.openai.errors import bad_request
from headrace.server.batch.service import BatchService
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

PREFIX = "/v1/files/"
CONTENT = "/content"
MAX_LISTED = 10_000
MAX_QUERY_FIELDS = 32
MAX_DIGITS = 18  # of a number in a query: int() raises an error above 4,300
BLOCK_BYTES = 256 * 2**10


async def create_file(services: Services, exchange: Exchange) -> None:
    service, owner = batch_service(services), owner_of(exchange)
    timeout_s = services.options.read_timeout_s
    file = await service.upload(
        owner,
        content_type=exchange.header(b"content-type"),
        content_length=int(exchange.header(b"content-length") or 0),
        body=lambda limit: exchange.body_parts(limit=limit, timeout_s=timeout_s),
    )
    await reply(exchange, file.as_object())


async def list_files(services: Services, exchange: Exchange) -> None:
    service, given = batch_service(services), query(exchange)
    limit = limit_of(given, default=MAX_LISTED, most=MAX_LISTED)
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be 'asc' or 'desc', got {order!r}", "order")
    found = await asyncio.to_thread(
        service.store.files,
        owner_of(exchange),
        limit=limit + 1,
        after=given.get("after"),
        purpose=given.get("purpose"),
        newest_first=order == "desc",
    )
    await reply(exchange, as_list([file.as_object() for file in found], limit))


async def show_file(services: Services, exchange: Exchange) -> None:
    file = await batch_service(services).find_file(exchange.path.removeprefix(PREFIX), owner_of(exchange))
    await reply(exchange, file.as_object())


async def delete_file(services: Services, exchange: Exchange) -> None:
    file_id = exchange.path.removeprefix(PREFIX)
    await batch_service(services).delete_file(file_id, owner_of(exchange))
    await reply(exchange, {"id": file_id, "object": "file", "deleted": True})


async def show_content(services: Services, exchange: Exchange) -> None:
    service = batch_service(services)
    file = await service.find_file(exchange.path.removeprefix(PREFIX).removesuffix(CONTENT), owner_of(exchange))
    await _send_file(exchange, service.store.file_path(file.id))


async def _send_file(exchange: Exchange, path: Path) -> None:
    """In blocks, as fast as the client reads. A file that is deleted meanwhile stays readable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ApiError(404, "the file was deleted", code="not_found") from None
    try:
        num_bytes = os.fstat(descriptor).st_size
        headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(num_bytes).encode())]
        exchange.status = 200
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        sent = 0
        while sent < num_bytes:
            block = await asyncio.to_thread(os.pread, descriptor, min(BLOCK_BYTES, num_bytes - sent), sent)
            sent += len(block)
            await exchange.send({"type": "http.response.body", "body": block, "more_body": sent < num_bytes})
        if not num_bytes:
            await exchange.send({"type": "http.response.body", "body": b""})
    finally:
        os.close(descriptor)


# ---- shared with batches.py


def batch_service(services: Services) -> BatchService:
    if services.batches is None:
        raise ApiError(
            501,
            "the Batch API is off: start the server with --batch-dir DIR, where it keeps files and batches",
            code="batches_off",
        )
    return services.batches


def owner_of(exchange: Exchange) -> str:
    """The gate has checked the key. Without keys, everything belongs to everyone."""
    return str(exchange.scope.get("headrace", {}).get("owner", ""))


def query(exchange: Exchange) -> dict[str, str]:
    text = bytes(exchange.scope.get("query_string", b"")).decode("latin-1")
    try:
        given = parse_qs(text, max_num_fields=MAX_QUERY_FIELDS)
    except ValueError:
        raise bad_request(f"the query has more than {MAX_QUERY_FIELDS} fields") from None
    return {name: values[-1] for name, values in given.items()}


def limit_of(given: dict[str, str], *, default: int, most: int) -> int:
    text = given.get("limit", str(default))
    if not text.isdecimal() or len(text) > MAX_DIGITS or not 1 <= int(text) <= most:
        raise bad_request(f"limit must be between 1 and {most:,}, got {text[:20]!r}", "limit")
    return int(text)


def as_list(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's list. `objects` has one more than `limit` if there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


async def reply(exchange: Exchange, body: dict[str, Any]) -> None:
    await exchange.reply(200, msgspec.json.encode(body))
