"""Compares orders of execution of a job: the real scheduler over a runner that computes nothing, and a clock that adds
what a GPU would need for each step. No model, no GPU: the steps and tokens are real, the seconds are modelled.

Each workload is executed in the order of the input, sorted as `LLM.generate` sorts (which has to know all prompts), and
as `headrace run` plans, with lines that arrive as they are read. The lengths of answers are not known in advance.

    python benchmarks/job_order.py --json benchmarks/results/job-order.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import process_time

import numpy as np

from headrace.engine.offline_order import starting_order
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.planner import Planner
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import STOPPED, StepPlan, StepResult
from headrace.types import Request, SamplingParams
from headrace.version import __version__

LIMITS = SchedulerLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, num_blocks=12_288)
MAX_IN_FLIGHT = 2 * LIMITS.max_num_seqs + 8  # like a job
LINES_PER_SECOND = 10_000  # that are read and tokenized

# A model of 8 billion parameters in 16 bits on a GPU of 600 TFLOP/s and 4.8 TB/s.
WEIGHTS_SECONDS = 3.3e-3  # to read the weights once
TOKEN_SECONDS = 27e-6  # to compute a token's linear layers
CONTEXT_SECONDS = 27e-9  # to read a token's keys and values
STEP_SECONDS = 0.3e-3


@dataclass(frozen=True)
class Line:
    tokens: np.ndarray
    max_tokens: int | None
    answer_len: int
    temperature: float = 1.0


@dataclass(frozen=True)
class Outcome:
    order: str
    modelled_seconds: float
    num_steps: int
    num_computed_tokens: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int
    num_duplicate_tokens: int
    num_preemptions: int
    num_rows_at_end: float  # running in the last tenth of the steps, on average
    planning_cpu_us_per_line: float


class AnswerRunner(FakeRunner):
    """Ends each sequence at its own length; a request's seed is its line's index."""

    def __init__(self, lines: list[Line]) -> None:
        super().__init__(max_num_seqs=LIMITS.max_num_seqs)
        self._lines = lines
        self._ends_at = np.zeros(LIMITS.max_num_seqs, np.int64)

    def submit(self, plan: StepPlan) -> StepResult:
        for entry in plan.slot_entries:
            self._ends_at[entry.slot] = entry.prompt_len + self._lines[entry.seed].answer_len
        result = super().submit(plan)
        result.finished[self._len[result.slots] >= self._ends_at[result.slots]] = STOPPED
        return result


class Simulation:
    """One workload in one order: lines are submitted up to what a job has in flight, steps cost modelled seconds."""

    def __init__(self, lines: list[Line]) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.seconds = 0.0
        self._lines = lines
        self._runner = AnswerRunner(lines)
        self._num_running_by_step: list[int] = []
        self.num_in_flight = 0

    @property
    def has_room(self) -> bool:
        return self.num_in_flight < MAX_IN_FLIGHT

    def submit(self, index: int) -> None:
        line = self._lines[index]
        request = Request(str(index), line.tokens, params_of(line, index))
        self.scheduler.add(request, seeds=(index,), stop_token_ids=(2,))
        self.num_in_flight += 1

    def step(self) -> list[int]:
        """Returns the lines that finished."""
        plan = self.scheduler.plan()
        if plan is None:
            return []
        num_context = int(self.scheduler.slots.computed[plan.slots].sum())
        self.seconds += (
            STEP_SECONDS + max(WEIGHTS_SECONDS, plan.num_batched_tokens * TOKEN_SECONDS) + num_context * CONTEXT_SECONDS
        )
        self._num_running_by_step.append(len(plan.slots))
        events = self.scheduler.apply(self._runner.collect(self._runner.submit(plan)))
        self.num_in_flight -= len(events)
        return [int(event.request_id) for event in events]

    def outcome(self, order: str, *, num_duplicate_tokens: int = 0, planning_seconds: float = 0.0) -> Outcome:
        stats = self.scheduler.stats
        tail = self._num_running_by_step[-max(1, len(self._num_running_by_step) // 10) :]
        return Outcome(
            order=order,
            modelled_seconds=round(self.seconds, 3),
            num_steps=stats.num_steps,
            num_computed_tokens=stats.num_batched_tokens,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_duplicate_tokens=num_duplicate_tokens,
            num_preemptions=stats.num_preemptions,
            num_rows_at_end=round(sum(tail) / len(tail), 1),
            planning_cpu_us_per_line=round(1e6 * planning_seconds / len(self._lines), 1),
        )


def run_listed(lines: list[Line], indexes: list[int], order: str) -> Outcome:
    simulation = Simulation(lines)
    waiting = iter(indexes)
    num_left = len(indexes)
    while num_left:
        while simulation.has_room and (index := next(waiting, None)) is not None:
            simulation.submit(index)
        num_left -= len(simulation.step())
    return simulation.outcome(order)


def run_planned(lines: list[Line]) -> Outcome:
    simulation, planner = Simulation(lines), Planner(LIMITS)
    works = [work_of(line, index) for index, line in enumerate(lines)]
    num_read, num_answered, planning_seconds = 0, 0, 0.0
    while num_answered < len(lines):
        started = process_time()
        num_readable = min(len(lines), 64 + int(simulation.seconds * LINES_PER_SECOND))
        while num_read < num_readable and planner.has_room:
            num_answered += planner.add(works[num_read]) is not None
            num_read += 1
            if num_read == len(lines):
                planner.end_input()
        taken: list[int] = []
        while planner.peek() is not None and planner.may_start(
            1, num_in_flight=simulation.num_in_flight + len(taken), max_in_flight=MAX_IN_FLIGHT
        ):
            taken.append(planner.take().reply.index)
        planning_seconds += process_time() - started
        for index in taken:
            simulation.submit(index)
        for index in simulation.step():
            output = output_of(lines[index])
            started = process_time()
            num_answered += 1 + len(planner.finished(index, output))
            planning_seconds += process_time() - started
    saved = planner.savings
    return simulation.outcome(
        "planned",
        num_duplicate_tokens=saved.num_prompt_tokens + saved.num_decode_tokens,
        planning_seconds=planning_seconds,
    )


def params_of(line: Line, index: int) -> SamplingParams:
    return SamplingParams(max_tokens=line.max_tokens, temperature=line.temperature, seed=index)


def work_of(line: Line, index: int) -> Work:
    # The planner treats a seed in the parameters as the line's own, and all seeds differ.
    return Work(PlainReply(index), params_of(line, index), line.tokens.tobytes())


def output_of(line: Line) -> LineOutput:
    return LineOutput(len(line.tokens), (LineAnswer(0, "", line.answer_len, "stop"),))


# Workloads.


class Texts:
    """Random token ids and lengths."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def tokens(self, least: int, most: int) -> np.ndarray:
        return self.rng.integers(0, 100_000, int(self.rng.integers(least, most + 1))).astype(np.int32)

    def answer_len(self, median: float, limit: int, spread: float = 0.7) -> int:
        return int(np.clip(self.rng.lognormal(np.log(median), spread), 1, limit))

    def shuffled(self, lines: Iterator[Line]) -> list[Line]:
        made = list(lines)
        return [made[place] for place in self.rng.permutation(len(made))]


