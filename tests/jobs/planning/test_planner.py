from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.plain_lines import PlainReply
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.answer_lengths import MIN_FINISHED, NUM_PROBES, AnswerLengths
from headrace.jobs.planning.duplicates import Duplicates, RequestKeys
from headrace.jobs.planning.planner import Planner
from headrace.jobs.planning.probes import MIN_PROBED
from headrace.jobs.planning.workload import Window
from headrace.sched import SchedulerLimits
from headrace.sched.sequence import sequence_seed
from headrace.types import SamplingParams

untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LIMITS = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=4096, num_blocks=4096, block_size=2)


def work(index: int, tokens: Iterable[int], *, salt: str | None = None, **params: object) -> Work:
    own = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
    seed = sequence_seed(0, index + 1) if own.seed is None and not own.is_greedy else None
    prompt = np.array(list(tokens), np.int32).tobytes()
    return Work(PlainReply(index), own, prompt, cache_salt=salt, seed=seed)


def output(answer_len: int = 3, *, prompt_len: int = 2, **fields: object) -> LineOutput:
    return LineOutput(prompt_len, (LineAnswer(0, "", answer_len, "stop", **fields),))  # type: ignore[arg-type]


def planner(**options: object) -> Planner:
    return Planner(LIMITS, **options)  # type: ignore[arg-type]


def take_all(plan: Planner) -> list[int]:
    taken = []
    while plan.peek() is not None:
        taken.append(plan.take().reply.index)
    return taken


lines = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
        st.sampled_from([0.0, 1.0]),
        st.sampled_from([None, 4, 4000]),
        st.sampled_from([None, 7]),
    ),
    max_size=40,
)


@untimed
@given(lines, st.data())
def test_every_line_is_answered_exactly_once(
    given_lines: list[tuple[list[int], float, int | None, int | None]], data: st.DataObject
) -> None:
    """In whatever order lines are added, taken and finished."""
    plan, waiting, running = planner(), list(enumerate(given_lines)), []
    answered: list[int] = []
    has_ended = False
    while waiting or running or plan.peek() is not None or not has_ended:
        moves = ["add"] * bool(waiting) + ["take"] * (plan.peek() is not None) + ["finish"] * bool(running)
        moves += ["end"] * (not waiting and not has_ended)
        match data.draw(st.sampled_from(moves)):
            case "add":
                index, (tokens, temperature, max_tokens, seed) = waiting.pop(0)
                own = {"seed": seed} if seed else {}
                item = work(index, tokens, temperature=temperature, max_tokens=max_tokens, **own)
                answered += [index] * (plan.add(item) is not None)
            case "take":
                running.append(plan.take().reply.index)
            case "finish":
                index = running.pop(data.draw(st.integers(0, len(running) - 1)))
                done = output() if data.draw(st.booleans()) else None
                answered += [index, *(line.reply.index for line in plan.finished(index, done))]
            case "end":
                plan.end_input()
                has_ended = True
    assert sorted(answered) == list(range(len(given_lines)))
    assert plan.num_held == 0


@untimed
@given(lines)
def test_identical_deterministic_lines_are_executed_once(
    given_lines: list[tuple[list[int], float, int | None, int | None]],
) -> None:
    plan = planner()
    for index, (tokens, temperature, max_tokens, seed) in enumerate(given_lines):
        own = {"seed": seed} if seed else {}
        plan.add(work(index, tokens, temperature=temperature, max_tokens=max_tokens, **own))
    plan.end_input()
    taken = [given_lines[index] for index in take_all(plan)]
    deterministic = [(tuple(t), seed if temp else None, most) for t, temp, most, seed in taken if temp == 0 or seed]
    assert len(deterministic) == len(set(deterministic))
    sampled = [line for line in given_lines if line[1] and not line[3]]
    assert len(taken) == len(deterministic) + len(sampled)


@untimed
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=30), st.integers(1, 9))
def test_prompts_keep_their_tokens_and_groups_stay_whole(prompts: list[list[int]], num_early: int) -> None:
    plan = planner()
    for index, tokens in enumerate(prompts):
        plan.add(work(index, tokens, ignore_eos=True))
    early = []
    while plan.peek() is not None and len(early) < num_early:
        early.append(plan.take())
    plan.end_input()  # a new plan continues with the group that runs
    rest = []
    while plan.peek() is not None:
        rest.append(plan.take())
    for item in [*early, *rest]:
        assert item.token_ids.tolist() == prompts[item.reply.index]
        assert item.token_ids.flags.writeable  # torch needs writable arrays
    firsts = [tuple(t) for w in [*early, *rest] if len(t := w.token_ids.tolist()[:2]) == 2]
    runs = [first for place, first in enumerate(firsts) if place == 0 or firsts[place - 1] != first]
    assert len(runs) == len(set(runs))


