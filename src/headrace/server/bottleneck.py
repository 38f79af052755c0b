"""Doctor's diagnosis of this server, from its own counters, for GET /bottleneck and the log.

    tick, once a second ─▶ gauges
          every 10 s    ─▶ a snapshot of the counters ─▶ doctor over the last 30 s ─▶ the document, and `LoadLog`

It runs on the event loop, in slices of one rule at most; benchmarks/bottleneck_cost.py measures them. A request only
gets the finished document. Figures are differences of two snapshots, never lifetime counters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from time import monotonic
from typing import NamedTuple

import msgspec

from headrace.doctor.diagnosis import Diagnosis, diagnosing
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.histograms import Cumulative
from headrace.doctor.readers.snapshots import ScrapeError, Snapshot, evidence_of_snapshots
from headrace.hardware.describe import gpu_facts
from headrace.hardware.nvml import is_visible
from headrace.monitor import table
from headrace.monitor.metrics import ServerMetrics
from headrace.monitor.store import Values
from headrace.plan.gpus import Gpu, match_gpu
from headrace.plan.shape import ModelShape
from headrace.scrape.page import Sample
from headrace.server.load_log import Load, LoadLog

SNAPSHOT_S = 10.0  # between two snapshots; the shortest interval that is judged
WINDOW_S = 30.0  # the longest interval that is judged
ORIGIN = "this server"

_NUMBERS = tuple(series for series in table.SERIES if series.kind != "histogram")
_HISTOGRAMS = (
    *(table.TOKEN_GAP_SECONDS, table.FIRST_TOKEN_SECONDS, table.QUEUE_SECONDS, table.PROMPT_LENGTHS),
    *(table.ANSWER_LENGTHS, table.BATCH_TOKENS, table.LOOP_LAG),
)


class _Gauges(NamedTuple):
    at: float
    num_running: float
    num_waiting: float
    kv_use: float


class BottleneckWatch:
    """Owns the snapshots and the last diagnosis. Called on the event loop only.

    `observe` brings the engines' counters into `metrics` and returns what runs there; None: no engine responds.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        observe: Callable[[], Load | None],
        *,
        model: ModelShape | None = None,
        gpu: Gpu | None = None,
        num_engines: int = 1,
        load_log: LoadLog | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._metrics = metrics
        self._observe = observe
        self._model, self._gpu, self._num_engines = model, gpu, num_engines
        self._clock = clock
        self._log = LoadLog() if load_log is None else load_log
        self._bounds = {series: (*metrics.bounds(series), float("inf")) for series in _HISTOGRAMS}
        self._snapshots: deque[tuple[float, Snapshot]] = deque()
        self._gauges: deque[_Gauges] = deque()
        self._ticking = asyncio.Lock()
        self._publish(self._unknown(f"the server has run for less than {SNAPSHOT_S:g} seconds"))

    @property
    def document(self) -> bytes:
        """The last diagnosis as JSON, in the form of `headrace doctor --json`."""
        return self._document

    async def tick(self) -> None:
        async with self._ticking:
            for _ in self.slices():
                await asyncio.sleep(0)

    def slices(self) -> Iterator[None]:
        """The work of one tick, in slices."""
        now = self._clock()
        state = self._observe()
        self._log.see(state)
        if state is not None:
            self._gauges.append(_Gauges(now, state.num_running, state.num_waiting, state.kv_use))
        if self._snapshots and now < self._snapshots[-1][0] + SNAPSHOT_S:
            return
        yield
        values = self._metrics.copy()
        self._snapshots.append((now, self._snapshot(values)))
        diagnosis = None
        if len(self._snapshots) > 1:
            yield
            diagnosis = yield from self._diagnosis(now)
            yield
            self._publish(diagnosis)
        self._log.take(values, diagnosis, now)

    def _diagnosis(self, now: float) -> Generator[None, None, Diagnosis]:
        while len(self._snapshots) > 2 and self._snapshots[0][0] < now - WINDOW_S:
            self._snapshots.popleft()
        since, before = self._snapshots[0]
        while self._gauges and self._gauges[0].at < since:
            self._gauges.popleft()
        try:
            evidence = evidence_of_snapshots(
                before,
                self._snapshots[-1][1],
                seconds=max(1e-9, now - since),
                origin=ORIGIN,
                settings=self._metrics.settings,
                model=self._model,
                gpu=self._gpu,
                num_engines=self._num_engines,
            )
        except ScrapeError:
            while len(self._snapshots) > 1:  # those before the restart
                self._snapshots.popleft()
            return self._unknown(f"the engine was restarted in the last {now - since:.0f} seconds")
        yield
        return (yield from diagnosing(self._with_gauges(evidence)))

    def _with_gauges(self, evidence: Evidence) -> Evidence:
        """One value a second says more than the two of the snapshots."""
        seen = self._gauges
        if not seen:
            return evidence
        return replace(
            evidence,
            num_running=sum(each.num_running for each in seen) / len(seen) / self._num_engines,
            num_waiting=sum(each.num_waiting for each in seen) / len(seen) / self._num_engines,
            kv_use=max(each.kv_use for each in seen),
        )

    def _unknown(self, reason: str) -> Diagnosis:
        evidence = Evidence(source="live", origin=ORIGIN, engine="headrace", settings=self._metrics.settings)
        return Diagnosis(evidence, "not enough evidence", None, (), 0, (), reason)

    def _publish(self, diagnosis: Diagnosis) -> None:
        self._document = msgspec.json.encode(diagnosis.as_json())

    def _snapshot(self, values: Values) -> Snapshot:
        samples: dict[str, list[Sample]] = {}
        for series in _NUMBERS:
            name = f"{series.name}_total" if series.kind == "counter" else series.name
            found = values.numbers[series.name]
            if found:
                samples[name] = [
                    Sample(name, dict(zip(series.labels, labels, strict=True)), value)
                    for labels, value in found.items()
                ]
        histograms: Mapping[str, Cumulative] = {
            series.name: Cumulative(
                dict(zip(self._bounds[series], accumulate(values.counts[series.name].counts), strict=True)),
                values.counts[series.name].total,
            )
            for series in _HISTOGRAMS
        }
        return Snapshot(samples, histograms)


def own_gpu() -> Gpu | None:
    """The first GPU that this process may use, if plan knows its rates. Asks the driver: not for the event loop."""
    visible = (facts for index, facts in enumerate(gpu_facts()) if is_visible(index, facts.get("uuid", "")))
    first = next(visible, None)
    return None if first is None else match_gpu(first.get("name", ""))
