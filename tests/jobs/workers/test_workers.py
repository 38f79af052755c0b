"""Jobs with several workers: one dies, one is broken, a line kills them, memory runs out; the others go on."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.start import Engine
from headrace.errors import ResumableJobError
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport
from headrace.steps import Masks, StepPlan, StepResult
from tests.jobs.faults import AT_ONCE, FaultyRunner, FaultyStart, OutOfMemoryError

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]
PATIENCE_S = 60.0


def run(source: Path, starts: list[Any], **options: Any) -> JobReport:
    job = JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), workers=len(starts), **options)
    return run_job(job, start=starts, rules=AT_ONCE, quiet=True)


def read(source: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (source.parent / "out.jsonl").read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


def answers(source: Path) -> dict[int, Any]:
    return {index: line["error"]["code"] if "error" in line else line["text"] for index, line in read(source).items()}


def prompts(num_lines: int, *, poison: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    return [
        {"prompt": f"line {number}{'!' if number in poison else ''}", "max_tokens": 4, "ignore_eos": True}
        for number in range(num_lines)
    ]


class HeldRunner(FaultyRunner):
    """Runs nothing before the event, so that the other worker gets as far as a test needs."""

    def __init__(self, event: threading.Event) -> None:
        super().__init__()
        self._event = event

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> StepResult:
        assert self._event.wait(PATIENCE_S), "the other worker does not get that far"
        return super().submit(plan, masks)


class SetsAtStart(FaultyStart):
    """Sets the event when it starts so many engines."""

    def __init__(self, start: Start, runner: FaultyRunner, *, event: threading.Event, at: int) -> None:
        super().__init__(start, runner)
        self._event = event
        self._at = at

    def __call__(self, config: EngineConfig, deliver: Deliver) -> Engine:
        engine = super().__call__(config, deliver)
        if len(self.configs) == self._at:
            self._event.set()
        return engine


def alone(source: Path, start: Start) -> dict[int, Any]:
    """The answers of a job with one worker."""
    run(source, [start])
    return answers(source)


def test_two_workers_share_the_lines_and_answer_them_as_one_does(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(200))
    expected = alone(source, start)
    starts = [FaultyStart(start, FaultyRunner()) for _ in range(2)]
    report = run(source, starts, overwrite=True)
    assert (report.exit_code, answers(source)) == (0, expected)
    submitted = [line for each in starts for line in each.submitted[0]]
    assert sorted(map(int, submitted)) == list(range(200)), "every line is computed once"
    assert all(len(each.submitted[0]) >= 8 for each in starts), "no worker is left out"


def test_the_others_go_on_while_a_dead_worker_is_restarted(write_lines: WriteLines, start: Start) -> None:
    """The replacement starts only when all lines but those that died with the first engine are answered."""
    source = write_lines(*prompts(120))
    expected = alone(source, start)
    healthy = FaultyStart(start, FaultyRunner())
    broken = FaultyStart(start, FaultyRunner(dies_at={3}))
    others_are_done = threading.Event()

    def restart(config: EngineConfig, deliver: Deliver) -> Engine:
        if broken.configs:
            assert others_are_done.wait(PATIENCE_S), "the other worker waits for the restart"
        return broken(config, deliver)

    def watched(config: EngineConfig, deliver: Deliver) -> Engine:
        def note(events: list[Any]) -> None:
            deliver(events)
            if len(healthy.submitted[0]) >= 100:
                others_are_done.set()

        return healthy(config, note)

    report = run(source, [restart, watched], overwrite=True)
    assert (report.exit_code, answers(source)) == (0, expected)
    assert (len(healthy.configs), report.failures.deaths) == (1, {"engine": 1})
    lost = set(broken.submitted[0]) & {*healthy.submitted[0], *(i for ids in broken.submitted[1:] for i in ids)}
    assert 0 < len(lost) <= 24, "only lines in flight on the dead worker are computed again"
    assert max(Counter(healthy.submitted[0]).values()) == 1, "and none of the other worker"


@pytest.mark.parametrize("poison", [(5,), (0, 99), (40, 41)])
def test_a_line_that_kills_engines_is_found_and_all_others_are_answered(
    write_lines: WriteLines, start: Start, poison: tuple[int, ...]
) -> None:
    source = write_lines(*prompts(100, poison=poison))
    starts = [FaultyStart(start, FaultyRunner()) for _ in range(2)]
    report = run(source, starts)
    found = answers(source)
    assert len(found) == 100
    assert {index for index, answer in found.items() if answer == "poison_request"} == set(poison)
    assert report.failures.poison_rows == len(poison)


def test_memory_that_runs_out_on_one_worker_changes_only_that_one(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(100))
    out_of_memory = FaultyRunner(dies_at={2, 4, 6}, error=lambda: OutOfMemoryError("CUDA out of memory"))
    has_died = threading.Event()
    starts = [
        FaultyStart(start, HeldRunner(has_died)),
        SetsAtStart(start, out_of_memory, event=has_died, at=4),
    ]
    report = run(source, starts)
    assert (report.exit_code, len(read(source))) == (0, 100)
    assert len(starts[0].configs) == 1
    assert report.failures.memory_rungs == [
        "started again",
        "half the tokens a step",
        "a tenth less memory",
    ]
    first, *_, last = starts[1].configs
    assert first.gpu_memory_utilization == 0.25, "two workers divide half of the free memory"
    assert last.gpu_memory_utilization == pytest.approx(0.2)
    assert report.failures.deaths == {}


def test_a_worker_that_dies_whatever_it_runs_is_given_up_and_no_line_is_blamed(
    write_lines: WriteLines, start: Start
) -> None:
    source = write_lines(*prompts(300))
    expected = alone(source, start)
    has_died = threading.Event()
    start_broken = SetsAtStart(start, FaultyRunner(always=True), event=has_died, at=4)
    healthy = FaultyStart(start, HeldRunner(has_died))
    report = run(source, [start_broken, healthy], overwrite=True)
    assert (report.exit_code, report.failures.poison_rows, len(healthy.configs)) == (0, 0, 1)
    assert answers(source) == expected
    assert report.failures.deaths["engine"] >= 3


def test_a_worker_that_cannot_start_again_is_given_up(write_lines: WriteLines, start: Start) -> None:
    source = write_lines(*prompts(60))
    expected = alone(source, start)
    once = FaultyStart(start, FaultyRunner(dies_at={2}))

    def start_once(config: EngineConfig, deliver: Deliver) -> Engine:
        if once.configs:
            raise RuntimeError("no such device")
        return once(config, deliver)

    other = FaultyStart(start, FaultyRunner())
    report = run(source, [start_once, other], overwrite=True)
    assert (report.exit_code, answers(source)) == (0, expected)
    assert len(other.configs) == 1


def test_the_job_stops_when_no_worker_can_be_started_again(write_lines: WriteLines, start: Start) -> None:
    def start_once() -> Callable[..., Engine]:
        once = FaultyStart(start, FaultyRunner(dies_at={2}))

        def started(config: EngineConfig, deliver: Deliver) -> Engine:
            if once.configs:
                raise RuntimeError("no such device")
            return once(config, deliver)

        return started

    source = write_lines(*prompts(100))
    with pytest.raises(ResumableJobError, match="could not be started again in 3 attempts"):
        run(source, [start_once(), start_once()])
    report = run(source, [start])
    assert (report.exit_code, len(read(source))) == (0, 100), "a later run with another number of workers continues"


def test_an_error_of_one_start_ends_the_others(write_lines: WriteLines, start: Start) -> None:
    started: list[Engine] = []

    def good(config: EngineConfig, deliver: Deliver) -> Engine:
        started.append(start(config, deliver))
        return started[-1]

    def bad(config: EngineConfig, deliver: Deliver) -> Engine:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError, match="no such device"):
        run(write_lines(*prompts(3)), [good, bad])
    assert [engine.client.failure is not None for engine in started] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_deaths_gives_every_line_once_with_the_same_answer(
    write_lines: WriteLines, start: Start, seed: int
) -> None:
    random = Random(seed)
    num_lines = random.randint(30, 150)
    poison = tuple(random.sample(range(num_lines), random.choice([0, 0, 1, 2])))
    source = write_lines(*prompts(num_lines, poison=poison))
    expected = alone(source, FaultyStart(start, FaultyRunner()))
    starts = [
        FaultyStart(
            start, FaultyRunner(dies_at={random.randrange(1, 20) + 40 * n for n in range(random.randint(0, 3))})
        )
        for _ in range(random.randint(2, 4))
    ]
    report = run(source, starts, overwrite=True)
    assert answers(source) == expected
    assert report.failures.poison_rows == len(poison)
