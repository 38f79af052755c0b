"""Kinds of load: when each request of a workload is sent. Frozen, with a JSON form for records.

Closed loop: each of `concurrency` clients sends its next request when its last one has ended. Open loop: requests
arrive at a rate, whether or not the server keeps up. Trace: requests arrive at the times that the workload gives them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from headrace.bench.workloads import Workload
from headrace.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Ends after `num_requests` or when `seconds` have passed; with neither, after the workload's requests.

    After `seconds`, no request is sent, and those in flight are still answered.
    """

    kind: ClassVar[str] = "closed_loop"

    concurrency: int
    num_requests: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "concurrency", "num_requests", "seconds")

    def count(self, workload: Workload) -> int | None:
        """How many requests are sent; None if only the time limits them."""
        return _count(self, workload)

    def as_json(self) -> dict[str, Any]:
        return _as_json(self)

    def __str__(self) -> str:
        return f"closed loop, concurrency {self.concurrency}"


@dataclass(frozen=True, kw_only=True)
class OpenLoop:
    """Requests arrive at `rate` per second. With `max_concurrency`, a request may wait for others to end: its latency
    counts from when it was due."""

    kind: ClassVar[str] = "open_loop"

    rate: float  # requests/s; inf: all at once
    burstiness: float = 1.0  # shape of the gamma distribution of gaps: 1 is Poisson, less is bursty, inf is constant
    num_requests: int | None = None
    seconds: float | None = None
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "rate", "burstiness", "num_requests", "seconds", "max_concurrency")
        if math.isinf(self.rate) and self.seconds is not None and self.num_requests is None:
            raise ConfigError("an infinite rate needs a number of requests, not seconds")

    def due_times(self, workload: Workload) -> list[float]:
        """When each request is due, in seconds from the start. The first is due at once."""
        limit, rng = _count(self, workload), random.Random(self.seed)
        times, due = list[float](), 0.0
        while (limit is None or len(times) < limit) and (self.seconds is None or due < self.seconds):
            times.append(due)
            due += self._gap(rng)
        return times

    def _gap(self, rng: random.Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        if math.isinf(self.burstiness):
            return 1 / self.rate
        return rng.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))

    def as_json(self) -> dict[str, Any]:
        return _as_json(self)

    def __str__(self) -> str:
        arrivals = {1.0: "Poisson", math.inf: "constant"}.get(self.burstiness, f"burstiness {self.burstiness:g}")
        return f"open loop, {self.rate:g} requests/s, {arrivals}"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests arrive at the `due_s` of the workload, `speed` times as fast."""

    kind: ClassVar[str] = "trace"

    speed: float = 1.0
    num_requests: int | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self, "speed", "num_requests", "max_concurrency")
        if math.isinf(self.speed):
            raise ConfigError("speed of the load must be finite")

    def due_times(self, workload: Workload) -> list[float]:
        given = [request.due_s for request in workload.requests[: self.num_requests]]
        missing = sum(due is None for due in given)
        if missing:
            raise ConfigError(
                f"a trace needs the arrival time of each request: {missing:,} of {len(given):,} requests of workload "
                f"{workload.name!r} have none; use a concurrency or a rate"
            )
        if self.num_requests is not None and self.num_requests > len(given):
            raise ConfigError(f"the trace has {len(given):,} requests, {self.num_requests:,} were asked for")
        due_s = [due for due in given if due is not None]
        first = min(due_s, default=0.0)
        return [(due - first) / self.speed for due in due_s]

    def as_json(self) -> dict[str, Any]:
        return _as_json(self)

    def __str__(self) -> str:
        return "trace" if self.speed == 1 else f"trace at {self.speed:g} times its speed"


Load = ClosedLoop | OpenLoop | Trace
Kind = type[ClosedLoop] | type[OpenLoop] | type[Trace]
KINDS: dict[str, Kind] = {
    "closed_loop": ClosedLoop,
    "open_loop": OpenLoop,
    "trace": Trace,
}
# The value that decides the kind, and the values that go with it.
CHOOSERS: dict[str, Kind] = {"concurrency": ClosedLoop, "rate": OpenLoop, "speed": Trace}
INTEGERS = ("concurrency", "num_requests", "max_concurrency", "seed")


def parse_load(values: Mapping[str, Any]) -> Load:
    """A load from the values of flags: text or numbers, None if not given.

    `concurrency` makes a closed loop, `rate` an open loop, `speed` a trace.
    """
    given = {name: value for name, value in values.items() if value is not None}
    known = {field.name for kind in KINDS.values() for field in fields(kind)}
    for name in given:
        if name not in known:
            raise ConfigError(f"a load has no {name!r}{nearest(name, known)}")
    chosen = [name for name in CHOOSERS if name in given]
    if len(chosen) != 1:
        raise ConfigError(f"a load needs one of {', '.join(CHOOSERS)}, got {' and '.join(chosen) or 'none'}")
    kind = CHOOSERS[chosen[0]]
    allowed = {field.name for field in fields(kind)}
    for name in given:
        if name not in allowed:
            raise ConfigError(f"{name} does not go with {chosen[0]}; it belongs to another kind of load")
    return kind(**{name: _number(name, value) for name, value in given.items()})


def load_from_json(given: Mapping[str, Any]) -> Load:
    """The load of a record."""
    values = dict(given)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of load {kind!r} (known: {', '.join(KINDS)})")
    names = {field.name for field in fields(KINDS[kind])}
    for name in values:
        if name not in names:
            raise ConfigError(f"{kind} has no {name!r}{nearest(name, names)}")
    return KINDS[kind](**{name: _number(name, value) for name, value in values.items()})


def _number(name: str, value: Any) -> Any:
    number: Callable[[Any], float] = int if name in INTEGERS else float
    wanted = "a whole number" if name in INTEGERS else "a number"
    if isinstance(value, bool) or (name in INTEGERS and isinstance(value, float) and not value.is_integer()):
        raise ConfigError(f"{name} of a load must be {wanted}, got {value!r}")
    try:
        return number(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{name} of a load must be {wanted}, got {value!r}") from None


def _check_positive(load: Any, *names: str) -> None:
    for name in names:
        value = getattr(load, name)
        if value is not None and not value > 0:  # nan too
            raise ConfigError(f"{name} of a load must be above 0, got {value!r}")


def _count(load: ClosedLoop | OpenLoop, workload: Workload) -> int | None:
    if load.num_requests is None and load.seconds is None:
        return len(workload.requests)
    return load.num_requests


def _as_json(load: Any) -> dict[str, Any]:
    """Values that were given. JSON has no infinity: it is written as text, which `load_from_json` reads."""
    given = {name: value for name, value in asdict(load).items() if value is not None}
    finite = {name: "inf" if isinstance(v, float) and math.isinf(v) else v for name, v in given.items()}
    return {"kind": load.kind, **finite}
