"""Named workloads have the lengths of the benchmarks' requests."""

from __future__ import annotations

import pytest

from headrace.bench.workloads import WorkloadSpec, build
from headrace.errors import ConfigError
from headrace.plan.workload import NAMED, RequestLengths, Workload, named, of_lengths, uniform


@pytest.mark.parametrize("name", NAMED)
def test_a_named_workload_has_the_lengths_of_the_benchmark(name: str) -> None:
    tasks = build(WorkloadSpec(name=name)).requests
    lengths = [(request.prompt_len, request.output_len) for request in named(name).requests]
    assert lengths == [(task.num_prompt_tokens, task.output_len) for task in tasks]


def test_the_prefix_groups_are_those_of_the_benchmark() -> None:
    numbers: dict[tuple[int, ...], int] = {}
    tasks = build(WorkloadSpec(name="prefix")).requests
    of_tasks = [numbers.setdefault(tuple((task.prompt or [])[:1536]), len(numbers)) for task in tasks]
    numbers_of_groups: dict[int, int] = {}
    of_plan = [
        numbers_of_groups.setdefault(request.prefix_group, len(numbers_of_groups))
        for request in named("prefix").requests
    ]
    assert of_plan == of_tasks


def test_lengths_vary_within_the_spread() -> None:
    workload = uniform(100, 40, num_requests=500, spread=0.5)
    prompts, outputs, _, _ = workload.columns()
    assert prompts.min() >= 50 and prompts.max() <= 150 and prompts.std() > 20
    assert outputs.mean() == pytest.approx(40, rel=0.1)


def test_a_workload_may_be_given_by_its_lengths() -> None:
    workload = of_lengths("mine", [(10, 5), (20, 5, 3, 16)])
    assert workload.requests[1] == RequestLengths(20, 5, 3, 16)
    assert workload.max_len == 25


@pytest.mark.parametrize("requests", [(), (RequestLengths(0, 5),), (RequestLengths(5, 0),)])
def test_a_request_has_at_least_one_token_in_and_out(requests: tuple[RequestLengths, ...]) -> None:
    with pytest.raises(ConfigError):
        Workload("bad", requests)


def test_an_unknown_workload_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chat'"):
        named("chats")
