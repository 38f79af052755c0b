"""How a plan is divided over workers."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.planner import Planner
from headrace.sched import SchedulerLimits
from headrace.types import SamplingParams

BLOCK = 4
LIMITS = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=BLOCK)


def work(index: int, tokens: list[int]) -> Work:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    return Work(PlainReply(index), params, b"".join(token.to_bytes(4, "little") for token in tokens))


def planner_of(sizes: list[int], num_workers: int) -> tuple[Planner, list[int]]:
    """A planner with prefix groups of these sizes, and the group of each line."""
    planner = Planner(LIMITS, num_workers=num_workers)
    groups: list[int] = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            planner.add(work(len(groups), [group + 1] * 2 * BLOCK + [len(groups) + 1_000]))
            groups.append(group)
    planner.end_input()
    return planner, groups


def test_workers_in_turn_get_whole_groups() -> None:
    planner, groups = planner_of([40, 40, 40, 40], 4)
    taken: dict[int, list[int]] = {worker: [] for worker in range(4)}
    for _ in range(40):
        for worker in range(4):
            taken[worker].append(groups[planner.take(worker).reply.index])
    assert planner.peek() is None
    assert sorted(len(set(of_worker)) for of_worker in taken.values()) == [1, 1, 1, 1]


def test_an_idle_worker_takes_groups_that_another_has_not_started() -> None:
    planner, groups = planner_of([10, 10, 10, 10], 2)
    first = [groups[planner.take(0).reply.index] for _ in range(5)]
    second = [groups[planner.take(1).reply.index] for _ in range(25)]
    assert set(first).isdisjoint(second[:20])
    assert Counter(Counter(second[:20]).values()) == Counter({10: 2}), "two whole groups"


def test_the_last_group_is_split() -> None:
    planner, _ = planner_of([64], 2)
    assert planner.take(0).reply.index != planner.take(1).reply.index
    taken = 2
    while planner.peek(taken % 2) is not None:
        planner.take(taken % 2)
        taken += 1
    assert taken == 64


def test_the_lines_of_a_worker_that_was_released_go_to_the_others() -> None:
    planner, groups = planner_of([8, 8], 2)
    first = groups[planner.take(0).reply.index]
    assert groups[planner.take(1).reply.index] != first
    planner.release(0)
    rest = [groups[planner.take(1).reply.index] for _ in range(14)]
    assert rest == [1 - first] * 7 + [first] * 7
    assert planner.peek(0) is None


@pytest.mark.parametrize("seed", range(20))
def test_every_line_is_taken_once_whoever_takes_it(seed: int) -> None:
    random = Random(seed)
    num_workers = random.randint(1, 5)
    planner = Planner(LIMITS, num_workers=num_workers)
    added, taken = 0, []
    for _ in range(600):
        action = random.random()
        if action < 0.5 and added < 200:
            prefix = [random.randint(1, 3)] * BLOCK * random.randint(0, 3)
            planner.add(work(added, [*prefix, added + 1_000]))
            added += 1
        elif action < 0.55:
            planner.release(random.randrange(num_workers))
        elif planner.peek(worker := random.randrange(num_workers)) is not None:
            index = planner.take(worker).reply.index
            taken.append(index)
            planner.finished(index, None)
    planner.end_input()
    while planner.peek(worker := random.randrange(num_workers)) is not None:
        taken.append(planner.take(worker).reply.index)
    assert sorted(taken) == list(range(added))