def system_prompts(num_lines: int) -> list[Line]:
    """200 system prompts of 800 to 1,600 tokens, in random order."""
    texts = Texts(1)
    systems = [texts.tokens(800, 1600) for _ in range(200)]
    return [
        Line(np.concatenate([systems[texts.rng.integers(200)], texts.tokens(30, 120)]), 256, texts.answer_len(80, 256))
        for _ in range(num_lines)
    ]


def few_shot_tables(num_lines: int) -> list[Line]:
    """Tables of 500 tokens, in each ten columns with 300 tokens of examples, rows of 20 to 60; in random order."""
    texts = Texts(2)

    def lines() -> Iterator[Line]:
        while True:
            table = texts.tokens(500, 500)
            for _ in range(10):
                column = np.concatenate([table, texts.tokens(300, 300)])
                for _ in range(10):
                    yield Line(np.concatenate([column, texts.tokens(20, 60)]), 32, texts.answer_len(8, 32))

    made = lines()
    return texts.shuffled(next(made) for _ in range(num_lines))


def long_tail(num_lines: int) -> list[Line]:
    """Different prompts; one line in thirty may have, and mostly has, a far longer answer."""
    texts = Texts(3)

    def line() -> Line:
        is_long = texts.rng.random() < 1 / 30
        limit = 4096 if is_long else 256
        return Line(texts.tokens(50, 300), limit, texts.answer_len(2500 if is_long else 80, limit, 0.4))

    return [line() for _ in range(num_lines)]


