"""What is measured. batch: output tokens/s of all requests at once, the slow end of the run included. serve: goodput at
the highest load that meets the SLO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from headrace.bench.compare import flat_figures
from headrace.bench.engines import RunningEngine
from headrace.bench.levels import figures_of
from headrace.bench.load import ClosedLoop
from headrace.bench.offline import round_of, warm_up_of
from headrace.bench.online import Client, measure_online
from headrace.bench.slo import Slo
from headrace.bench.values import found
from headrace.bench.workloads import Workload
from headrace.errors import HeadraceError

FIRST_CONCURRENCY, MAX_CONCURRENCY = 8, 1024
MIN_GAIN = 1.03  # of goodput, for a higher load to be worth another one
MIN_LEVEL_REQUESTS, REQUESTS_PER_CLIENT = 32, 3
MIN_LEVEL_S = 2.0  # of a load level, if the workload has enough requests: shorter ones are mostly start and end
FRESH_WARM_UP_SHARE, WARM_UP_SHARE, MAX_WARM_UP = 4, 8, 16  # one request in so many of the round; at most


class SloMissedError(HeadraceError):
    """No load level meets the SLO."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The value that is to be large, and what else was seen."""

    value: float
    figures: Mapping[str, float]
    num_requests: int
    load: Mapping[str, Any] | None = None
    levels: Sequence[Mapping[str, Any]] | None = None
    level: int | None = None  # concurrency at which the value was seen


class Goal(ABC):
    name: str
    figure: str
    serves: bool
    slo: Slo | None

    @abstractmethod
    def warm_up(self, engine: RunningEngine, workload: Workload, *, is_fresh: bool) -> None:
        """Let the engine compile what it compiles at first use. `is_fresh`: it was just started."""

    @abstractmethod
    def measure(self, engine: RunningEngine, workload: Workload, level: int | None) -> Measurement:
        """One measurement. `level` is the load at which other configs were best."""


class BatchGoal(Goal):
    name, figure, serves, slo = "batch", "output_tokens_per_s", False, None

    def warm_up(self, engine: RunningEngine, workload: Workload, *, is_fresh: bool) -> None:
        num_requests = len(workload.requests)
        count = num_requests // FRESH_WARM_UP_SHARE if is_fresh else min(MAX_WARM_UP, num_requests // WARM_UP_SHARE)
        engine.run_offline(warm_up_of(workload.first(max(1, count))))

    def measure(self, engine: RunningEngine, workload: Workload, level: int | None) -> Measurement:
        engine.reset_prefix_cache()
        figures = round_of(engine.run_offline(workload), workload)
        flat = flat_figures({**figures, **figures["counters"]})
        if "num_steps" in flat:  # each step gives a running sequence one token
            flat["sequence_tokens_per_s"] = flat["num_steps"] / figures["seconds"]
        return Measurement(figures["output_tokens_per_s"], flat, len(workload.requests))


