"""Measures what crash safety costs a batch job: the same job with its journal, and with results in a plain file.

The engine is fake and takes no time, so everything measured is host work; with `--step-ms 10` a step of 512 sequences
takes as long as one of a 1B model on an H200, and the loss is that of such a job.
Both variants have the same settings of threads and garbage collection, prepare lines in the same way and know their
number. They alternate until the time is up, and so does which of them runs first. `loss` is of throughput: `medians`
compares the medians of all rounds, `pairs` each round with its neighbour; by wall time, which is meaningful on an idle
machine, and by CPU time, with children. On a busy machine whole jobs vary by more than the loss, so the calls that
accept, write, sync and publish results are timed as well: `share_of_cpu` is the CPU time of the journal's calls beyond
that of the plain writer's, as a share of the plain job's CPU time (`share_of_sync`: that of the sync thread, which
blocks no other thread), and `share_alone` is the time in which nothing else runs: opening and publishing.

    python benchmarks/durability.py --json benchmarks/results/durability.json        # four minutes
    python benchmarks/durability.py --step-ms 10 --rows 4096 --json benchmarks/results/durability-paced.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, process_time, sleep, thread_time
from types import SimpleNamespace
from typing import Any, cast

from about import cpu_name
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.config import EngineConfig
from headrace.engine.client import Deliver, EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.fake_settings import fake_settings
from headrace.engine.start import Engine
from headrace.jobs.formats.writer import ResultWriter, StreamResults
from headrace.jobs.recovery.job_engine import JobEngine, Start
from headrace.jobs.run.context import RunContext
from headrace.jobs.run.main_loop import MainLoop
from headrace.jobs.run.run_job import fast_thread_switching, run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.console import Console
from headrace.jobs.store import syncer
from headrace.jobs.store.directory import JobDirectory
from headrace.jobs.store.journal import Journal
from headrace.jobs.workers.worker_set import Workers
from headrace.models import ModelSpec
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.steps import Masks, StepPlan, StepResult
from headrace.text import Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER
from headrace.version import __version__

ASCII = 128
MIN_ROUNDS = 3
SETTINGS = fake_settings(max_model_len=4096, max_num_seqs=512, max_num_batched_tokens=8192, num_blocks=100_000)


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float
    results_cpu_s: float  # of the calls that handle results
    sync_cpu_s: float  # on a thread of its own
    alone_s: float  # wall time of those calls during which the engine is idle
    output_bytes: int


class Meter:
    """Time spent in the calls that it wraps, without its own overhead."""

    def __init__(self) -> None:
        self.cpu_s = self.alone_s = 0.0
        self.num_calls = 0

    def around(self, call: Callable[..., Any], *, is_alone: bool = False) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            wall, cpu = perf_counter(), thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self.cpu_s += thread_time() - cpu
                self.num_calls += 1
                if is_alone:
                    self.alone_s += perf_counter() - wall

        return timed


def own_seconds_a_call() -> float:
    rounds = []
    for _ in range(20):
        meter = Meter()
        call = meter.around(lambda: None)
        for _ in range(2_000):
            call()
        rounds.append(meter.cpu_s / meter.num_calls)
    return min(rounds)


@contextmanager
def metered(meter: Meter, sync_meter: Meter) -> Iterator[None]:
    places: list[tuple[Any, str, bool]] = [
        (StreamResults, "append", False),
        (StreamResults, "flush", False),
        (JobDirectory, "append", False),
        (JobDirectory, "flush", False),
        (JobDirectory, "begin", True),
        (JobDirectory, "publish", True),
        (JobDirectory, "close", True),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    opened, sync_data = JobDirectory.__dict__["open"], syncer.sync_data
    syncer.sync_data = sync_meter.around(sync_data)
    for (owner, name, is_alone), original in zip(places, originals, strict=True):
        setattr(owner, name, meter.around(original, is_alone=is_alone))
    JobDirectory.open = staticmethod(meter.around(JobDirectory.open, is_alone=True))  # type: ignore[assignment]
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)
        JobDirectory.open, syncer.sync_data = opened, sync_data


def byte_tokenizer() -> Tokenizer:
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    backend = Backend(models.BPE(vocab={spelled[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


class PacedRunner(FakeRunner):
    """Its steps take a fixed time, one after the other, like those of a device."""

    def __init__(self, step_s: float) -> None:
        super().__init__(max_num_seqs=SETTINGS.max_num_seqs, vocab_size=ASCII)
        self._step_s = step_s
        self._free_at = 0.0

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        self._free_at = max(self._free_at, perf_counter()) + self._step_s
        sleep(max(0.0, self._free_at - perf_counter()))
        return super().submit(plan, masks)


def start(config: EngineConfig, deliver: Deliver, *, step_s: float = 0.0) -> Engine:
    core = EngineCore(Scheduler(SETTINGS.limits), PacedRunner(step_s))
    return Engine(
        client=EngineClient(core, deliver),
        settings=SETTINGS,
        spec=cast(ModelSpec, SimpleNamespace(vocab_size=256)),
        tokenizer=byte_tokenizer(),
        eos_token_ids=(),
        model_name="fake",
        start_seconds=0.0,
    )


def run_plainly(job: JobSpec, start: Start) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    workers = Workers([JobEngine(start, inbox.put, job.config)])
    try:
        with (
            fast_thread_switching(),
            closing(job.open_input()) as source,
            ResultWriter.open(job.output) as writer,
        ):
            console, results = Console(enabled=False), StreamResults(writer)
            context = RunContext.build(job, results, inbox=inbox, workers=workers, console=console)
            MainLoop(context, source.read_batches(), num_expected=source.estimate_num_lines()).run()
    finally:
        workers.close()


def run_durably(job: JobSpec, start: Start) -> None:
    run_job(job, start=start, quiet=True)


def measure(run: Callable[[JobSpec, Start], None], start: Start, source: Path) -> Cost:
    directory = Path(tempfile.mkdtemp(dir=source.parent))
    job = JobSpec(input=str(source), output=str(directory / "out.jsonl"))
    meter, sync_meter, own = Meter(), Meter(), own_seconds_a_call()
    os.sync()  # pending writes of earlier rounds must not count
    with metered(meter, sync_meter):
        wall, cpu = perf_counter(), cpu_seconds()
        run(job, start)
        wall, cpu = perf_counter() - wall, cpu_seconds() - cpu
    in_results = meter.cpu_s - own * meter.num_calls
    cost = Cost(
        wall_s=wall,
        cpu_s=cpu - own * meter.num_calls,
        results_cpu_s=in_results,
        sync_cpu_s=sync_meter.cpu_s,
        alone_s=meter.alone_s,
        output_bytes=os.path.getsize(job.output),
    )
    shutil.rmtree(directory)
    return cost


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return process_time() + times.children_user + times.children_system


def append_rate(directory: Path, num_lines: int, line_bytes: int) -> float:
    """Lines per second of the journal alone, with group syncs."""
    result = b'{"text":"%b"}' % (b"x" * (line_bytes - 11))
    journal = Journal.open(directory, epoch=1)
    started = perf_counter()
    for index in range(num_lines):
        journal.append(index, result)
        if index % 16 == 15:
            journal.flush()
    journal.commit()
    rate = num_lines / (perf_counter() - started)
    journal.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=int, default=20_000, help="lines of the job; few enough that no process prepares them"
    )
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=0.0, help="that a step of the engine takes")
    parser.add_argument("--minutes", type=float, default=4.0, help="no round begins after these, but for the first")
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    source = root / "in.jsonl"
    with open(source, "w") as file:
        for number in range(args.rows):
            prompt = f"Row {number}: what follows from this, and why does it matter?"
            file.write(json.dumps({"prompt": prompt, "max_tokens": args.tokens, "number": number}) + "\n")
    ways = {"plain": run_plainly, "journal": run_durably}
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    load, end = os.getloadavg(), perf_counter() + 60 * args.minutes
    for number in count():
        if number > MIN_ROUNDS and perf_counter() >= end:
            break
        for name in list(ways)[:: 1 if number % 2 else -1]:
            cost = measure(ways[name], partial(start, step_s=args.step_ms / 1e3), source)
            if number:  # the first round warms up
                costs[name].append(cost)
                cpu, results = (1e6 * seconds / args.rows for seconds in (cost.cpu_s, cost.results_cpu_s))
                print(
                    f"{name:<8} {args.rows / cost.wall_s:>9,.0f} lines/s, {cpu:.1f} us CPU/line, results {results:.2f}"
                )
    alone = root / "alone"
    alone.mkdir()
    rate = append_rate(alone, 200_000, 1_400)
    shutil.rmtree(root)
    losses: dict[str, Any] = {
        "medians": {kind: loss_of_medians(costs, kind) for kind in ("wall_s", "cpu_s")},
        "pairs": {kind: loss(costs, kind) for kind in ("wall_s", "cpu_s")},
    }
    pairs = list(zip(costs["plain"], costs["journal"], strict=True))
    losses["share_of_cpu"] = spread([(b.results_cpu_s - a.results_cpu_s) / a.cpu_s for a, b in pairs])
    losses["share_of_sync"] = spread([b.sync_cpu_s / a.cpu_s for a, b in pairs])
    losses["share_alone"] = spread([b.alone_s / b.wall_s for b in costs["journal"]])
    print(json.dumps(losses, indent=2), f"\nthe journal alone: {rate:,.0f} lines/s of 1.4 kB")
    if args.json is not None:
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "versions": {"headrace": __version__, "python": platform.python_version()},
            "cpu": cpu_name(),
            "load": {"before": load, "after": os.getloadavg()},  # more than one: other work ran too
            "rows": args.rows,
            "tokens_per_answer": args.tokens,
            "step_ms": args.step_ms,
            "max_num_seqs": SETTINGS.max_num_seqs,
            "rounds": {name: [asdict(cost) for cost in each] for name, each in costs.items()},
            "loss": losses,
            "journal_alone_rows_per_s": rate,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def loss_of_medians(costs: dict[str, list[Cost]], kind: str) -> float:
    plain, durable = (statistics.median(getattr(cost, kind) for cost in costs[way]) for way in ("plain", "journal"))
    return 1 - plain / durable


def loss(costs: dict[str, list[Cost]], kind: str) -> dict[str, float]:
    """Of throughput, by pairs, since the load of the machine changes over minutes."""
    pairs = zip(costs["plain"], costs["journal"], strict=True)
    return spread([1 - getattr(plain, kind) / getattr(durable, kind) for plain, durable in pairs])


def spread(values: list[float]) -> dict[str, float]:
    ordered, quarter = sorted(values), len(values) // 4
    return {"median": statistics.median(values), "quartile_1": ordered[quarter], "quartile_3": ordered[-1 - quarter]}


if __name__ == "__main__":
    main()
