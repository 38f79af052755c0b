"""The load generator's own cost, and the limits beyond which figures measure the client and not the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.bench.summary import percentile

MAX_CPU_SHARE = 0.8  # of one core, by one client process: above it, events wait for the client
MAX_LAG_P99_MS = 10.0  # of the event loop: chunks get their time this much too late
MAX_SEND_LATE_P99_MS = 10.0  # requests of a schedule that leave this much after they are due
LAG_INTERVAL_S = 0.02  # between two looks at the event loop's lag; timers have a resolution of 1 ms


@dataclass(frozen=True)
class ClientCost:
    """What the client needed. `send_late_ms` is None for a closed loop, which has no schedule."""

    cpu_shares: list[float]  # of one core, by each client process
    loop_lag_ms: dict[str, float] | None
    send_late_ms: dict[str, float] | None
    flags: list[str]  # sentences, empty if the client did not disturb

    @classmethod
    def of(cls, cpu_shares: Sequence[float], lags_s: Sequence[float], lates_s: Sequence[float] | None) -> ClientCost:
        lag, late = spread_ms(lags_s), spread_ms(lates_s) if lates_s is not None else None
        return cls(list(cpu_shares), lag, late, flags_of(cpu_shares, lag, late))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def flags_of(
    cpu_shares: Sequence[float], loop_lag_ms: dict[str, float] | None, send_late_ms: dict[str, float] | None
) -> list[str]:
    flags = []
    busiest = max(cpu_shares, default=0.0)
    if busiest > MAX_CPU_SHARE:
        flags.append(
            f"a client process was {busiest:.0%} busy (limit {MAX_CPU_SHARE:.0%}): these figures measure the client; "
            "use more client processes"
        )
    if loop_lag_ms is not None and loop_lag_ms["p99"] > MAX_LAG_P99_MS:
        flags.append(
            f"the client's event loop was {loop_lag_ms['p99']:.0f} ms late (p99; limit {MAX_LAG_P99_MS:.0f} ms): "
            "latencies include it; the machine is busy, or the client needs more processes"
        )
    if send_late_ms is not None and send_late_ms["p99"] > MAX_SEND_LATE_P99_MS:
        flags.append(
            f"requests were sent {send_late_ms['p99']:.0f} ms after they were due (p99; limit "
            f"{MAX_SEND_LATE_P99_MS:.0f} ms): the client did not keep up with its schedule"
        )
    return flags


def spread_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(1e3 * each for each in seconds)
    if not ordered:
        return None
    return {"p50": percentile(ordered, 50), "p99": percentile(ordered, 99), "max": ordered[-1]}
