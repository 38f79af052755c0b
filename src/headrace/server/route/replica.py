"""One server behind the router: its connections, its load and its health."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.server.route.health import Health
from headrace.server.route.upstream import Connection, LostError, Pool


@dataclass(slots=True)
class Scraped:
    """What the replica last said about itself."""

    num_waiting: float = 0.0
    num_running: float = 0.0
    max_num_seqs: float | None = None
    started_at: float | None = None  # of its process


class Visit:
    """A request at a replica: `begin` is called with the first byte of its answer."""

    def __init__(self, replica: Replica, is_stream: bool) -> None:
        self._replica = replica
        self._is_pending = is_stream
        replica.num_pending += is_stream

    def begin(self) -> None:
        self._replica.num_pending -= self._is_pending
        self._is_pending = False


class Replica:
    """Owned by the fleet. `number` is its bit in the table of prefixes; a restarted replica gets a new one."""

    def __init__(self, address: str, number: int) -> None:
        self.address = address
        self.name = urlsplit(address).netloc
        self.number = number
        self.pool = Pool(address)
        self.health = Health()
        self.scraped = Scraped()
        self.outcomes: Counter[str] = Counter()  # 2xx, 4xx, 5xx; lost: no answer; broken: lost in the middle of it
        self.num_in_flight = 0  # requests that this router has sent
        self.num_pending = 0  # of these, streams without a first byte
        self.is_probed = False  # one of them finds out whether the replica is well again
        self.busy_until = 0.0  # it has said Retry-After
        self.is_removed = False
        self.num_failed_scrapes = 0
        self._num_others = 0.0  # requests that others have sent, at the last scrape
        self._connections: set[Connection] = set()

    @property
    def load(self) -> float:
        """Requests that run or wait there: this router's, known exactly, and those of others, as of the last scrape."""
        return self.num_in_flight + self._num_others

    @property
    def num_requests(self) -> float:
        """Requests there, by its own count where there is one."""
        return max(self.load, self.scraped.num_waiting + self.scraped.num_running)

    def take_scrape(self, scraped: Scraped) -> bool:
        """Returns whether the replica has been restarted: its prefix cache is then empty."""
        before, self.scraped = self.scraped.started_at, scraped
        self._num_others = max(0.0, scraped.num_waiting + scraped.num_running - self.num_in_flight)
        return before is not None and scraped.started_at is not None and before != scraped.started_at

    @contextmanager
    def serving(self, *, is_probe: bool = False, is_stream: bool = False) -> Iterator[Visit]:
        """Count a request while it is there."""
        visit = Visit(self, is_stream)
        self.num_in_flight += 1
        self.is_probed = self.is_probed or is_probe
        try:
            yield visit
        finally:
            visit.begin()
            self.num_in_flight -= 1
            self.is_probed = self.is_probed and not is_probe

    @contextmanager
    def using(self, connection: Connection) -> Iterator[None]:
        """A connection, given back at the end; one whose answer is not complete is closed, which aborts the request."""
        self._connections.add(connection)
        try:
            yield
        finally:
            self._connections.discard(connection)
            self.pool.put_back(connection)

    def lose_waiting(self, why: str) -> None:
        """End the requests that have no byte of an answer yet; they are sent to other replicas."""
        for connection in list(self._connections):
            if not connection.has_begun:
                connection.fail(LostError(why))

    def lose_all(self, why: str) -> None:
        """End all requests; streams end with an error event."""
        for connection in list(self._connections):
            connection.fail(LostError(why))
