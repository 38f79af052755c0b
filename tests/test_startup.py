"""The stages of a start: timing, order, progress, texts."""

from __future__ import annotations

from time import time

import pytest

from headrace.startup import MIN_INTERVAL_S, StartupStage, StartupStages, mark, marks, ready_line, stage_seconds


class Start:
    """A start by a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reported: list[StartupStage] = []
        self.stages = StartupStages(self.reported.append, clock=lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_stage_ends_when_the_next_begins() -> None:
    start = Start()
    start.stages("import")
    start.wait(2.0)
    start.stages("load")
    start.wait(1.5)
    start.stages.end()
    assert start.reported == [
        StartupStage("import"),
        StartupStage("import", seconds=2.0),
        StartupStage("load"),
        StartupStage("load", seconds=1.5),
    ]
    assert start.stages.finished == (StartupStage("import", seconds=2.0), StartupStage("load", seconds=1.5))


def test_progress_is_reported_at_intervals_and_the_last_count_is_kept() -> None:
    start = Start()
    for done in range(101):
        start.stages("load", done, 100)
        start.wait(MIN_INTERVAL_S / 10)
    start.stages.end()
    running = [stage.done for stage in start.reported if not stage.is_finished]
    assert running[0] == 0 and len(running) == pytest.approx(11, abs=1)
    last = start.reported[-1]
    assert (last.done, last.total, last.is_finished) == (100, 100, True)


def test_ending_twice_reports_once() -> None:
    start = Start()
    start.stages("compile")
    start.stages.end()
    start.stages.end()
    assert [stage.is_finished for stage in start.reported] == [False, True]


def test_stages_of_another_process_are_reported_and_kept() -> None:
    start = Start()
    start.stages.add(StartupStage("load", 1, 2))
    start.stages.add(StartupStage("load", 2, 2, seconds=3.0))
    assert [stage.done for stage in start.reported] == [1, 2]
    assert start.stages.finished == (StartupStage("load", 2, 2, seconds=3.0),)


@pytest.mark.parametrize(
    "stage, text",
    [
        (StartupStage("import"), "importing torch ..."),
        (StartupStage("load", 2**29, 2**31), "loading weights ... 0.50 GiB of 2.00 GiB (25%)"),
        (StartupStage("load", 2**31, 2**31, 12.34), "loaded weights (2.00 GiB) in 12.3 s"),
        (StartupStage("compile", 3, 9), "preparing kernels ... 3 of 9 (33%)"),
        (StartupStage("profile", seconds=0.5), "measured the largest step in 0.5 s"),
        (StartupStage("capture", 70, 70, 8.0), "captured CUDA graphs (70) in 8.0 s"),
    ],
)
def test_a_stage_is_a_line_for_people(stage: StartupStage, text: str) -> None:
    assert str(stage) == text


def test_the_time_of_each_stage_is_summed_up() -> None:
    stages = [StartupStage("import", seconds=2.0), StartupStage("load", seconds=1.0), StartupStage("load", seconds=0.5)]
    assert stage_seconds(stages) == {"import": 2.0, "load": 1.5}
    assert ready_line(4.0, stages) == "ready in 4.0 s (import 2.0 s, load 1.5 s)"
    assert ready_line(4.0, []) == "ready in 4.0 s"


def test_marks_are_in_the_order_of_their_times() -> None:
    first = time()
    mark("here")
    mark("in another process", first - 10.0)
    found = [each for each in marks() if each.name in ("here", "in another process")]
    assert [each.name for each in found] == ["in another process", "here"]
    assert found[1].at >= first
