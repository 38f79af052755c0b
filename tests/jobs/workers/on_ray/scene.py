"""A job on a cluster, real or fake: what it runs, and a cluster that tells the test what happens on it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.shares import EngineShare
from headrace.engine.start import Engine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport
from headrace.jobs.workers.on_ray.cluster import Front, RayCluster
from headrace.models import ModelSpec
from headrace.startup import Report
from headrace.types import Request, SequenceEvent
from tests.engine.cores import EOS, VOCAB_SIZE
from tests.jobs.faults import AT_ONCE

CORE = "tests.engine.cores:faulty"
PATIENCE_S = 60.0
NUM_LINES = 120

OnAnswers = Callable[["WatchedCluster", int], None]


def front_of(config: EngineConfig) -> Front:
    return Front(
        cast(ModelSpec, SimpleNamespace(vocab_size=VOCAB_SIZE, pooler=None, is_encoder=False)),
        None,
        None,
        (EOS,),
        "fake",
    )


class WatchedCluster(RayCluster):
    """`on_answers` is called with the worker's number, on the thread of that worker, before each list of events that
    ends a line. While it waits, only that worker waits."""

    def __init__(self, ray: Any, on_answers: OnAnswers = lambda cluster, number: None) -> None:
        super().__init__(ray, core=CORE, open_front=front_of)
        self._on_answers = on_answers
        self._num_starters = 0
        self.submitted: list[tuple[int, list[str]]] = []  # by engine: its worker and the ids
        self.clients: dict[int, Any] = {}  # by worker: that of its last engine
        self.started: Counter[int] = Counter()
        self._changed = threading.Condition()

    def starter(self, share: EngineShare, report: Report) -> Callable[[EngineConfig, Deliver], Engine]:
        number, start = self._num_starters, super().starter(share, report)
        self._num_starters += 1

        def watched(config: EngineConfig, deliver: Deliver) -> Engine:
            def take(events: list[SequenceEvent]) -> None:
                if any(event.finish_reason for event in events):
                    self._on_answers(self, number)
                deliver(events)

            engine = start(config, take)
            self._record(number, engine)
            return engine

        return watched

    def _record(self, number: int, engine: Engine) -> None:
        ids: list[str] = []
        self.submitted.append((number, ids))
        submit = engine.client.submit

        def record(request: Request) -> None:
            ids.append(request.request_id)
            submit(request)

        engine.client.submit = record  # type: ignore[method-assign]
        with self._changed:
            self.clients[number] = engine.client
            self.started[number] += 1
            self._changed.notify_all()

    def wait_for_start(self, number: int, times: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.started[number] >= times, PATIENCE_S), "no engine has started"


def prompts(num_lines: int = NUM_LINES) -> list[dict[str, Any]]:
    return [{"prompt": [10 + number, 7], "max_tokens": 3, "temperature": 0} for number in range(num_lines)]


def run_on(cluster: RayCluster, source: Path, num_workers: int) -> tuple[JobReport, dict[int, Any]]:
    """The report, and what each line got."""
    output = source.parent / f"out-{num_workers}.jsonl"
    config = EngineConfig(max_num_seqs=2)
    job = JobSpec(input=str(source), output=str(output), config=config, workers=num_workers, overwrite=True)
    try:
        report = run_job(job, cluster=cluster, rules=AT_ONCE, quiet=True)
    finally:
        cluster.close()
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines), "every line once"
    return report, {line["index"]: line.get("token_ids", line.get("error")) or line for line in lines}


def kill_the_first_actor(cluster: WatchedCluster, number: int) -> None:
    """For `on_answers`: kills the first engine of worker 0 while both workers have lines in flight."""
    cluster.wait_for_start(1 - number, 1)
    if number == 0 and cluster.started[0] == 1:
        cluster.clients[0]._calls.kill()
    elif number == 1:
        cluster.wait_for_start(0, 2)


def only_lost_lines_ran_again(cluster: WatchedCluster, worker: int) -> bool:
    """Tells whether each line that was submitted twice was one of the worker's first engine."""
    lost = next(ids for number, ids in cluster.submitted if number == worker)
    return recomputed(cluster) <= set(lost)


def recomputed(cluster: WatchedCluster) -> set[str]:
    counts = Counter(line for _, ids in cluster.submitted for line in ids)
    return {line for line, count in counts.items() if count > 1}
