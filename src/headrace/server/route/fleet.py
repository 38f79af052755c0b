"""All replicas: who gets a request, who is taken out, who comes and goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic

from headrace.balance.choice import Candidate, Choice, Policy, Reason, choose, choose_in_turn
from headrace.balance.prefix_table import PrefixTable
from headrace.errors import HeadraceError
from headrace.server.route.desired import DEFAULT_TARGET, TARGET_USE, DesiredReplicas
from headrace.server.route.health import DRAIN_BELOW, State, score_of
from headrace.server.route.replica import Replica, Scraped
from headrace.server.route.scraping import NotReadyError, scrape
from headrace.server.route.sources import Sources
from headrace.server.route.upstream import NoConnectionError

SCRAPE_INTERVAL_S = 1.0
MAX_FAILED_SCRAPES = 3  # then the requests that wait there are sent to others
MAX_BUSY_S = 5.0  # a Retry-After counts as at most this long
MIN_SHARE_UP = 0.5  # of the replicas; more are not taken out for their score: errors everywhere have another cause

PrintLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pick:
    replica: Replica
    reason: Reason
    is_probe: bool  # the only request that this replica gets for now


class Fleet:
    """Owns the replicas. All calls are on the event loop."""

    def __init__(
        self,
        sources: Sources,
        *,
        policy: Policy = "prefix",
        target_requests: float | None = None,
        least_replicas: int = 1,
        most_replicas: int = 1_000,
        api_key: str | None = None,
        print_line: PrintLine,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sources = sources
        self._policy = policy
        self._target_requests = target_requests
        self._api_key = api_key
        self._print_line = print_line
        self.clock = clock
        self.replicas: list[Replica] = []
        self.table = PrefixTable()
        self.desired = DesiredReplicas(least=least_replicas, most=most_replicas)
        self.choices: Counter[Reason] = Counter()
        self.num_chunks = 0  # of all prompts
        self.num_matched = 0  # of these, sent to a replica that had got them before
        self.num_retries: Counter[str] = Counter()
        self.is_closed = False  # no further request is sent
        self._turn = 0
        self._next_number = 0
        self._problem: str | None = None
        self._scrapes: set[asyncio.Task[None]] = set()

    # ---- replicas come and go

    async def refresh(self) -> None:
        """Take in the addresses of this moment. A replica that is no longer named finishes its requests."""
        problem = self._sources.reload()
        if problem is not None and problem != self._problem:
            self._print_line(f"keeping the old replicas: {problem}")
        self._problem = problem
        wanted = await self._sources.addresses()
        known = {replica.address: replica for replica in self.replicas}
        for address in wanted:
            if address not in known:
                self.replicas.append(Replica(address, self._new_number()))
                self._print_line(f"replica {self.replicas[-1].name} added")
        for replica in self.replicas:
            if replica.address not in wanted:
                replica.is_removed = True
                replica.pool.close()
                self._print_line(f"replica {replica.name} removed; {replica.num_in_flight} requests may finish there")
        self.replicas = [replica for replica in self.replicas if not replica.is_removed]

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    @property
    def _live_numbers(self) -> int:
        return sum(1 << replica.number for replica in self.replicas)

    # ---- choosing

    def pick(self, hashes: Sequence[int], tried: set[Replica]) -> Pick | None:
        """A replica for a request that these have not answered; None if there is no other."""
        now = self.clock()
        left = [replica for replica in self.replicas if replica not in tried and not self.is_closed]
        for replica in left:
            if self.state(replica, now) == "probing" and not replica.is_probed:
                return Pick(replica, "load", is_probe=True)
        up = [replica for replica in left if self.state(replica, now) == "up"]
        free = [replica for replica in up if replica.busy_until <= now] or up
        free = free or [replica for replica in left if replica.health.is_ready]  # better a bad one than none
        if not free:
            return None
        matched = self.table.matched(hashes, [replica.number for replica in free])
        choice = self._choose(free, matched, len(hashes), now)
        replica = free[choice.index]
        self._turn += 1
        if not tried:
            self.choices[choice.reason] += 1
            self.num_chunks += len(hashes)
            self.num_matched += matched[choice.index]
        self.table.record(hashes, replica.number, live=self._live_numbers)
        return Pick(replica, choice.reason, is_probe=False)

    def _choose(self, free: Sequence[Replica], matched: Sequence[int], num_chunks: int, now: float) -> Choice:
        if self._policy == "round-robin":
            return choose_in_turn(len(free), self._turn)
        candidates = [
            Candidate(replica.load, replica.num_pending, self.score(replica, now), num)
            for replica, num in zip(free, matched, strict=True)
        ]
        return choose(candidates, num_chunks, turn=self._turn)

    # ---- health

    def state(self, replica: Replica, now: float | None = None) -> State:
        return replica.health.state(self.clock() if now is None else now)

    def score(self, replica: Replica, now: float | None = None) -> float:
        """Against the median of the other replicas."""
        others = [each for each in self.replicas if each is not replica]
        own_s = replica.health.first_byte_s
        times = [each.health.first_byte_s for each in others if each.health.first_byte_s]
        queues = [each.scraped.num_waiting for each in others]
        return score_of(
            replica.health.error_share(self.clock() if now is None else now),
            own_s / median(times) if own_s and times else 0.0,
            (1 + replica.scraped.num_waiting) / (1 + median(queues)) if queues else 0.0,
        )

    def answered(self, replica: Replica, first_byte_s: float | None = None) -> None:
        was_up = self.state(replica) == "up"
        replica.health.answered(self.clock(), first_byte_s)
        if not was_up and self.state(replica) == "up":
            self._print_line(f"replica {replica.name} is back")

    def failed(self, replica: Replica, why: str) -> None:
        """A request that the replica lost, or answered with an error of its own."""
        replica.health.failed(self.clock(), why)
        self._drain_if_bad(replica)

    def unreachable(self, replica: Replica, why: str) -> None:
        """No connection: whatever the other replicas do, this one gets nothing."""
        self._take_out(replica, why)

    def busy(self, replica: Replica, retry_after_s: float) -> None:
        """The replica has refused a request for now. That is load, not an error."""
        replica.busy_until = self.clock() + min(max(retry_after_s, 0.0), MAX_BUSY_S)

    def judge(self) -> None:
        """Take out replicas with a bad score, the worst first. Called when all scrapes of a round are in: a queue must
        not be compared with those of a second ago."""
        for replica in sorted(self.replicas, key=self.score):
            self._drain_if_bad(replica)

    def _drain_if_bad(self, replica: Replica) -> None:
        now = self.clock()
        score = self.score(replica, now)
        if score >= DRAIN_BELOW or self.state(replica, now) != "up":
            return
        num_up = sum(self.state(each, now) == "up" for each in self.replicas)
        if num_up - 1 >= max(1.0, MIN_SHARE_UP * len(self.replicas)):
            self._take_out(replica, f"its score is {score:.2f}")

    def _take_out(self, replica: Replica, why: str) -> None:
        was_out = self.state(replica) == "out"
        replica.health.take_out(self.clock(), why)
        if not was_out:
            self._print_line(f"replica {replica.name} is out: {why}")

    # ---- scraping

    async def watch(self, interval_s: float = SCRAPE_INTERVAL_S) -> None:
        """Scrape all replicas again and again."""
        while True:
            await self.refresh()
            for replica in self.replicas:
                task = asyncio.create_task(self.scrape(replica))
                self._scrapes.add(task)
                task.add_done_callback(self._scrapes.discard)
            await asyncio.sleep(interval_s)
            self.judge()
            self.observe_demand()

    @property
    def is_scraping(self) -> bool:
        return bool(self._scrapes)

    async def scrape(self, replica: Replica) -> None:
        try:
            scraped = await scrape(replica, self._api_key)
        except NotReadyError as error:
            replica.health.set_ready(False, str(error))
        except NoConnectionError as error:
            replica.health.set_ready(False, str(error))
        except (HeadraceError, TimeoutError, OSError) as error:
            self._scrape_failed(replica, str(error) or "it does not answer in time")
        else:
            self._take_scrape(replica, scraped)

    def _scrape_failed(self, replica: Replica, why: str) -> None:
        replica.num_failed_scrapes += 1
        if replica.num_failed_scrapes == MAX_FAILED_SCRAPES:
            replica.health.set_ready(False, why)
            self._print_line(f"replica {replica.name} is out: {MAX_FAILED_SCRAPES} scrapes failed: {why}")
            replica.lose_waiting(why)

    def _take_scrape(self, replica: Replica, scraped: Scraped | None) -> None:
        replica.num_failed_scrapes = 0
        replica.health.set_ready(True)
        if scraped is not None and replica.take_scrape(scraped):
            replica.number = self._new_number()  # what the table knows is about the old process

    # ---- the number of replicas that the load needs

    def observe_demand(self) -> None:
        num_requests = sum(replica.num_requests for replica in self.replicas)
        self.desired.observe(self.clock(), num_requests, self.target)

    @property
    def target(self) -> float:
        """Requests per replica: as set, or from what the replicas can run at once."""
        if self._target_requests is not None:
            return self._target_requests
        known = [replica.scraped.max_num_seqs for replica in self.replicas if replica.scraped.max_num_seqs]
        return TARGET_USE * min(known) if known else DEFAULT_TARGET
