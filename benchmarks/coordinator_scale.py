"""Simulates a job on up to 1,000 workers: the real coordinator (`run_job` with its reading, preparation, planner,
journal, syncs and publishing) over simulated engines. Rates, CPU time, memory, and the times to recover.

    coordinator thread ─ submit ─▶ one thread for all engines: slots, a heap of due steps ─ events ─▶ inbox

A simulated engine has `slots` sequences at a time; each step gives every one of them a token. Lengths of answers are
log-normal. Nothing is computed, and no message crosses a network: the cost of sending lines to other machines is
missing. CPU time of the simulation's thread is subtracted from what is reported. Each measurement has a process of its
own.

    rate      engines answer as fast as lines come, so the coordinator is the bottleneck
    paced     engines answer a given number of lines per second: share of a core that the coordinator needs
    fill      memory when all slots and queues are full
    deaths    engines die at seeded times: seconds until their lines are submitted elsewhere
    resume    the coordinator gets SIGKILL after so many lines: seconds until the next run submits a line

    python benchmarks/coordinator_scale.py --json benchmarks/results/coordinator-scale.json
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from time import perf_counter, process_time, sleep, thread_time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import psutil

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.jobs_throughput import WORDS, lines, word_tokenizer  # noqa: E402

from headrace.config import EngineConfig  # noqa: E402
from headrace.engine.checks import RequestChecks  # noqa: E402
from headrace.engine.client import Deliver  # noqa: E402
from headrace.engine.core import EngineStats  # noqa: E402
from headrace.engine.fake_settings import fake_settings  # noqa: E402
from headrace.engine.process.wire import StepWriter, encode, submission  # noqa: E402
from headrace.engine.start import Engine  # noqa: E402
from headrace.errors import EngineDeadError  # noqa: E402
from headrace.jobs.run.run_job import run_job  # noqa: E402
from headrace.jobs.spec import JobSpec  # noqa: E402
from headrace.models import ModelSpec  # noqa: E402
from headrace.sched import SchedulerStats  # noqa: E402
from headrace.types import Request, SamplingParams, SequenceEvent  # noqa: E402

NUM_LENGTHS = 65_536  # sampled once
SIGMA = 0.6  # of the log-normal lengths
POLL_SECONDS = 0.002
MAX_MODEL_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A simulated cluster and its input."""

    num_workers: int
    num_lines: int
    slots: int = 64  # of each engine
    mean_tokens: int = 8  # of an answer
    step_s: float = 0.001
    deaths: int = 0  # engines that die
    death_after_s: float = 5.0  # the first one; the others follow within as long
    start_s: float = 1.0  # of an engine after a death
    seed: int = 0

    @property
    def lines_per_second(self) -> float:
        """What the engines can answer."""
        return self.num_workers * self.slots / (self.mean_tokens * self.step_s)


