"""The order in which offline work starts, and how much of it runs at once."""

from __future__ import annotations

import dataclasses

from headrace import SamplingParams
from headrace.engine.offline_order import starting_order, target_concurrency
from headrace.engine.settings import Settings
from tests.engine.test_resolve import on_gpu, settings


def limits(*max_tokens: int | None) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=each) for each in max_tokens]


def fp8_settings() -> Settings:
    resolved = on_gpu(quantization="fp8")
    return dataclasses.replace(resolved, full_rate_seqs=4, max_num_seqs=8)


def test_long_answers_start_first_and_unlimited_ones_before_all() -> None:
    assert starting_order(["a", "b", "c", "d"], limits(5, 70, None, 70)) == [2, 1, 3, 0]


def test_equals_that_begin_alike_start_side_by_side() -> None:
    prompts = [[7, 1], [3, 9], [7, 2], [3, 1]]
    assert starting_order(prompts, limits(4, 4, 4, 4)) == [1, 3, 0, 2]  # what is shared of such short ones is not kept
    assert starting_order(["on b", "an x", "on a"], limits(4, 4, 4)) == [1, 2, 0]
    dictionaries = [{"prompt": "on"}, {"prompt_token_ids": [0]}, {"prompt": "an"}]
    assert starting_order(dictionaries, limits(4, 4, 4)) == [1, 2, 0]


def test_long_prompts_are_ordered_by_the_blocks_that_they_share() -> None:
    head, other = [5] * 40, [5] * 16 + [9] * 24
    prompts = [[*head, *[8] * 40], [*other, 1], [*head, *[7] * 40], [*other, 2], [*head, *[8] * 40, 3]]
    order = starting_order(prompts, limits(*[4] * 5))
    assert order == [2, 0, 4, 1, 3]


def test_what_cannot_be_compared_keeps_its_place() -> None:
    odd = ["a", 5, [1], (0,), None]
    assert starting_order(odd, limits(4, 4, 4, 9, 4)) == [3, 0, 1, 2, 4]  # type: ignore[arg-type]


def test_the_work_is_levelled_to_the_length_of_its_longest_answer() -> None:
    even = limits(*[100] * 50)
    assert target_concurrency(even, fp8_settings()) == 50
    one_long = limits(1000, *[100] * 60)
    assert target_concurrency(one_long, fp8_settings()) == 7
    assert target_concurrency(limits(1000, 10, 10), fp8_settings()) == 4  # what the full rate needs


def test_without_limits_or_on_a_cpu_nothing_is_levelled() -> None:
    assert target_concurrency(limits(None, None), fp8_settings()) == 4
    assert target_concurrency(limits(10, 1000), settings()) is None
    assert target_concurrency([], fp8_settings()) is None
