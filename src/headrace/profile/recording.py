"""Records a steady window of a run in this process, and what recording costs.

    load ─▶ warm-up: kernels, slots, the profiler's own start ─▶ off | on | off | on | off ─▶ analysis of the last on

Steady: in a decode workload all sequences run and the steps change nothing but tokens; in the others as many requests
have finished as run at once, so that sequences are in all phases. Steps per second are compared between windows with
and without the profiler, which alternate, since contexts grow meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.core import EngineStats
from headrace.engine.profiler import ProfileOptions, Tool
from headrace.engine.start import Engine, start_engine
from headrace.errors import ConfigError, EngineDeadError
from headrace.profile.report import Overhead, Report, report_of
from headrace.profile.trace import read_profile
from headrace.profile.workload import Workload
from headrace.types import SequenceEvent

POLL_S = 0.02
CACHE_SHARE = 0.95  # of the KV cache; the scheduler keeps some blocks free when a request starts
MIN_STEADY_STEPS = 16  # in a row, if fewer sequences run than wanted
MAX_LAG = 4  # steps that are planned but not yet counted as steady
MAX_WINDOW_STEPS = 20_000  # of a small model
MAX_WINDOW_S = 600.0
WARM_UP_S = 0.3  # of the profiler; its first start takes seconds on a GPU
PrintLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RecordingOptions:
    directory: str
    seconds: float = 2.0  # of each window
    steps: int | None = None  # of each window, instead of seconds
    num_windows: int = 2  # with the profiler, each between two without
    num_seqs: int | None = None  # sequences to run at once; default: as many as the engine can
    steady_timeout_s: float = 180.0
    tool: Tool = "torch"


class LoadedEngine:
    """An engine under a workload. Owned by the thread that records; the feeder's thread only submits."""

    def __init__(self, engine: Engine, workload: Workload, num_seqs: int | None) -> None:
        settings = engine.settings
        workload = workload.fitting(settings.max_model_len)
        per_seq = workload.input_len + workload.output_len
        fitting = max(1, int(CACHE_SHARE * settings.kv_cache_size_tokens) // per_seq)
        self.engine = engine
        self.workload = workload
        wanted = num_seqs or workload.max_seqs or settings.max_num_seqs
        self.num_seqs = min(wanted, settings.max_num_seqs, fitting)
        self._num_finished = 0
        self._num_submitted = 0
        self._is_ending = threading.Event()
        self._requests = workload.requests(vocab_size=engine.spec.vocab_size, max_model_len=settings.max_model_len)
        self._feeder = threading.Thread(target=self._feed, name="headrace-profile-feeder", daemon=True)

    @property
    def stats(self) -> EngineStats:
        self._refuse_if_dead()
        return self.engine.stats

    def start(self) -> None:
        self.engine.client.limit_running(self.num_seqs)
        self._feeder.start()

    def end(self) -> None:
        self._is_ending.set()
        self._feeder.join()

    def count(self, events: list[SequenceEvent]) -> None:
        """Called on the engine's thread."""
        self._num_finished += sum(event.finish_reason is not None for event in events)

    def wait_until_steady(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        before = self.stats
        while True:
            sleep(POLL_S)
            now = self.stats
            if self._is_steady(before, now):
                return
            if _num_steps(before, now) > _num_steady(before, now) + MAX_LAG:
                before = now  # some step was not steady
            if monotonic() > deadline:
                raise ConfigError(
                    f"the run was not steady after {timeout_s:g} s: {now.scheduler.num_running} of {self.num_seqs} "
                    f"sequences run, {self._num_finished} requests have finished; lower --num-seqs or --input-len"
                )

    def _is_steady(self, before: EngineStats, now: EngineStats) -> bool:
        if self.workload.name != "decode":
            return self._num_finished >= self.num_seqs
        num_steady = _num_steady(before, now)
        return num_steady >= (2 if now.scheduler.num_running >= self.num_seqs else MIN_STEADY_STEPS)

    def _feed(self) -> None:
        """Keep half as many requests waiting as run, so that a finished one is replaced at once."""
        while not self._is_ending.is_set():
            try:
                while self._num_submitted - self._num_finished < self.num_seqs + max(4, self.num_seqs // 2):
                    self._num_submitted += 1
                    self.engine.client.submit(next(self._requests))
                    if self._is_ending.is_set():
                        return
            except EngineDeadError:
                return  # the recording thread finds the failure
            sleep(0.002)

    def _refuse_if_dead(self) -> None:
        failure = self.engine.client.failure
        if failure is not None:
            raise EngineDeadError(f"the engine has stopped: {failure}") from failure


def _num_steps(before: EngineStats, now: EngineStats) -> int:
    return now.scheduler.num_steps - before.scheduler.num_steps


def _num_steady(before: EngineStats, now: EngineStats) -> int:
    return now.num_steady_steps - before.num_steady_steps


@contextmanager
def loaded_engine(config: EngineConfig, workload: Workload, num_seqs: int | None = None) -> Iterator[LoadedEngine]:
    """An engine that runs the workload until the end of the block."""
    made: list[LoadedEngine] = []
    engine = start_engine(config, lambda events: made[0].count(events) if made else None)
    made.append(LoadedEngine(engine, workload, num_seqs))
    try:
        made[0].start()
        yield made[0]
    finally:
        made[0].end()
        engine.close()


def record_run(
    config: EngineConfig,
    workload: Workload,
    options: RecordingOptions,
    *,
    commands: dict[str, str] | None = None,
    print_line: PrintLine = lambda line: None,
) -> Report | None:
    """Start an engine, record it and analyse the last window. None with the tool "cuda", which leaves no trace here."""
    print_line("starting the engine")
    with loaded_engine(config, workload, options.num_seqs) as loaded:
        print_line(f"waiting for steady steps of {loaded.num_seqs} sequences")
        loaded.wait_until_steady(options.steady_timeout_s)
        return record_steady(loaded, options, commands=commands, print_line=print_line)


def record_steady(
    loaded: LoadedEngine,
    options: RecordingOptions,
    *,
    commands: dict[str, str] | None = None,
    print_line: PrintLine = lambda line: None,
) -> Report | None:
    """Record an engine that is steady."""
    client = loaded.engine.client
    if options.tool == "cuda":
        print_line("recording a window for NVIDIA's tool")
        client.start_profile(ProfileOptions(directory=options.directory, tool="cuda")).result()
        _wait(loaded, options)
        client.stop_profile().result()
        return None
    window = ProfileOptions(directory=options.directory, max_seconds=MAX_WINDOW_S, max_steps=MAX_WINDOW_STEPS)
    print_line("starting the profiler and measuring the ceilings")
    client.start_profile(window).result()
    sleep(WARM_UP_S)
    _remove(client.stop_profile().result())
    on: list[float] = []
    off = [_wait(loaded, options)]
    record: dict[str, Any] = {}
    for number in range(options.num_windows):
        print_line(f"recording window {number + 1} of {options.num_windows}")
        client.start_profile(window).result()
        on.append(_wait(loaded, options))
        if record:
            _remove(record)
        record = client.stop_profile().result()
        off.append(_wait(loaded, options))
    found, trace = read_profile(Path(record["directory"]) / f"{record['name']}.profile.json")
    assert trace is not None
    overhead = Overhead(tuple(round(rate, 3) for rate in on), tuple(round(rate, 3) for rate in off))
    return report_of(found, trace, overhead=overhead, commands=commands)


def _wait(loaded: LoadedEngine, options: RecordingOptions) -> float:
    """Let a window pass. Returns its steps per second."""
    first, started = loaded.stats.scheduler.num_steps, perf_counter()
    if options.steps is None:
        deadline = started + options.seconds
        while (left := deadline - perf_counter()) > 0:
            sleep(min(left, 0.5))
            loaded._refuse_if_dead()
    else:
        while loaded.stats.scheduler.num_steps < first + options.steps:
            sleep(0.002)
    return (loaded.stats.scheduler.num_steps - first) / (perf_counter() - started)


def _remove(record: dict[str, Any]) -> None:
    """Remove the files of a window that is not analysed."""
    for ending in ("trace.json.gz", "profile.json"):
        (Path(record["directory"]) / f"{record['name']}.{ending}").unlink(missing_ok=True)
