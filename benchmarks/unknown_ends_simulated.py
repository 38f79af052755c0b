"""What it costs not to know when answers end, simulated: the real scheduler, no model, step times of `headrace plan`.

    python benchmarks/unknown_ends_simulated.py --json benchmarks/results/unknown-ends-simulated.jsonl
    python benchmarks/unknown_ends_simulated.py --model llama-3.1-8b --cache-tokens 200000 --requests 4000

The workload is `open`: prompts as in `chat`, answers that end by themselves at about geometric lengths, at most eight
times their mean. Three kinds of rounds with the same lengths:

    unknown    the scheduler sees only the limit of each answer
    arrival    it knows every length, and starts requests in the order of their arrival: the best a forecast could do
    longest    it knows every length, the longest start first, and no more at once than keep the GPU busy (`generate`)

`unknown` against `arrival` is what the scheduler's forecast costs: preemptions, or slots that stay empty for answers
that end early. `unknown` against `longest` includes the tail, in which late starters with long answers decode alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from about import commit, cpu_name

from headrace.bench.workloads import WorkloadSpec, build
from headrace.bench.workloads.named import MAX_OVER_MEAN
from headrace.engine.offline_order import target_concurrency_of
from headrace.engine.settings import Settings
from headrace.plan.constants import H200
from headrace.plan.prediction import Prediction, predict
from headrace.plan.roofline import Machine, step_seconds
from headrace.plan.settings import PlanSettings
from headrace.plan.simulate import Steps
from headrace.plan.workload import of_lengths
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.steps import STOPPED, IntArray, StepPlan, StepResult
from headrace.types import Request, SamplingParams, TokenIds
from headrace.version import __version__

Kind = Literal["unknown", "arrival", "longest"]
KINDS: tuple[Kind, ...] = ("unknown", "arrival", "longest")
STEPS_IN_FLIGHT = 2  # as EngineCore: a step is planned before the result of the one before it is applied
NO_TOKEN = 1 << 20  # a stop id that the fake runner never samples: lengths come from the workload
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-30b-a3b")
CACHE_TOKENS = (0, 400_000, 100_000)  # 0: all that fits
# Lengths of answers with about the same mean: those of `open`; with a longer tail; and nine short for one long.
LENGTHS: dict[str, Callable[[np.random.Generator, int, int], Any]] = {
    "geometric": lambda random, mean, count: random.geometric(1.0 / mean, count),
    "lognormal": lambda random, mean, count: random.lognormal(np.log(mean) - 0.72, 1.2, count),
    "two kinds": lambda random, mean, count: np.where(random.random(count) < 0.1, 7 * mean, mean // 3),
}


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: TokenIds
    length: int
    limit: int


@dataclass(frozen=True, slots=True)
class Round:
    kind: Kind
    modelled_seconds: float
    num_steps: int
    num_batched_tokens: int
    num_preemptions: int
    num_recomputed_tokens: int
    mean_running: float  # over the steps before the last request started


class AnswerRunner(FakeRunner):
    """Ends each sequence at its own length; a request's seed is its index."""

    def __init__(self, answers: list[Answer], max_num_seqs: int) -> None:
        super().__init__(max_num_seqs=max_num_seqs)
        self._answers = answers
        self._ends_at = np.zeros(max_num_seqs, np.int64)

    def submit(self, plan: StepPlan) -> StepResult:
        for entry in plan.slot_entries:
            self._ends_at[entry.slot] = entry.prompt_len + self._answers[entry.seed].length
        result = super().submit(plan)
        result.finished[self._len[result.slots] >= self._ends_at[result.slots]] = STOPPED
        return result


class StepLog:
    """What `headrace plan` needs to know of each step."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, float, float, float]] = []
        self.last_start = 0

    def add(self, plan: StepPlan, computed: IntArray) -> None:
        """`computed`: tokens of each of the plan's slots after the step."""
        is_prompt = plan.num_tokens > 1
        tokens, before = plan.num_tokens[is_prompt], computed[is_prompt] - plan.num_tokens[is_prompt]
        pairs = float((tokens * (before + (tokens + 1) / 2)).sum())
        num_decode = int((~is_prompt).sum())
        context = float(computed[~is_prompt].sum())
        counts = (num_decode, int(tokens.sum()), int(is_prompt.sum()), int(plan.samples.sum()))
        self._rows.append((*counts, context, pairs, float(before.sum())))
        if plan.slot_entries:
            self.last_start = len(self._rows)

    def mean_running(self) -> float:
        return float(np.mean([row[0] + row[2] for row in self._rows[: self.last_start]]))

    def seconds(self, found: Prediction) -> float:
        table = np.array(self._rows).T
        ints, floats = table[:4].astype(np.int64), table[4:]
        none = np.zeros(0, np.int64)
        steps = Steps(*ints, *floats, arrival=none, first_token=none, end=none, max_running=0)
        machine = Machine(found.gpu, H200)
        return float(step_seconds(steps, found.model, found.precision, machine).total.sum())