@untimed
@given(st.integers(1, 20), st.integers(1, 60), st.lists(st.integers(0, 3), max_size=120))
def test_the_window_bounds_what_is_held(num_lines: int, num_tokens: int, tokens: list[int]) -> None:
    plan, answered = planner(window=Window(num_lines, num_tokens)), 0
    for index, token in enumerate(tokens):
        while not plan.has_room:
            taken = plan.take()
            answered += 1 + len(plan.finished(taken.reply.index, None))
        plan.add(work(index, [token, token, token], temperature=float(index % 2)))
        assert plan.num_held <= num_lines
        assert plan.left().num_prompt_tokens <= num_tokens + 3
    plan.end_input()
    for index in take_all(plan):
        answered += 1 + len(plan.finished(index, None))
    assert answered == len(tokens)


# Order.


def test_a_long_answer_starts_before_the_end() -> None:
    plan = planner()
    for index in range(40):  # forty short ones last for 80 steps
        plan.add(work(index, [1, 1, index], max_tokens=8, ignore_eos=True))
    plan.add(work(40, [2, *range(3000)], max_tokens=90, ignore_eos=True))  # a long prompt: the tree puts it last
    assert plan.take().reply.index < 40
    plan.end_input()
    assert take_all(plan)[0] == 40


def test_an_answer_that_ends_before_the_rest_does_keeps_its_place() -> None:
    plan = planner()
    for index in range(400):
        plan.add(work(index, [1, 1, index], max_tokens=8, ignore_eos=True))
    plan.add(work(400, [2, *range(3000)], max_tokens=70, ignore_eos=True))
    plan.end_input()
    place = take_all(plan).index(400)
    assert 300 < place < 390


def test_lines_that_come_later_join_their_group() -> None:
    plan = planner()
    for index in range(4):
        plan.add(work(index, [index % 2, index % 2, index]))
    first = plan.take().token_ids[0]
    for index in range(4, 10):
        plan.add(work(index, [index % 2, index % 2, index]))
    prefixes = [plan.take().token_ids[0] for _ in range(4)]
    assert prefixes == [first] * 4


def test_the_first_lines_wait_for_others_to_choose_from() -> None:
    plan = planner()
    for index in range(3):
        plan.add(work(index, range(40)))
    taken = [plan.take(), plan.take()]
    assert not plan.may_start(1, num_in_flight=len(taken), max_in_flight=16)  # 80 tokens exceed one step
    assert plan.may_start(1, num_in_flight=0, max_in_flight=16)
    for index in range(3, 10):
        plan.add(work(index, range(40)))
    assert plan.may_start(1, num_in_flight=len(taken), max_in_flight=16)
    assert not plan.may_start(3, num_in_flight=14, max_in_flight=16)
    assert not plan.may_start(1, num_in_flight=14, max_in_flight=16)
    plan.end_input()
    assert plan.may_start(2, num_in_flight=14, max_in_flight=16)


def test_later_lines_of_a_slow_input_start_at_once() -> None:
    plan = planner()
    for index in range(5):
        plan.add(work(index, range(40)))
        plan.take()
    plan.add(work(5, range(40)))
    assert plan.may_start(1, num_in_flight=4, max_in_flight=5)
    assert not plan.may_start(1, num_in_flight=4, max_in_flight=6)


def test_a_few_of_each_large_prefix_group_start_early() -> None:
    plan = planner()
    size = MIN_PROBED
    for index in range(2 * size):
        plan.add(work(index, [index % 2, index % 2, index]))
    early = [plan.take().token_ids[0] for _ in range(2 * NUM_PROBES)]
    assert early.count(0) == early.count(1) == NUM_PROBES


def test_answers_of_known_length_need_no_early_start() -> None:
    plan = planner()
    for index in range(2 * MIN_PROBED):
        plan.add(work(index, [index % 2, index % 2, index], ignore_eos=True))
    early = [plan.take().token_ids[0] for _ in range(2 * NUM_PROBES)]
    assert len(set(early)) == 1


def test_work_left_counts_shared_prompts_once() -> None:
    plan = planner()
    for index in range(4):
        plan.add(work(index, [5, 5, 5, 5, index], max_tokens=10, ignore_eos=True, n=2))
    plan.end_input()
    left = plan.left()
    assert (left.num_lines, left.num_prompt_tokens, left.num_decode_tokens, left.longest_waiting) == (4, 8, 80, 10)
    plan.take()
    left = plan.left()
    assert (left.num_lines, left.num_running_tokens, left.num_running_decode_tokens) == (3, 5, 20)
    assert left.longest_running == 10


