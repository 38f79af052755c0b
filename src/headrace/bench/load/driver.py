"""The asyncio side of a load, in one process: clients or a schedule, idle connections, and a server that died.

    Plan     what this process has to send                Signals   what it shares with the other processes
    Driver   sends it, and returns a Part                 Part      what was seen, with times from the common start

A server counts as dead after MAX_UNREACHED requests in a row got not one byte while nothing else arrived from it
either. Then nothing more is sent, the rest counts as failed, and answers in flight have GRACE_S to end.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from time import monotonic, process_time
from typing import Any, Protocol

import msgspec

from headrace.bench.load.answer import REFUSED, Answer
from headrace.bench.load.connection import Connection
from headrace.bench.load.cost import LAG_INTERVAL_S
from headrace.bench.load.target import Target
from headrace.bench.outcomes import Outcome, Status

MAX_UNREACHED = 10
GRACE_S = 10.0
NOT_SENT = "not sent: the server could not be reached any more"

Clock = Callable[[], float]


class Signals(Protocol):
    """Shared by the processes of one load."""

    def take(self) -> int:
        """The next number of a closed loop, from 0 on, each to one client."""

    def is_stopped(self) -> bool:
        """Whether the user has interrupted the load."""

    def count(self, status: Status) -> None:
        """One more request has ended."""

    def tick(self) -> None:
        """Called every few milliseconds of the load."""


@dataclass(frozen=True)
class Plan:
    """What one process has to send: a closed loop with `concurrency` clients, or a schedule."""

    target: Target
    requests: Sequence[bytes]  # of the workload; number n of a load is request n modulo their count
    timeout_s: float
    concurrency: int | None = None  # closed loop: clients of this process; schedule: the limit, if there is one
    schedule: Sequence[tuple[int, float]] | None = None  # (number, due) of this process
    num_requests: int | None = None  # of a closed loop, over all processes
    seconds: float | None = None  # of a closed loop: when to stop sending


class Part(msgspec.Struct):
    """What one process saw."""

    outcomes: list[Outcome]
    end_s: float
    cpu_share: float
    lags_s: list[float]
    lates_s: list[float]
    num_cut: int = 0  # in flight when the load was interrupted
    num_without_usage: int = 0  # answers whose tokens were counted as chunks
    death: str | None = None  # the last error of a server that died
    has_reached: bool = False  # whether a byte ever came from the server


@dataclass
class Driver:
    """Owns the connections and outcomes of one process."""

    plan: Plan
    signals: Signals
    start_at: float  # of the clock; all times are seconds from here
    clock: Clock = monotonic
    _idle: list[Connection] = field(default_factory=list)
    _busy: set[Connection] = field(default_factory=set)
    _outcomes: list[Outcome] = field(default_factory=list)
    _lags_s: list[float] = field(default_factory=list)
    _lates_s: list[float] = field(default_factory=list)
    _num_in_flight: int = 0
    _num_without_usage: int = 0
    _last_bytes_at: float | None = None
    _num_unreached: int = 0
    _first_unreached_at: float = 0.0
    _death: str | None = None

    async def run(self) -> Part:
        self._tls = self.plan.target.tls()
        self._loop = asyncio.get_running_loop()
        while (wait := self.start_at - self.clock()) > 0:
            await asyncio.sleep(wait)
        cpu_s, begun_at = process_time(), self.clock()
        watch = asyncio.create_task(self._watch())
        sends = asyncio.create_task(self._clients() if self.plan.schedule is None else self._schedule())
        await asyncio.wait([watch, sends], return_when=asyncio.FIRST_COMPLETED)
        num_cut = 0 if sends.done() else self._num_in_flight
        end_at = self.clock()
        cpu_share = (process_time() - cpu_s) / max(1e-9, end_at - begun_at)
        sends.cancel()
        watch.cancel()
        results = await asyncio.gather(sends, watch, return_exceptions=True)
        for connection in itertools.chain(self._idle, self._busy):
            connection.close()
        await asyncio.sleep(0)  # lets closed connections say so
        for result in results:
            if isinstance(result, Exception):
                raise result
        return Part(
            outcomes=self._outcomes,
            end_s=end_at - self.start_at,
            cpu_share=cpu_share,
            lags_s=self._lags_s,
            lates_s=self._lates_s,
            num_cut=num_cut,
            num_without_usage=self._num_without_usage,
            death=self._death,
            has_reached=self._last_bytes_at is not None,
        )

    async def _watch(self) -> None:
        """Measure the event loop's lag, until the user interrupts the load."""
        while not self.signals.is_stopped():
            self.signals.tick()
            before = self.clock()
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lags_s.append(max(0.0, self.clock() - before - LAG_INTERVAL_S))

    async def _clients(self) -> None:
        assert self.plan.concurrency is not None
        await _all(self._client() for _ in range(self.plan.concurrency))
        if self._death is not None and self.plan.num_requests is not None:
            while (number := self.signals.take()) < self.plan.num_requests:
                self._not_sent(number)

    async def _client(self) -> None:
        plan = self.plan
        while self._death is None and (plan.seconds is None or self.clock() - self.start_at < plan.seconds):
            number = self.signals.take()
            if plan.num_requests is not None and number >= plan.num_requests:
                return
            await self._ask(number, self.clock())

    async def _schedule(self) -> None:
        assert self.plan.schedule is not None
        limit = None if self.plan.concurrency is None else asyncio.Semaphore(self.plan.concurrency)
        asks = set[asyncio.Task[None]]()

        async def ask(number: int, due_at: float) -> None:
            if limit is None:
                await self._ask(number, due_at)
                return
            async with limit:
                if self._death is not None:
                    self._not_sent(number)
                else:
                    await self._ask(number, due_at)

        try:
            for number, due_s in self.plan.schedule:
                due_at = self.start_at + due_s
                while (wait := due_at - self.clock()) > 0 and self._death is None:
                    await asyncio.sleep(min(wait, 1.0))
                if self._death is not None:
                    self._not_sent(number)
                    continue
                self._lates_s.append(self.clock() - due_at)
                task = asyncio.create_task(ask(number, due_at))
                asks.add(task)
                task.add_done_callback(asks.discard)
            await _all(asks)
        finally:
            for task in asks:
                task.cancel()

    async def _ask(self, number: int, due_at: float) -> None:
        """Send one request and note its outcome."""
        self._num_in_flight += 1
        try:
            answer, sent_at = Answer(), self.clock()
            request = self.plan.requests[number % len(self.plan.requests)]
            is_late = await self._exchange(request, answer, sent_at)
            self._note(number, due_at, sent_at, answer, is_late)
        finally:
            self._num_in_flight -= 1

    async def _exchange(self, request: bytes, answer: Answer, sent_at: float) -> bool:
        """Get an answer, or an error in it. Returns whether the time was over."""
        deadline = self._loop.time() + self.plan.timeout_s
        while True:
            is_reused = bool(self._idle)
            try:
                async with asyncio.timeout_at(deadline):
                    connection = self._idle.pop() if is_reused else await self._connect()
            except TimeoutError:
                answer.error = f"no connection within {self.plan.timeout_s:g} s"
                self._unreached(sent_at, answer.error)
                return True
            except OSError as error:
                answer.error = f"cannot connect to {self.plan.target}: {_reason(error)}"
                self._unreached(sent_at, answer.error)
                return False
            is_late = await self._answered(connection, request, answer, deadline)
            if answer.error is None or connection.num_bytes or is_late or not is_reused:
                break
            answer.error = None  # the server had closed an idle connection: a new one gets the same request
        if connection.is_reusable:
            self._idle.append(connection)
        if answer.error is not None and not connection.num_bytes:
            self._unreached(sent_at, answer.error)
        return is_late

    async def _connect(self) -> Connection:
        target = self.plan.target
        _, connection = await self._loop.create_connection(
            lambda: Connection(self.clock, self._note_bytes), target.host, target.port, ssl=self._tls
        )
        return connection

    async def _answered(self, connection: Connection, request: bytes, answer: Answer, deadline: float) -> bool:
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            connection.give_up(f"not answered within {self.plan.timeout_s:g} s")

        self._busy.add(connection)
        timer = self._loop.call_at(deadline, give_up)
        try:
            await connection.ask(request, answer)
        except asyncio.CancelledError:
            connection.close()
            raise
        finally:
            timer.cancel()
            self._busy.discard(connection)
        return is_late

    def _note(self, number: int, due_at: float, sent_at: float, answer: Answer, is_late: bool) -> None:
        num_output, start = answer.num_output_tokens, self.start_at
        if num_output is None:
            num_output = len(answer.chunk_at)
            self._num_without_usage += answer.error is None
        if answer.error is None and not num_output and not answer.has_finish_reason:
            answer.error = "the answer is empty"
        status = _status(answer, is_late)
        end_at = (answer.end_at if status == "ok" else None) or self.clock()
        outcome = Outcome(
            index=number,
            due_s=due_at - start,
            sent_s=sent_at - start,
            end_s=end_at - start,
            status=status,
            first_s=answer.chunk_at[0] - start if answer.chunk_at else None,
            num_prompt_tokens=answer.num_prompt_tokens or 0,
            num_output_tokens=num_output,
            num_cached_tokens=answer.num_cached_tokens,
            chunk_s=answer.chunk_at,  # made relative after the run
            http_status=answer.http_status,
            error=answer.error,
        )
        self._outcomes.append(outcome)
        self.signals.count(status)

    def _not_sent(self, number: int) -> None:
        now = self.clock() - self.start_at
        self._outcomes.append(Outcome(index=number, due_s=now, sent_s=now, end_s=now, status="failed", error=NOT_SENT))
        self.signals.count("failed")

    def _note_bytes(self, now: float) -> None:
        self._last_bytes_at = now

    def _unreached(self, sent_at: float, error: str) -> None:
        """A request got no byte. It counts against the server if nothing came from it meanwhile, for anybody."""
        last = self._last_bytes_at
        if last is not None and last >= sent_at:
            return
        if self._num_unreached and last is not None and last >= self._first_unreached_at:
            self._num_unreached = 0
        if not self._num_unreached:
            self._first_unreached_at = self.clock()
        self._num_unreached += 1
        if self._num_unreached >= MAX_UNREACHED and self._death is None:
            self._death = error
            self._loop.call_later(GRACE_S, self._give_up_rest)

    def _give_up_rest(self) -> None:
        for connection in list(self._busy):
            connection.give_up("given up: the server could not be reached any more")


async def _all(work: Any) -> None:
    """Wait for all; cancel all when cancelled, or when one has a bug."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _status(answer: Answer, is_late: bool) -> Status:
    if answer.error is None:
        return "ok"
    if is_late:
        return "timeout"
    return "refused" if answer.http_status in REFUSED else "failed"


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE may name its authority"
    if isinstance(error, socket.gaierror):
        return f"the host name is not known ({error.strerror})"
    return error.strerror or str(error) or type(error).__name__


def run_in_loop(work: Coroutine[Any, Any, Part]) -> Part:
    """Run on uvloop where it is installed: it costs half as much."""
    try:
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)
