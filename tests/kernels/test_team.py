"""Threads that run kernels together."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from headrace.kernels.cpu.launch import Kernel, arguments_at, claim
from headrace.kernels.cpu.native import Pointer, fetch_add, int64s, look_at, pause
from headrace.kernels.cpu.team import Team, Words, can_have_helpers

pytestmark = pytest.mark.skipif(not can_have_helpers(), reason="this system has no team of threads")

GO, NUM_WAITING, NUM_RUN, COUNTS = 0, 8, 16, 24  # words that the kernels below use


def unregistered(function: Callable[[Pointer], None]) -> Kernel:
    """A kernel that no start compiles."""
    return Kernel(function, {"words": "pointer", "num_tasks": "integer"})


@unregistered
def _count(pointer: Pointer) -> None:
    """Counts how often each task is run."""
    a = arguments_at(pointer)
    task = claim(pointer)
    while task < a.num_tasks:
        fetch_add(int64s(a.words + 8 * (COUNTS + task)), 1)
        task = claim(pointer)


@unregistered
def _meet(pointer: Pointer) -> None:
    """Each task waits until all are being run: each by a thread of its own."""
    a = arguments_at(pointer)
    if claim(pointer) < a.num_tasks:
        fetch_add(int64s(a.words + 8 * NUM_WAITING), 1)
        while look_at(int64s(a.words + 8 * NUM_WAITING)) < a.num_tasks:
            pause()


@unregistered
def _after_all(pointer: Pointer) -> None:
    """Adds what the tasks of `_count` have left, and sets it back: wrong if one of them is still being run."""
    a = arguments_at(pointer)
    if claim(pointer) == 0:
        words = int64s(a.words)
        for task in range(a.num_tasks):
            words[NUM_RUN] += words[COUNTS + task]
            words[COUNTS + task] = 0


def arguments_of(each: Kernel, words: Words, num_tasks: int) -> ctypes.Structure:
    found: ctypes.Structure = each._struct(0, words.ctypes.data, num_tasks)
    return found


def run(team: Team, each: Kernel, words: Words, num_tasks: int, num_helpers: int) -> None:
    arguments = arguments_of(each, words, num_tasks)
    team.run(each.address, ctypes.addressof(arguments), num_helpers)


@pytest.fixture
def words() -> Words:
    return np.zeros(COUNTS + 1000, np.int64)


@pytest.mark.parametrize("num_helpers", [0, 1, 3, 12])
def test_each_task_is_run_once(words: Words, num_helpers: int) -> None:
    team = Team()
    for _ in range(50):
        run(team, _count, words, 1000, num_helpers)
    assert (words[COUNTS:] == 50).all()


def test_as_many_threads_take_part_as_may(words: Words) -> None:
    run(Team(), _meet, words, 4, 3)  # ends only if four threads meet
    assert words[NUM_WAITING] == 4


def test_no_more_helpers_take_part_than_may(words: Words) -> None:
    team = Team()
    run(team, _meet, words, 6, 5)  # so that there are five
    words[NUM_WAITING] = 0
    launch = threading.Thread(target=run, args=(team, _meet, words, 3, 1), daemon=True)
    launch.start()  # two threads wait for a third one
    pause_between_looks = threading.Event()
    while words[NUM_WAITING] < 2:
        pause_between_looks.wait(0.001)
    pause_between_looks.wait(0.02)  # time for a third one, which must not come
    assert words[NUM_WAITING] == 2
    words[NUM_WAITING] = 3
    launch.join(timeout=60)
    assert not launch.is_alive()


def test_a_launch_begins_when_the_one_before_has_ended(words: Words) -> None:
    team, num_rounds, num_tasks = Team(), 300, 64
    pair = [arguments_of(_count, words, num_tasks), arguments_of(_after_all, words, num_tasks)]
    entries = np.array([_count.address, _after_all.address] * num_rounds)
    arguments = np.array([ctypes.addressof(each) for each in pair] * num_rounds)
    team.run_all(entries, arguments, np.full(len(entries), 3))
    assert words[NUM_RUN] == num_rounds * num_tasks
    assert not words[COUNTS:].any()


def test_helpers_that_sleep_wake_up(words: Words) -> None:
    team = Team()
    for _ in range(3):
        words[NUM_WAITING] = 0
        run(team, _meet, words, 3, 2)
        threading.Event().wait(0.02)  # far longer than they look for work


def test_a_launch_whose_helpers_get_no_core_is_run_by_its_thread(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.cpu.team.threading.Thread", lambda **_: NeverStarted())
    run(Team(), _count, words, 1000, 3)
    assert (words[COUNTS:] == 1).all()


class NeverStarted:
    """A thread that gets no core."""

    def start(self) -> None:
        pass


def test_helpers_end_with_their_team(words: Words) -> None:
    before = set(threading.enumerate())
    team = Team()
    run(team, _meet, words, 3, 2)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    for helper in helpers:
        helper.join(timeout=60)
        assert not helper.is_alive()


def test_helpers_of_a_thread_end_with_it() -> None:
    found: list[threading.Thread] = []

    def launch() -> None:
        from headrace.kernels.cpu.launch import own_team

        before = set(threading.enumerate())
        run(own_team(), _meet, np.zeros(COUNTS + 8, np.int64), 2, 1)
        found.extend(set(threading.enumerate()) - before)

    _in_a_thread(launch)
    assert len(found) == 1
    found[0].join(timeout=60)
    assert not found[0].is_alive()


def _in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