def test_a_stopped_job_keeps_only_taken_lines_and_their_duplicates() -> None:
    plan = planner()
    for index, token in enumerate([1, 1, 2, 2, 3]):
        plan.add(work(index, [token], temperature=0))
    running = plan.take().reply.index
    plan.add(work(5, [4], temperature=0))
    plan.drop_waiting()
    assert plan.peek() is None
    assert plan.num_held == 1 + (running in (0, 2))
    assert len(plan.finished(running, output())) == (running in (0, 2))
    assert (plan.num_held, plan.left().num_decode_tokens) == (0, 0)
    plan.add(work(6, [4], temperature=0))
    assert plan.take().reply.index == 6


# Lengths.


def test_lengths_are_the_limits_until_enough_have_finished() -> None:
    lengths = AnswerLengths()
    kind = {"prefix_group": 1, "max_tokens": 100}
    assert lengths.expected(**kind, limit=100) == 100
    for _ in range(MIN_FINISHED):
        lengths.learn(25, **kind, limit=100)
    assert lengths.expected(**kind, limit=100) == 25
    assert lengths.expected(**kind, limit=12) == 12
    assert lengths.expected(prefix_group=2, max_tokens=100, limit=100) == 25  # from others with the same limit
    assert (
        lengths.expected(prefix_group=2, max_tokens=50, limit=50) == 12.5
    )  # from the share of theirs that others reached


def test_a_prefix_group_with_few_finished_answers_is_expected_to_be_long() -> None:
    lengths = AnswerLengths()
    for _ in range(MIN_FINISHED):
        lengths.learn(20, prefix_group=1, max_tokens=None, limit=1000)
    for _ in range(NUM_PROBES):
        lengths.start(prefix_group=2, max_tokens=None)
    assert lengths.expected(prefix_group=2, max_tokens=None, limit=1000) == 1000


# Duplicates.


def key(item: Work) -> bytes | None:
    return RequestKeys().key_of(item)


def test_requests_are_the_same_by_tokens_parameters_seed_and_salt() -> None:
    key = RequestKeys().key_of
    base = key(work(0, [1, 2], temperature=0))
    assert base is not None
    assert key(work(9, [1, 2], temperature=0.0)) == base
    assert key(work(9, [1, 2], temperature=0, seed=4)) == base  # at temperature 0 the seed changes nothing
    others = [
        work(1, [1, 3], temperature=0),
        work(1, [1, 2], temperature=0, max_tokens=9),
        work(1, [1, 2], temperature=0, stop=["."]),
        work(1, [1, 2], temperature=0, logit_bias={3: 1.0}),
        work(1, [1, 2], temperature=0, logprobs=1),
        work(1, [1, 2], temperature=0, salt="a"),
        work(1, [1, 2], temperature=1, seed=4),
        work(1, [1, 2], temperature=1, seed=5),
    ]
    assert len({base, *map(key, others)}) == 9


def test_a_line_sampled_without_a_seed_in_the_line_has_no_duplicates() -> None:
    assert key(work(3, [1, 2])) is None
    assert key(work(3, [1, 2], seed=None)) is None
    assert key(work(3, [1, 2], seed=11)) == key(work(4, [1, 2], seed=11)) is not None


def test_an_answer_is_kept_for_later_lines() -> None:
    plan = planner()
    plan.add(work(0, [1, 2], temperature=0))
    plan.take()
    done = output(5)
    assert plan.finished(0, done) == []
    assert plan.add(work(1, [1, 2], temperature=0)) is done
    saved = plan.savings
    assert (saved.num_lines, saved.num_prompt_tokens, saved.num_decode_tokens) == (1, 2, 5)


def test_a_failure_is_not_kept_and_saves_nothing() -> None:
    plan = planner()
    plan.add(work(0, [1, 2], temperature=0))
    plan.add(work(1, [1, 2], temperature=0))
    plan.take()
    assert [line.reply.index for line in plan.finished(0, None)] == [1]
    assert plan.add(work(2, [1, 2], temperature=0)) is None
    assert plan.savings.num_lines == 0
    assert plan.take().reply.index == 2


def test_kept_answers_are_bounded_and_the_oldest_are_dropped_first() -> None:
    kept = Duplicates(max_kept_tokens=20)
    for index in range(10):
        kept.add_original(bytes([index]), index)
        kept.finished(index, output(3))
        kept.kept_answer(b"\x00")  # used, so it stays
    assert kept.num_keys == 3
    assert kept.kept_answer(b"\x00") is not None and kept.kept_answer(b"\x01") is None
    kept.add_original(b"large", 99)
    kept.finished(99, output(1000))
    assert kept.kept_answer(b"large") is None
    kept.add_original(b"detailed", 100)
    kept.finished(100, output(1, logprobs=()))
    assert kept.kept_answer(b"detailed") is None
