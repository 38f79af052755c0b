"""Asks replicas about themselves: are they ready, and how many requests wait and run there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headrace.errors import HeadraceError
from headrace.scrape.page import finite, samples
from headrace.server.route.replica import Replica, Scraped
from headrace.server.route.upstream import LostError

SCRAPE_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 4 * 2**20

_WAITING = ("headrace:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING = ("headrace:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_CONFIG = "headrace:config_info"
_STARTED = "process_start_time_seconds"
_WANTED = (*_WAITING, *_RUNNING, _CONFIG, _STARTED)


class NotReadyError(HeadraceError):
    """The replica answers and takes no requests: it starts, drains, or its engine is restarted."""


async def scrape(replica: Replica, api_key: str | None = None) -> Scraped | None:
    """Raises if the replica is not reachable or not ready. None: it is, and has no /metrics for this key."""
    async with asyncio.timeout(SCRAPE_TIMEOUT_S):
        status, _ = await get(replica, b"/ready")
        if status == 404:  # vLLM and SGLang have /health
            status, _ = await get(replica, b"/health")
        if status >= 500:
            raise NotReadyError(f"it is not ready (status {status})")
        status, page = await get(
            replica, b"/metrics", b"authorization: Bearer %b\r\n" % api_key.encode() if api_key else b""
        )
    return read_page(page.decode(errors="replace")) if status == 200 else None


def read_page(text: str) -> Scraped:
    """The few series that the router needs; other lines, which are most, are not parsed."""
    lines = (line for line in text.split("\n") if line.startswith(_WANTED))
    found = finite(samples("\n".join(lines)))
    values: dict[str, float] = {}
    most: float | None = None
    for sample in found:
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
        if sample.name == _CONFIG:
            text_of = sample.labels.get("max_num_seqs", "")
            most = (most or 0.0) + float(text_of) if text_of.isdecimal() else most  # one sample for each engine
    return Scraped(
        num_waiting=_first(values, _WAITING),
        num_running=_first(values, _RUNNING),
        max_num_seqs=most,
        started_at=values.get(_STARTED),
    )


def _first(values: dict[str, float], names: Iterable[str]) -> float:
    return next((values[name] for name in names if name in values), 0.0)


async def get(replica: Replica, path: bytes, headers: bytes = b"") -> tuple[int, bytes]:
    """A small GET, on a connection of its own: a kept one may just be closed by the replica."""
    pool = replica.pool
    request = b"GET %b%b HTTP/1.1\r\nhost: %b\r\nuser-agent: headrace-route\r\nconnection: close\r\n" % (
        pool.path,
        path,
        pool.host_header,
    )
    connection = await pool.connect()
    try:
        head = await connection.ask(request + headers + b"\r\n")
        parts, length = [], 0
        while part := await connection.read():
            parts.append(part)
            length += len(part)
            if length > MAX_PAGE_BYTES:
                raise LostError(f"the page is longer than {MAX_PAGE_BYTES:,} bytes")
        return head.status, b"".join(parts)
    finally:
        connection.close()