def unknown_lengths(num_lines: int) -> list[Line]:
    """Four instructions without a limit; answers to one are thirty times as long, which the planner has to learn."""
    texts = Texts(4)
    instructions = [texts.tokens(200, 200) for _ in range(4)]

    def line() -> Line:
        kind = int(texts.rng.choice(4, p=[0.04, 0.32, 0.32, 0.32]))
        length = texts.answer_len(2000 if kind == 0 else 60, 6000, 0.4)
        return Line(np.concatenate([instructions[kind], texts.tokens(20, 80)]), None, length)

    return [line() for _ in range(num_lines)]


def documents_and_essays(num_lines: int) -> list[Line]:
    """Half are documents of 2,000 to 4,000 tokens with a short answer, half short questions with a long one."""
    texts = Texts(5)

    def line() -> Line:
        if texts.rng.random() < 0.5:
            return Line(texts.tokens(2000, 4000), 32, texts.answer_len(10, 32))
        return Line(texts.tokens(20, 100), 1024, texts.answer_len(350, 1024, 0.4))

    return [line() for _ in range(num_lines)]


def repeated_lines(num_lines: int) -> list[Line]:
    """A third of the lines, at temperature 0, repeat an earlier one."""
    texts = Texts(6)
    lines: list[Line] = []
    for _ in range(num_lines):
        if lines and texts.rng.random() < 1 / 3:
            lines.append(lines[texts.rng.integers(len(lines))])
        else:
            lines.append(Line(texts.tokens(100, 400), 256, texts.answer_len(100, 256), 0.0))
    return lines


WORKLOADS: dict[str, Callable[[int], list[Line]]] = {
    "system prompts": system_prompts,
    "few-shot tables": few_shot_tables,
    "long tail": long_tail,
    "unknown lengths": unknown_lengths,
    "documents and essays": documents_and_essays,
    "repeated lines": repeated_lines,
}


def measure(name: str, num_lines: int) -> list[Outcome]:
    lines = WORKLOADS[name](num_lines)
    params = [params_of(line, index) for index, line in enumerate(lines)]
    by_llm = starting_order([line.tokens.tolist() for line in lines], params)
    return [
        run_listed(lines, list(range(len(lines))), "input"),
        run_listed(lines, by_llm, "sorted"),
        run_planned(lines),
    ]


def show(name: str, outcomes: list[Outcome]) -> None:
    print(f"{name}: {(WORKLOADS[name].__doc__ or '').strip()}")
    for outcome in outcomes:
        print(
            f"  {outcome.order:<8} {outcome.modelled_seconds:>8.1f} s "
            f"{outcomes[0].modelled_seconds / outcome.modelled_seconds:>6.2f}× {outcome.num_steps:>7,} steps"
            f" {outcome.num_computed_tokens:>11,} tokens computed, {outcome.num_prefix_hit_tokens:>10,} by prefix,"
            f" {outcome.num_duplicate_tokens:>8,} by duplicates, {outcome.num_rows_at_end:>5} running at the end,"
            f" {outcome.num_preemptions:,} preempted, {outcome.planning_cpu_us_per_line:.0f} µs a line"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=6_000, help="lines of each workload")
    parser.add_argument("--only", choices=list(WORKLOADS), help="one workload")
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    parser.add_argument("--date", default=datetime.now(UTC).date().isoformat(), help="date of the record")
    args = parser.parse_args()
    outcomes = {}
    for name in [args.only] if args.only else WORKLOADS:
        outcomes[name] = measure(name, args.lines)
        show(name, outcomes[name])
    if args.json is not None:
        record = {
            "date": args.date,
            "command": " ".join(["python", *sys.argv]),
            "versions": {"headrace": __version__, "python": platform.python_version(), "numpy": np.__version__},
            "limits": asdict(LIMITS),
            "lines": args.lines,
            "workloads": {name: [asdict(each) for each in made] for name, made in outcomes.items()},
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