def open_answers(given: argparse.Namespace) -> list[Answer]:
    mean, limit = given.mean_output, given.mean_output * MAX_OVER_MEAN
    workload = build(WorkloadSpec(name="open", num_requests=given.requests, output_len=mean))
    random = np.random.default_rng(given.seed)
    lengths = np.clip(LENGTHS[given.lengths](random, mean, given.requests), 1, limit).astype(np.int64)
    prompts = [np.array(request.prompt, np.int32) for request in workload.requests]
    return [Answer(prompt, int(length), limit) for prompt, length in zip(prompts, lengths, strict=True)]


def run(kind: Kind, answers: list[Answer], found: Prediction) -> Round:
    assert found.settings is not None
    settings = found.settings
    scheduler, runner, log = Scheduler(settings.limits), AnswerRunner(answers, settings.max_num_seqs), StepLog()
    _submit_all(kind, answers, scheduler, settings)
    in_flight: deque[StepResult] = deque()
    while scheduler.has_unfinished or in_flight:
        plan = scheduler.plan()
        if plan is not None:
            log.add(plan, scheduler.slots.computed[plan.slots].copy())
            in_flight.append(runner.submit(plan))
        if in_flight and (plan is None or len(in_flight) >= STEPS_IN_FLIGHT):
            scheduler.apply(in_flight.popleft())
    stats = scheduler.stats
    return Round(
        kind=kind,
        modelled_seconds=round(log.seconds(found), 3),
        num_steps=stats.num_steps,
        num_batched_tokens=stats.num_batched_tokens,
        num_preemptions=stats.num_preemptions,
        num_recomputed_tokens=stats.num_recomputed_tokens,
        mean_running=round(log.mean_running(), 1),
    )


def _submit_all(kind: Kind, answers: list[Answer], scheduler: Scheduler, settings: Settings) -> None:
    order = list(range(len(answers)))
    limits = [answer.limit if kind == "unknown" else answer.length for answer in answers]
    if kind != "arrival":
        order.sort(key=lambda index: -limits[index])  # stable
        target = target_concurrency_of(sum(limits), max(limits), settings)
        scheduler.max_running = min(settings.max_num_seqs, target or settings.max_num_seqs)
    stops = (NO_TOKEN,) if kind == "unknown" else ()
    for index in order:
        params = SamplingParams(max_tokens=limits[index], ignore_eos=not stops)
        scheduler.add(Request(str(index), answers[index].prompt, params), seeds=(index,), stop_token_ids=stops)


def compare(model: str, given: argparse.Namespace, cache_tokens: int) -> dict[str, Any]:
    answers = open_answers(given)
    lengths = of_lengths("open", [(len(answer.prompt), answer.length) for answer in answers])
    wanted = PlanSettings(num_gpu_blocks_override=cache_tokens // 16) if cache_tokens else PlanSettings()
    found = predict(model, "H200", lengths, wanted)
    assert found.settings is not None, found.problem
    rounds = {kind: run(kind, answers, found) for kind in KINDS}
    for kind, each in rounds.items():
        print(
            f"{model:<14} {found.settings.kv_cache_size_tokens:>10,} {kind:<8} {each.modelled_seconds:8.2f} s "
            f"{each.num_steps:>6,} steps {each.num_batched_tokens:>10,} tokens {each.num_preemptions:>5,} preemptions "
            f"{each.num_recomputed_tokens:>8,} recomputed {each.mean_running:7.1f} running",
            flush=True,
        )
    return {
        "model": model,
        "num_requests": given.requests,
        "mean_output_tokens": given.mean_output,
        "lengths": given.lengths,
        "seed": given.seed,
        "num_output_tokens": sum(answer.length for answer in answers),
        "cache_tokens": found.settings.kv_cache_size_tokens,
        "max_num_seqs": found.settings.max_num_seqs,
        "cost_against_arrival": _cost(rounds["unknown"], rounds["arrival"]),
        "cost_against_longest": _cost(rounds["unknown"], rounds["longest"]),
        "rounds": {kind: asdict(each) for kind, each in rounds.items()},
    }


def _cost(unknown: Round, known: Round) -> dict[str, float]:
    return {
        "seconds": round(unknown.modelled_seconds / known.modelled_seconds - 1.0, 4),
        "steps": round(unknown.num_steps / known.num_steps - 1.0, 4),
        "batched_tokens": round(unknown.num_batched_tokens / known.num_batched_tokens - 1.0, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"a shape of headrace plan (default: {', '.join(MODELS)})")
    parser.add_argument("--cache-tokens", type=int, action="append", metavar="N", help="of the KV cache; 0: all")
    parser.add_argument("--requests", type=int, default=2000, metavar="N")
    parser.add_argument("--mean-output", type=int, default=256, metavar="N")
    parser.add_argument("--lengths", choices=list(LENGTHS), default="geometric", help="distribution of the answers'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the records here")
    given = parser.parse_args()
    about = {
        "command": "python benchmarks/unknown_ends_simulated.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "headrace": __version__},
        "machine": cpu_name(),
    }
    found = [
        compare(model, given, cache) | about
        for model in given.model or MODELS
        for cache in given.cache_tokens or CACHE_TOKENS
    ]
    for each in found:
        costs = each["cost_against_arrival"], each["cost_against_longest"]
        print(each["model"], each["cache_tokens"], "unknown costs", *(f"{c['seconds']:+.1%}" for c in costs))
    if given.json:
        given.json.write_text("".join(json.dumps(each) + "\n" for each in found))


if __name__ == "__main__":
    main()
