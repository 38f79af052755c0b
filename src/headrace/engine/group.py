"""`EngineGroup`: several engines behind one front, each in a process of its own (data parallelism).

    AsyncEngine ─▶ EngineGroup ┬─▶ Member 0 ─▶ EngineSupervisor ─▶ process 0     its share of cores, memory and GPUs
                               └─▶ Member 1 ─▶ EngineSupervisor ─▶ process 1
    AsyncEngine ◀─ events, and the members that were lost, on the threads of the members

A request runs on one member, chosen by prefix and load as a router chooses a server (`balance/choice.py`). A member
that dies costs its own requests only; it is restarted while the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol

from headrace.balance.choice import Candidate, choose
from headrace.balance.prefix_table import MAX_ENTRIES, PrefixTable, chunk_hashes
from headrace.config import MAX_ENGINES, EngineConfig
from headrace.engine.client import Client, Deliver
from headrace.engine.core import EngineStats
from headrace.engine.joined_stats import summed_stats
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.process.supervisor import EngineSupervisor, Phase, phase_of
from headrace.engine.process.wire import Ready
from headrace.engine.profiler import ProfileOptions
from headrace.engine.settings import Choice, Settings
from headrace.engine.shares import EngineShare
from headrace.errors import ConfigError, EngineDeadError, HeadraceError
from headrace.types import Request, SequenceEvent

MAX_BLOCKS = 512  # of a prompt that are looked up; two prompts that agree in 8,192 tokens share their engine anyway
TOKEN_BYTES = 4

OnLost = Callable[[int, BaseException], None]  # the number of a member that has died, and why


class ProcessClient(Client, Protocol):
    """An engine in a process: `EngineProcess` or `EngineSupervisor`."""

    @property
    def pid(self) -> int | None: ...

    def start(self, config: EngineConfig) -> None: ...

    def wait_until_ready(self) -> Ready: ...


StartClient = Callable[[int, EngineShare, Deliver], ProcessClient]  # the number of the member, its share


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine at one moment."""

    phase: Phase
    num_restarts: int
    pid: int | None  # None: it runs on a thread
    stats: EngineStats | None  # None: it does not respond
    settings: Settings
    config: EngineConfig | None = None  # its share of the user's; None: all of it

    @classmethod
    def of(cls, client: Client, settings: Settings, config: EngineConfig | None = None) -> EngineState:
        phase = phase_of(client)
        return cls(
            phase=phase,
            num_restarts=client.num_restarts if isinstance(client, EngineSupervisor) else 0,
            pid=client.pid if isinstance(client, (EngineProcess, EngineSupervisor)) else None,
            stats=client.stats if phase == "ready" else None,
            settings=settings,
            config=config,
        )