class FakeClient:
    """One engine. Its state belongs to the cluster's thread."""

    def __init__(self, cluster: Cluster, deliver: Deliver, number: int) -> None:
        self.deliver = deliver
        self.number = number
        self.failure: BaseException | None = None
        self.num_running = 0
        self.waiting: deque[Request] = deque()
        self.due: dict[int, list[Request]] = {}  # by step
        self.num_finished = 0
        self.num_tokens = 0
        self._cluster = cluster

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            SchedulerStats(
                num_running=self.num_running,
                num_waiting=len(self.waiting),
                num_finished=self.num_finished,
                num_generated_tokens=self.num_tokens,
            ),
            0.0,
            0.0,
        )

    def submit(self, request: Request) -> None:
        if self.failure is not None:
            raise EngineDeadError("the simulated engine has died")
        self._cluster.submit(self, request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def limit_running(self, num_seqs: int | None) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def close(self) -> None:
        self._cluster.close()


class Cluster:
    """All engines of a job, on one thread. Steps of an engine are at multiples of `step_s`."""

    def __init__(self, shape: Shape, *, on_submit: Callable[[Cluster], None] = lambda cluster: None) -> None:
        """`on_submit` is called on the coordinator's thread, after each submission."""
        self.shape = shape
        random = np.random.default_rng(shape.seed)
        scale = np.log(shape.mean_tokens) - SIGMA**2 / 2
        lengths = random.lognormal(scale, SIGMA, NUM_LENGTHS).round().clip(1, MAX_MODEL_LEN // 2)
        self._lengths: list[int] = lengths.astype(int).tolist()
        self._tokens = random.integers(256, 256 + len(set(WORDS)), MAX_MODEL_LEN).astype(np.int32)
        self._settings = fake_settings(
            device="none",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=shape.slots,
            max_num_batched_tokens=8192,
            num_blocks=200_000,
        )
        self._checks = RequestChecks(self._settings.limits, (), MAX_MODEL_LEN)
        self._tokenizer = word_tokenizer()
        self._clients: dict[int, FakeClient] = {}
        self._submitted: deque[tuple[FakeClient, Request]] = deque()
        self._heap: list[tuple[int, int]] = []  # step, worker
        self._deaths = self._choose_deaths()
        self._on_submit = on_submit
        self._is_closed = False
        self.num_submitted = self.num_finished = 0
        self.thread_cpu_s = 0.0
        self.begin: Mark | None = None
        self.end: Mark | None = None
        self.lost_at: dict[str, float] = {}  # lines of dead engines that are not submitted again
        self.waits_s: list[float] = []  # of those that are
        self.num_died = 0
        self._thread = threading.Thread(target=self._run, name="fake-engines", daemon=True)

    def _choose_deaths(self) -> list[tuple[float, int]]:
        random, shape = Random(self.shape.seed), self.shape
        workers = random.sample(range(shape.num_workers), shape.deaths)
        return sorted((shape.death_after_s * (1 + random.random()), worker) for worker in workers)

    # Called by the coordinator.

    def start_of(self, number: int) -> Callable[[EngineConfig, Deliver], Engine]:
        def start(config: EngineConfig, deliver: Deliver) -> Engine:
            if number in self._clients:
                sleep(self.shape.start_s)
            client = self._clients[number] = FakeClient(self, deliver, number)
            return Engine(
                client=cast(Any, client),
                settings=self._settings,
                spec=cast(ModelSpec, SimpleNamespace(vocab_size=MAX_MODEL_LEN, pooler=None, is_encoder=False)),
                tokenizer=self._tokenizer,
                eos_token_ids=(),
                model_name="fake",
                start_seconds=0.0,
            )

        return start

    def submit(self, client: FakeClient, request: Request) -> None:
        self._checks.check(request)
        if self.begin is None:
            self.begin = Mark.now(self)
            self._thread.start()
        self._submitted.append((client, request))
        self.num_submitted += 1
        if self.lost_at and (lost_at := self.lost_at.pop(request.request_id, None)) is not None:
            self.waits_s.append(perf_counter() - lost_at)
        self._on_submit(self)

    def close(self) -> None:
        """The first engine that is closed at the end of a run ends all."""
        if not self._is_closed and not self.lost_at and self.num_finished >= self.shape.num_lines:
            self.end = Mark.now(self)
            self._is_closed = True

    # The engines.

    def _run(self) -> None:
        began = perf_counter()
        while not self._is_closed:
            elapsed = perf_counter() - began
            while self._deaths and elapsed >= self._deaths[0][0]:
                self._kill(self._clients[self._deaths.pop(0)[1]])
            now = int(elapsed / self.shape.step_s)
            for _ in range(len(self._submitted)):
                client, request = self._submitted.popleft()
                if client.failure is None:
                    self._enter(client, request, now)
            while self._heap and self._heap[0][0] <= now:
                self._step(*heapq.heappop(self._heap), now)
            self.thread_cpu_s = thread_time()
            sleep(POLL_SECONDS)

    def _enter(self, client: FakeClient, request: Request, now: int) -> None:
        if client.num_running >= self.shape.slots:
            client.waiting.append(request)
            return
        client.num_running += 1
        step = now + self._length(request)
        ending = client.due.get(step)
        if ending is None:
            ending = client.due[step] = []
            heapq.heappush(self._heap, (step, client.number))
        ending.append(request)

    def _step(self, step: int, worker: int, now: int) -> None:
        """All sequences that end in the step are one list of events, as those of a real engine."""
        client = self._clients[worker]
        ended = client.due.pop(step, None)
        if ended is None:
            return  # of an engine that has died
        client.num_running -= len(ended)
        while client.waiting and client.num_running < self.shape.slots:
            self._enter(client, client.waiting.popleft(), now)
        events = [
            SequenceEvent(request.request_id, 0, self._tokens[: self._length(request)], "length") for request in ended
        ]
        client.num_finished += len(ended)
        client.num_tokens += sum(len(event.token_ids) for event in events)
        self.num_finished += len(ended)
        client.deliver(events)

    def _kill(self, client: FakeClient) -> None:
        now = perf_counter()
        lost = [request for ended in client.due.values() for request in ended]
        self.lost_at.update((request.request_id, now) for request in (*lost, *client.waiting))
        client.due.clear()
        client.waiting.clear()
        client.num_running = 0
        client.failure = RuntimeError("a simulated death")
        self.num_died += 1
        client.deliver([])

    def _length(self, request: Request) -> int:
        return self._lengths[int(request.request_id) % NUM_LENGTHS]


@dataclass(frozen=True)
class Mark:
    """Clocks at one time, read on the coordinator's thread."""

    wall_s: float
    thread_s: float
    process_s: float
    engines_s: float
    num_finished: int

    @classmethod
    def now(cls, cluster: Cluster) -> Mark:
        return cls(perf_counter(), thread_time(), process_time(), cluster.thread_cpu_s, cluster.num_finished)


def run(shape: Shape, source: Path, cluster: Cluster) -> None:
    """Run the job with the cluster's engines in the place of engine processes."""
    with ExitStack() as stack:
        stack.enter_context(patch("headrace.jobs.spec.MAX_ENGINES", 10_000))
        numbers = iter(range(shape.num_workers))
        replaced = "headrace.jobs.run.run_job.start_in_process"
        stack.enter_context(patch(replaced, lambda share, report: cluster.start_of(next(numbers))))
        job = JobSpec(
            input=str(source), output=str(source.parent / "answers.jsonl"), workers=shape.num_workers, config=CONFIG
        )
        report = run_job(job, quiet=True)
    assert not report.tally.num_failed, report.tally


CONFIG = EngineConfig(device="cpu")


# Measurements. Each returns a record, in a process of its own.


def measure_run(shape: Shape, source: Path) -> dict[str, Any]:
    """`rate`, `paced` and `deaths`."""
    children = _children_seconds()
    cluster, began = Cluster(shape), perf_counter()
    run(shape, source, cluster)
    seconds = perf_counter() - began
    first, last = cluster.begin, cluster.end
    assert first is not None and last is not None
    wall, thread = last.wall_s - first.wall_s, last.thread_s - first.thread_s
    engines, process = last.engines_s - first.engines_s, last.process_s - first.process_s
    record = {
        "seconds": round(seconds, 2),
        "answering_seconds": round(wall, 2),
        "lines_per_second": round(shape.num_lines / wall),
        "coordinator_cpu_us_per_line": round(1e6 * thread / shape.num_lines, 1),
        "coordinator_share_of_core": round(thread / wall, 3),
        "lines_per_second_of_cpu": round(shape.num_lines / thread),
        "other_threads_cpu_us_per_line": round(1e6 * (process - thread - engines) / shape.num_lines, 1),
        "children_cpu_us_per_line": round(1e6 * (_children_seconds() - children) / shape.num_lines, 1),
        "simulation_cpu_us_per_line": round(1e6 * engines / shape.num_lines, 1),
        "rss_mb": round(psutil.Process().memory_info().rss / 1e6, 1),
        "rss_mb_peak": round(_peak_rss_mb(), 1),
        "status_bytes": os.stat(f"{source.parent / 'answers.jsonl'}.job/status.json").st_size,
    }
    if shape.deaths:
        waits = np.array(cluster.waits_s)
        record["deaths"] = cluster.num_died
        record["lines_lost"] = len(waits)
        record["resubmitted_s"] = {
            "median": round(float(np.median(waits)), 3),
            "p95": round(float(np.quantile(waits, 0.95)), 3),
            "max": round(float(waits.max()), 3),
        }
    return record


def measure_fill(shape: Shape, source: Path) -> dict[str, Any]:
    """Engines that do not answer: memory once all that may be in flight is."""
    capacity = shape.num_workers * (2 * shape.slots + 8)
    before_mb = 0.0

    def look(cluster: Cluster) -> None:
        nonlocal before_mb
        if cluster.num_submitted == 1:
            before_mb = psutil.Process().memory_info().rss / 1e6
        if cluster.num_submitted == min(capacity, shape.num_lines - 1):
            rss_mb = psutil.Process().memory_info().rss / 1e6
            begin = cluster.begin
            assert begin is not None
            record = {
                "lines_in_flight": cluster.num_submitted,
                "rss_mb_at_first_line": round(before_mb, 1),
                "rss_mb": round(rss_mb, 1),
                "bytes_per_line_in_flight": round(1e6 * (rss_mb - before_mb) / cluster.num_submitted),
                "seconds": round(perf_counter() - begin.wall_s, 2),
                "in_flight_file_bytes": os.stat(f"{source.parent / 'answers.jsonl'}.job/in-flight").st_size,
            }
            print(json.dumps(record), flush=True)
            _end_children()
            os._exit(0)

    run(shape, source, Cluster(shape, on_submit=look))
    raise AssertionError("the job ended before the engines were full")


def measure_resume(shape: Shape, source: Path, done: int) -> dict[str, Any]:
    """Continue the job until `done` lines are in the journal, then SIGKILL. The times are those before that, of the
    start of this run."""
    began, cpu = perf_counter(), process_time()
    first: dict[str, Any] = {}

    def look(cluster: Cluster) -> None:
        if not first:
            first["seconds_to_first_line"] = round(perf_counter() - began, 3)
            first["cpu_seconds_to_first_line"] = round(process_time() - cpu, 3)
            first["rss_mb"] = round(psutil.Process().memory_info().rss / 1e6, 1)
            first["num_before"] = _num_journaled(source)
        if first["num_before"] + cluster.num_finished >= done:
            print(json.dumps(first), flush=True)
            _end_children()
            os.kill(os.getpid(), signal.SIGKILL)

    run(shape, source, Cluster(shape, on_submit=look))
    raise AssertionError("the job ended before it was killed")


def _num_journaled(source: Path) -> int:
    """Lines of the journal; the last one may be cut off."""
    return sum(
        data.read_bytes().count(b"\n") for data in Path(f"{source.parent / 'answers.jsonl'}.job").glob("seg-*.jsonl")
    )


def _end_children() -> None:
    for child in psutil.Process().children(recursive=True):
        child.kill()


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _peak_rss_mb() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


def wire_bytes(prompt_tokens: int, answer_tokens: int) -> dict[str, int]:
    """Bytes between the coordinator and an engine process, for one line: the wire format of engine processes."""
    request = Request("1000000", np.arange(prompt_tokens, dtype=np.int32), SamplingParams(max_tokens=answer_tokens))
    event = SequenceEvent("1000000", 0, np.arange(answer_tokens, dtype=np.int32), "length")
    return {
        "prompt_tokens": prompt_tokens,
        "answer_tokens": answer_tokens,
        "bytes_out": len(encode(submission(request))),
        "bytes_back": len(encode(StepWriter().step([event]))),
    }


# The whole set.


def write_input(directory: Path, num_lines: int) -> Path:
    source = directory / "in.jsonl"
    with open(source, "wb") as file:
        for piece in lines("plain", num_lines):
            file.write(piece.replace(b'"max_tokens": 8', b'"max_tokens": 2000'))
    return source


def apart(mode: str, shape: Shape, source: Path, **more: int) -> dict[str, Any]:
    """Measure in a process of its own. A run that kills itself has printed its record before."""
    given = json.dumps({"mode": mode, "shape": asdict(shape), "source": str(source), **more})
    found = subprocess.run([sys.executable, __file__, "--measure", given], stdout=subprocess.PIPE, check=False)
    if found.returncode not in (0, -signal.SIGKILL) or not found.stdout:
        sys.exit(f"{mode} has failed with {found.returncode}")
    record: dict[str, Any] = {"mode": mode, **asdict(shape), **more, **json.loads(found.stdout)}
    print(json.dumps(record), flush=True)
    return record


def measure_here(given: dict[str, Any]) -> None:
    shape, source = Shape(**given["shape"]), Path(given["source"])
    if given["mode"] == "fill":
        measure_fill(shape, source)
    elif given["mode"] == "resume":
        measure_resume(shape, source, given["done"])
    else:
        print(json.dumps(measure_run(shape, source)))


def measure_one(mode: str, shape: Shape, where: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=where) as directory:
        return apart(mode, shape, write_input(Path(directory), shape.num_lines))


def measure_resumes(shape: Shape, done: Sequence[int], where: str | None) -> list[dict[str, Any]]:
    """One job that is killed again and again; each run's start is measured with what the runs before have done."""
    with tempfile.TemporaryDirectory(dir=where) as directory:
        source = write_input(Path(directory), shape.num_lines)
        return [apart("resume", shape, source, done=count) for count in (*done, done[-1] + 1)]


def measure_all(given: argparse.Namespace) -> list[dict[str, Any]]:
    where, num_lines, records = given.directory, given.lines, []
    modes = given.modes.split(",")
    if "rate" in modes:
        for num_workers in given.workers:
            records.append(measure_one("rate", Shape(num_workers=num_workers, num_lines=num_lines), where))
        long = Shape(num_workers=max(given.workers), num_lines=num_lines, mean_tokens=200, step_s=0.001)
        records.append(measure_one("rate", long, where))
    if "paced" in modes:
        for rate in given.rates:
            records.append(measure_one("paced", paced(max(given.workers), rate, rate * given.seconds), where))
    if "fill" in modes:
        for slots in given.slots:
            most = max(given.workers) * (2 * slots + 8)
            shape = Shape(num_workers=max(given.workers), num_lines=most + 1, slots=slots, mean_tokens=200, step_s=1e3)
            records.append(measure_one("fill", shape, where))
    if "deaths" in modes:
        for num_workers in given.workers:
            shape = paced(num_workers, given.death_rate, given.death_rate * given.seconds)
            deaths = Shape(**{**asdict(shape), "deaths": max(1, num_workers // 100), "death_after_s": 4.0})
            records.append(measure_one("deaths", deaths, where))
    if "resume" in modes:
        shape = Shape(num_workers=max(given.workers), num_lines=2 * max(given.done))
        records += measure_resumes(shape, sorted(given.done), where)
    return records


def paced(num_workers: int, rate: int, num_lines: int) -> Shape:
    """Engines that answer this many lines per second in total: 16 slots each, and a step time to match."""
    slots, mean_tokens = 16, 200
    step_s = num_workers * slots / (mean_tokens * rate)
    return Shape(num_workers=num_workers, num_lines=num_lines, slots=slots, mean_tokens=mean_tokens, step_s=step_s)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="rate,paced,fill,deaths,resume")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256, 1000])
    parser.add_argument("--lines", type=int, default=100_000, help="of `rate`")
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 4000], help="lines per second of `paced`")
    parser.add_argument("--death-rate", type=int, default=2000, help="lines per second of `deaths`")
    parser.add_argument("--seconds", type=int, default=15, help="of `paced` and `deaths`, at least")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 45, 120], help="per engine, of `fill`")
    parser.add_argument("--done", type=int, nargs="+", default=[200_000, 1_000_000], help="lines before a SIGKILL")
    parser.add_argument("--directory", help="where input, journal and output are; the default is for temporary files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        measure_here(json.loads(given.measure))
        return
    load = os.getloadavg()
    records = measure_all(given)
    if given.json:
        facts = {
            "command": " ".join(["python", "benchmarks/coordinator_scale.py", *(arguments or sys.argv[1:])]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True, cwd=ROOT).strip(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": {"before": load, "after": os.getloadavg()},
            "note": "Simulated engines. The machine was busy: a load above the number of cores says how much else ran."
            " CPU times are more reliable than wall times.",
            "wire": [wire_bytes(100, 200), wire_bytes(1000, 200)],
            "records": records,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
