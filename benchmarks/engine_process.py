"""Measures the cost of an engine in a process of its own: the same fake runner on a thread and behind a socket.

512 sequences stream, so that each step is 512 events. Tokens/s, the CPU time of both sides, and the time to pack and
unpack a step. The front only counts tokens. On a busy machine the CPU time is the better number: it does not include
other processes.

    python benchmarks/engine_process.py --json benchmarks/results/engine-process.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time

import msgspec
import numpy as np
from about import cpu_name

from headrace.config import EngineConfig
from headrace.engine.client import Client, EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.fake_settings import fake_settings
from headrace.engine.process import wire
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.start import LoadedCore
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.types import Request, SamplingParams, SequenceEvent, TokenLogprobs
from headrace.version import __version__

NUM_SEQS = 512
PROMPT_LEN = 64
SETTINGS = fake_settings(max_model_len=4096, max_num_seqs=NUM_SEQS, max_num_batched_tokens=8192, num_blocks=100_000)


@dataclass(frozen=True)
class Run:
    where: str
    num_tokens: int
    num_steps: int
    tokens_per_s: float
    front_cpu_us_per_token: float
    engine_cpu_us_per_token: float | None  # None: with one process, it is part of the front's
    tokens_per_delivery: float


@dataclass(frozen=True)
class Packing:
    """One step's events, from objects to bytes and back."""

    num_events: int
    top_logprobs: int | None
    num_bytes: int
    pack_us: float
    unpack_us: float


def load_fake_core(config: EngineConfig, report: Callable[[str], None]) -> LoadedCore:
    """Called in the engine's process."""
    return LoadedCore(EngineCore(Scheduler(SETTINGS.limits), FakeRunner(max_num_seqs=NUM_SEQS)), SETTINGS)


class Counter:
    """A front that counts the tokens it receives."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_finished = 0
        self.num_deliveries = 0
        self.is_done = threading.Event()

    def deliver(self, events: list[SequenceEvent]) -> None:
        self.num_deliveries += 1
        for event in events:
            self.num_tokens += len(event.token_ids)
            self.num_finished += event.finish_reason is not None
        if self.num_finished == NUM_SEQS or not events:
            self.is_done.set()


def submit_all(client: Client, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1)
    for number in range(NUM_SEQS):
        prompt = np.full(PROMPT_LEN, number, np.int32)
        client.submit(Request(f"chatcmpl-{number:032d}", prompt, params, watched=True))


def measure(where: str, num_tokens: int) -> Run:
    counter = Counter()
    client: EngineClient | EngineProcess
    if where == "process":
        client = EngineProcess(counter.deliver, lambda: counter.deliver([]), core="engine_process:load_fake_core")
        client.start(EngineConfig())
        client.wait_until_ready()
    else:
        client = EngineClient(load_fake_core(EngineConfig(), print).core, counter.deliver)
    engine_started = cpu_of(client.pid) if isinstance(client, EngineProcess) else 0.0
    started, cpu_started = perf_counter(), process_time()
    submit_all(client, num_tokens)
    counter.is_done.wait()
    seconds, cpu = perf_counter() - started, process_time() - cpu_started
    engine_cpu = cpu_of(client.pid) - engine_started if isinstance(client, EngineProcess) else None
    client.close()
    stats = client.stats.scheduler
    assert counter.num_tokens == NUM_SEQS * num_tokens
    return Run(
        where=where,
        num_tokens=counter.num_tokens,
        num_steps=stats.num_steps,
        tokens_per_s=counter.num_tokens / seconds,
        front_cpu_us_per_token=1e6 * cpu / counter.num_tokens,
        engine_cpu_us_per_token=None if engine_cpu is None else 1e6 * engine_cpu / counter.num_tokens,
        tokens_per_delivery=counter.num_tokens / counter.num_deliveries,
    )


def cpu_of(pid: int | None) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def measure_packing(top_logprobs: int | None, num_rounds: int) -> Packing:
    events = [_event(number, top_logprobs) for number in range(NUM_SEQS)]
    writer, reader = wire.StepWriter(), wire.StepReader()
    packing, unpacking = [], []
    for _ in range(num_rounds):
        started = perf_counter()
        frame = wire.encode(writer.step(events))
        packed = perf_counter()
        step = wire.decode_message(frame)
        assert isinstance(step, wire.Step)
        received = reader.events(step)
        unpacking.append(perf_counter() - packed)
        packing.append(packed - started)
        assert len(received) == NUM_SEQS
    return Packing(NUM_SEQS, top_logprobs, len(frame), *(1e6 * statistics.median(s) for s in (packing, unpacking)))


def _event(number: int, top_logprobs: int | None) -> SequenceEvent:
    logprobs = None
    if top_logprobs is not None:
        tops = tuple(range(top_logprobs)), tuple(-0.5 * i for i in range(top_logprobs))
        logprobs = (TokenLogprobs(number, -0.5, 1, *tops),)
    tokens = np.array([number], np.int32)
    return SequenceEvent(f"chatcmpl-{number:032d}", 0, tokens, logprobs=logprobs, num_cached_tokens=16)


def show(runs: list[Run], packings: list[Packing]) -> None:
    for run in runs:
        engine = "" if run.engine_cpu_us_per_token is None else f" + {run.engine_cpu_us_per_token:.2f} in the engine's"
        print(
            f"{run.where:>8}: {run.tokens_per_s:>10,.0f} tokens/s, CPU {run.front_cpu_us_per_token:.2f}{engine} µs a "
            f"token; {run.num_steps:,} steps, {run.tokens_per_delivery:,.0f} tokens a delivery"
        )
    for packing in packings:
        with_what = "" if packing.top_logprobs is None else f" with {packing.top_logprobs} log-probabilities each"
        print(
            f"{packing.num_events} events{with_what}: {packing.num_bytes:,} bytes, "
            f"packed in {packing.pack_us:.0f} µs, unpacked in {packing.unpack_us:.0f} µs"
        )


def write_record(path: Path, date: str, runs: list[Run], packings: list[Packing]) -> None:
    versions = {"headrace": __version__, "python": platform.python_version()}
    record = {
        "date": date,
        "command": " ".join(["python", *sys.argv]),
        "versions": versions | {"numpy": np.__version__, "msgspec": msgspec.__version__},
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # includes other work
        "peak_rss_mib_of_the_front": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "runs": [asdict(run) for run in runs],
        "packing": [asdict(packing) for packing in packings],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000, help="tokens of each of the 512 sequences")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turns; the median counts")
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    all_runs = [measure(where, args.tokens) for _ in range(args.repeats) for where in ("thread", "process")]
    runs = [median_run([run for run in all_runs if run.where == where]) for where in ("thread", "process")]
    packings = [measure_packing(top_logprobs, 300) for top_logprobs in (None, 5)]
    show(runs, packings)
    if args.json is not None:
        write_record(args.json, args.date, runs, packings)


def median_run(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda run: run.tokens_per_s)[len(runs) // 2]


if __name__ == "__main__":
    main()