class Member:
    """One engine of a group. The front's thread owns `load`; an engine's thread only takes requests from `pending`."""

    def __init__(
        self, number: int, share: EngineShare, start: StartClient, *, deliver: Deliver, on_lost: OnLost
    ) -> None:
        self.number = number
        self.share = share
        self.load = 0  # sequences that run or wait there
        self.pending: set[str] = set()  # requests without a first event
        self.num_losses = 0  # how often its prefix cache was lost with its process
        self._deliver = deliver
        self._on_lost = on_lost
        self.client = start(number, share, self._take)

    @property
    def phase(self) -> Phase:
        return phase_of(self.client)

    def _take(self, events: list[SequenceEvent]) -> None:
        """Called on the engine's thread."""
        if not events:
            self.num_losses += 1
            self._on_lost(self.number, self.client.failure or EngineDeadError("it has stopped"))
            return
        for event in events:
            if event.timing is not None:  # the first or the last of a sequence
                self.pending.discard(event.request_id)
        self._deliver(events)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a request runs."""

    member: Member
    num_sequences: int


class EngineGroup:
    """An engine client (`engine/client.Client`) over all members. Requests are submitted, aborted and released on one
    thread, the front's."""

    def __init__(self, shares: Sequence[EngineShare], start: StartClient, deliver: Deliver, on_lost: OnLost) -> None:
        self.members = tuple(
            Member(number, share, start, deliver=deliver, on_lost=on_lost) for number, share in enumerate(shares)
        )
        self.settings: tuple[Settings, ...] = ()  # of each member, once all are ready
        self._places: dict[str, _Place] = {}
        self._table = PrefixTable()
        self._turn = 0
        self._profiled = self.members[0]

    # ---- start

    def start(self) -> None:
        for member in self.members:
            member.client.start(member.share.config)

    def wait_until_ready(self) -> Settings:
        """Returns what a front needs to know of all members: the settings of the first, and the shortest context."""
        self.settings = tuple(
            member.share.explained(member.client.wait_until_ready().settings) for member in self.members
        )
        self._table = PrefixTable(min(MAX_ENTRIES, sum(settings.num_blocks for settings in self.settings)))
        first = self.settings[0]
        number = Choice("data_parallel_size", str(len(self.members)), "engines in processes of their own, as set")
        return replace(
            first,
            max_model_len=min(settings.max_model_len for settings in self.settings),
            choices=(number, *first.choices),
        )

    # ---- requests, on the front's thread

    def submit(self, request: Request) -> None:
        """Submit to the best member. One that dies at this moment is passed over."""
        hashes = self._hashes(request)
        ready = [member for member in self.members if member.phase == "ready"]
        while len(ready) > 1:
            member = self._choose(ready, hashes)
            try:
                return self._submit_to(member, request, hashes)
            except EngineDeadError:
                ready.remove(member)
        self._submit_to(ready[0] if ready else self._next_to_return(), request, hashes)

    def _submit_to(self, member: Member, request: Request, hashes: Sequence[int]) -> None:
        member.pending.add(request.request_id)  # before its first event can arrive
        try:
            member.client.submit(request)
        except BaseException:
            member.pending.discard(request.request_id)
            raise
        self._places[request.request_id] = _Place(member, request.params.num_sequences)
        member.load += request.params.num_sequences
        self._table.record(hashes, self._holder(member), live=sum(1 << self._holder(each) for each in self.members))

    def release(self, request_id: str) -> None:
        """The front has no more use for the request: it has ended, or was aborted."""
        place = self._places.pop(request_id, None)
        if place is not None:
            place.member.load -= place.num_sequences
            place.member.pending.discard(request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        place = self._places.get(request_id)
        if place is not None:
            place.member.client.abort(request_id, index)

    def place_of(self, request_id: str) -> int | None:
        """The number of the member that runs the request."""
        place = self._places.get(request_id)
        return None if place is None else place.member.number

    def requests_at(self, number: int) -> list[str]:
        return [request_id for request_id, place in self._places.items() if place.member.number == number]

    def _choose(self, ready: Sequence[Member], hashes: Sequence[int]) -> Member:
        matched = self._table.matched(hashes, [self._holder(member) for member in ready])
        candidates = [
            Candidate(member.load, len(member.pending), num_matched=num)
            for member, num in zip(ready, matched, strict=True)
        ]
        self._turn += 1
        return ready[choose(candidates, len(hashes), turn=self._turn).index]

    def _hashes(self, request: Request) -> list[int]:
        """Of the prompt's blocks. Requests with different salts share no prefix, as in the engine."""
        settings = self.settings[0]
        if not (settings.enable_prefix_caching or request.shares_blocks):
            return []
        data, size = request.prompt_token_ids[: MAX_BLOCKS * settings.block_size].tobytes(), settings.block_size
        return chunk_hashes(
            data, hash((request.cache_salt, request.adapter)), chunk_bytes=TOKEN_BYTES * size, max_chunks=MAX_BLOCKS
        )

    def _holder(self, member: Member) -> int:
        """The member's number in the table of prefixes. After a restart it is another one: its cache is empty."""
        return member.number + len(self.members) * member.num_losses

    def _next_to_return(self) -> Member:
        """Of members that all refuse requests now, one whose refusal says when to try again, if there is one."""
        return next((member for member in self.members if member.phase == "restarting"), self.members[0])

    # ---- all members

    @property
    def stats(self) -> EngineStats:
        return summed_stats([member.client.stats for member in self.members])

    @property
    def failure(self) -> BaseException | None:
        """None while any member accepts requests."""
        failures = [member.client.failure for member in self.members]
        return None if None in failures else failures[0]

    @property
    def phase(self) -> Phase:
        """The best of the members' phases."""
        phases = {member.phase for member in self.members}
        best: tuple[Phase, ...] = ("ready", "starting", "restarting", "asleep")
        return next((phase for phase in best if phase in phases), "dead")

    @property
    def states(self) -> list[EngineState]:
        return [
            EngineState.of(member.client, settings, member.share.config)
            for member, settings in zip(self.members, self.settings, strict=True)
        ]

    def limit_running(self, num_seqs: int | None) -> None:
        """Divide the limit over the members."""
        for member in self.members:
            member.client.limit_running(None if num_seqs is None else -(-num_seqs // len(self.members)))

    def forget_prefixes(self) -> None:
        self._table.clear()
        for member in self.members:
            if member.client.failure is None:
                member.client.forget_prefixes()

    def profile_next(self, engine: int) -> None:
        """Choose the member for the next profile."""
        self._profiled = self.members[engine]

    def start_profile(self, options: ProfileOptions) -> Future[dict[str, Any]]:
        return self._profiled.client.start_profile(options)

    def stop_profile(self) -> Future[dict[str, Any]]:
        return self._profiled.client.stop_profile()

    def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> Future[None]:
        """Load it in all engines, or in none."""
        loading = [_asked(partial(m.client.load_adapter, name, path, replaces=replaces)) for m in self.members]

        def undo() -> None:
            for member, each in zip(self.members, loading, strict=True):
                if each.exception() is None:
                    member.client.unload_adapter(name)

        return _all_of(loading, on_failure=undo)

    def unload_adapter(self, name: str) -> Future[None]:
        return _all_of([_asked(partial(m.client.unload_adapter, name)) for m in self.members])

    def close(self) -> None:
        with ThreadPoolExecutor(len(self.members), "headrace-close") as executor:
            list(executor.map(lambda member: member.client.close(), self.members))


def _asked(ask: Callable[[], Future[None]]) -> Future[None]:
    """The answer of an engine, also if it refuses at once."""
    try:
        return ask()
    except HeadraceError as error:
        refused: Future[None] = Future()
        refused.set_exception(error)
        return refused


def _all_of(each: Sequence[Future[None]], on_failure: Callable[[], None] = lambda: None) -> Future[None]:
    """Done when all are; fails with the first failure among them."""
    joined: Future[None] = Future()
    left = count(len(each) - 1, -1)

    def take(done: Future[None]) -> None:
        if next(left):
            return
        failure = next((error for one in each if (error := one.exception()) is not None), None)
        if failure is None:
            joined.set_result(None)
        else:
            on_failure()
            joined.set_exception(failure)

    for one in each:
        one.add_done_callback(take)
    return joined


def check_data_parallel_size(size: int, *, own_process: bool) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_ENGINES:
        raise ConfigError(f"data_parallel_size must be an integer from 1 to {MAX_ENGINES}, got {size!r}")
    if size > 1 and not own_process:
        raise ConfigError(f"{size} engines run in processes of their own; add own_process=True")