class ServeGoal(Goal):
    """Probes the level at which others were best, doubles or halves it, and bisects once."""

    name, figure, serves = "serve", "goodput_requests_per_s", True

    def __init__(self, slo: Slo, client: Client | None = None, max_concurrency: int = MAX_CONCURRENCY) -> None:
        self.slo: Slo = slo
        self.client = client or Client()
        self.max_concurrency = max_concurrency

    def warm_up(self, engine: RunningEngine, workload: Workload, *, is_fresh: bool) -> None:
        """The first level of a measurement does it."""

    def measure(self, engine: RunningEngine, workload: Workload, level: int | None) -> Measurement:
        levels: dict[int, dict[str, Any]] = {}

        def pays(concurrency: int) -> bool:
            """Whether the SLO is met, with more goodput than at lower levels: a server that is full only queues."""
            if concurrency not in levels:
                levels[concurrency] = self._level(engine, workload, concurrency, is_first=not levels)
            lower = max((_goodput(each) for level, each in levels.items() if level < concurrency), default=0.0)
            return self._is_met(levels[concurrency]) and _goodput(levels[concurrency]) > MIN_GAIN * lower

        search_level(pays, start=level or FIRST_CONCURRENCY, maximum=self.max_concurrency)
        met = [concurrency for concurrency, each in levels.items() if self._is_met(each)]
        if not met:
            lowest = levels[min(levels)]
            raise SloMissedError(
                f"the SLO {self.slo.text!r} is missed with {min(levels)} concurrent: {_shares(lowest)}"
            )
        best = max(met, key=lambda concurrency: _goodput(levels[concurrency]))
        return Measurement(
            _goodput(levels[best]),
            flat_figures(figures_of(levels[best])),
            sum(int(each["summary"]["num_requests"]) for each in levels.values()),
            load=levels[best]["load"],
            levels=[
                {"load": each["load"], "figures": flat_figures(figures_of(each)), "verdict": _verdict(each)}
                for _, each in sorted(levels.items())
            ],
            level=best,
        )

    def _is_met(self, level: Mapping[str, Any]) -> bool:
        """A level has too few requests to be certain of a high percentile: what was seen must meet the objective."""
        wanted = [condition.share for condition in self.slo.conditions]
        wanted += [] if self.slo.success is None else [self.slo.success]
        seen = [each["share"] for each in found(level, "summary", "slo", "conditions") or []]
        return all(share >= each for share, each in zip(seen, wanted, strict=True))

    def _level(self, engine: RunningEngine, workload: Workload, concurrency: int, *, is_first: bool) -> dict[str, Any]:
        """A level that a fast server answers at once is measured again, with more requests."""
        count = max(MIN_LEVEL_REQUESTS, REQUESTS_PER_CLIENT * concurrency)
        level = self._run(engine, workload, ClosedLoop(concurrency=concurrency, num_requests=count), warms_up=is_first)
        longer = self._longer(level, workload, count)
        if longer is None:
            return level
        return self._run(engine, workload, ClosedLoop(concurrency=concurrency, num_requests=longer), warms_up=False)

    def _longer(self, level: Mapping[str, Any], workload: Workload, count: int) -> int | None:
        """How many requests last long enough; None: these did. A request that is sent twice is found in the prefix
        cache, so that there are at most those of the workload."""
        seconds = float(level["summary"]["seconds"] or 0.0)
        if not 0 < seconds < MIN_LEVEL_S:
            return None
        enough = min(ceil(count * MIN_LEVEL_S / seconds), len(workload.requests))
        return enough if enough >= 1.5 * count else None

    def _run(self, engine: RunningEngine, workload: Workload, load: ClosedLoop, *, warms_up: bool) -> dict[str, Any]:
        measured = measure_online(engine, workload, [load], slo=self.slo, client=self.client, warms_up=warms_up)
        if measured.was_interrupted:
            raise KeyboardInterrupt
        return dict(measured.record["levels"][0])


def search_level(pays: Callable[[int], bool], *, start: int, maximum: int) -> None:
    """Visit levels: from `start` upwards while they pay or downwards until they do, then once in the middle."""
    level = min(start, maximum)
    if pays(level):
        while level < maximum and pays(min(maximum, 2 * level)):
            level = min(maximum, 2 * level)
        low, high = level, min(maximum, 2 * level)
    else:
        while level > 1 and not pays(level // 2):
            level //= 2
        low, high = level // 2, level
    if high - low > 1 and low >= 1:
        pays((low + high) // 2)


def _verdict(level: Mapping[str, Any]) -> Any:
    return found(level, "summary", "slo", "verdict")


def _goodput(level: Mapping[str, Any]) -> float:
    return float(level["summary"]["slo"]["goodput_requests_per_s"])


def _shares(level: Mapping[str, Any]) -> str:
    conditions = found(level, "summary", "slo", "conditions") or []
    return "; ".join(f"{each['condition']} by {each['share']:.1%} of the requests" for each in conditions)
