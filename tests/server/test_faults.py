"""Connections that come, behave badly and leave change nothing."""

from __future__ import annotations

import asyncio
import os
import random

import psutil
from benchmarks.bad_clients import KINDS, misbehave

from headrace.server.admission import Admission, AdmissionLimits
from headrace.server.gate import Receive, Scope, Send
from headrace.server.options import ServerOptions
from tests.server.live import Live, run, until

NUM_CONNECTIONS = 1000


class ReservingApp:
    """Takes places in a queue as the routes do, and waits in between until its client leaves."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.num_seen = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body"})
            return
        self.num_seen += 1
        body = (await receive()).get("body", b"")
        with self.admission.reserve(1, num_body_bytes=len(body)) as reservation:
            reservation.count_tokens(len(body))
            if self.num_seen % 2:
                reservation.started()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass


def test_a_thousand_connections_that_misbehave_and_leave_change_nothing() -> None:
    async def body() -> None:
        admission = Admission(ServerOptions(), AdmissionLimits(10_000, 10_000_000))
        app = ReservingApp(admission)
        process = psutil.Process(os.getpid())
        async with Live(app, api_key="secret") as live:
            await misbehave(live.port, random.Random(7), len(KINDS) * 2)  # what is made once is made
            await until(lambda: live.lifecycle.num_connections == 0 and live.lifecycle.num_in_flight == 0)
            num_files, num_tasks = process.num_fds(), len(asyncio.all_tasks())
            done = await misbehave(live.port, random.Random(8), NUM_CONNECTIONS)
            assert sum(done.values()) == NUM_CONNECTIONS and set(done) == set(KINDS)
            await until(lambda: live.lifecycle.num_connections == 0 and live.lifecycle.num_in_flight == 0)
            assert process.num_fds() == num_files
            assert len(asyncio.all_tasks()) == num_tasks
            assert app.num_seen > 0
            assert (admission.num_waiting, admission.num_waiting_tokens, admission.num_running) == (0, 0, 0)
            assert (await live.get("/health")).status == 200

    run(body)
