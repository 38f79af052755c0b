"""Threads that run kernels together with the thread that launches them.

    the launching thread                           a helper
    opens the team for a kernel ─────────────────▶ enters, unless enough have
    runs tasks until none is left                  runs tasks until none is left
    closes it: nobody enters any more              leaves
    waits until nobody is inside

So a launch ends when its tasks are done. It does not wait for a helper that has not entered, because another program
has its core: the barriers of OpenMP do, which on a busy machine takes a time slice for each kernel. Helpers look for
work for a short time and then sleep, on a futex: Linux only.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import cfunc, types

from headrace.kernels.cpu.native import (
    OPTIONS,
    Pointer,
    call_c,
    call_kernel,
    exchange,
    fetch_add,
    inner,
    int64s,
    look_at,
    pause,
    replaced,
    system_call,
)

MAX_HELPERS = (1 << 16) - 1
# Words of a team's memory. What different threads write is 64 bytes apart.
_STATE, _ENTRY, _ARGUMENTS, _NUM_SLEEPING, _SYSCALL, _FUTEX, _SCHED_YIELD, _NUM_WORDS = 0, 1, 2, 8, 16, 17, 18, 24
# The state is one word, so that a helper enters in one step: how many are inside, how many may be, whether it is open,
# and the number of the launch. These are the first bits of each.
_MOST, _OPEN, _LAUNCH = 16, 32, 33
_LAUNCH_NUMBERS = (1 << 30) - 1
_ENDED = -1
_UPPER_HALF = 4  # bytes: sleepers compare the number of the launch and whether it is open
_FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}  # the number of the system call
_WAIT, _WAKE, _ALL = 128, 129, (1 << 31) - 1  # for threads of one process
_LOOKS = 10_000  # about 125 us, longer than the host usually needs between two kernels
_ALIGNMENT = 64

Words = npt.NDArray[np.int64]
_NativeFunction = Callable[..., None]


class Team:
    """The helpers of one thread. They end when it does."""

    def __init__(self) -> None:
        self._memory = _aligned_words(_NUM_WORDS)
        self._memory[_SYSCALL] = _address_of("syscall")
        self._memory[_SCHED_YIELD] = _address_of("sched_yield")
        self._memory[_FUTEX] = _FUTEX_CALLS[platform.machine()]
        self._address = self._memory.ctypes.data
        self._run_one, self._run_all = _native(_run_one, 4), _native(_run_all, 5)
        _native(_help, 1), _native(_end_helpers, 1)  # so that neither is compiled when it is needed
        self._num_helpers = 0
        weakref.finalize(self, _end, self._memory).atexit = False

    def run(self, entry: int, arguments: int, num_helpers: int) -> None:
        """Runs a kernel, given as the addresses of its function and of its arguments."""
        self._grow(num_helpers)
        self._run_one(self._address, entry, arguments, num_helpers)

    def run_all(self, entries: Words, arguments: Words, nums_helpers: Words) -> None:
        """Runs kernels one after the other. Their arguments may be used again."""
        self._grow(int(nums_helpers.max(initial=0)))
        addresses = entries.ctypes.data, arguments.ctypes.data, nums_helpers.ctypes.data
        self._run_all(self._address, *addresses, len(entries))

    def _grow(self, num_helpers: int) -> None:
        while self._num_helpers < min(num_helpers, MAX_HELPERS):
            self._num_helpers += 1
            threading.Thread(target=_help_until_end, args=(self._memory,), name="headrace-kernel", daemon=True).start()


def can_have_helpers() -> bool:
    return sys.platform == "linux" and platform.machine() in _FUTEX_CALLS


def _aligned_words(num_words: int) -> Words:
    memory = np.zeros(num_words + _ALIGNMENT // 8, np.int64)
    start = -memory.ctypes.data % _ALIGNMENT // 8
    return memory[start : start + num_words]


def _address_of(name: str) -> int:
    """Of a function of C's library."""
    address = ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value
    assert address is not None
    return address


def _help_until_end(memory: Words) -> None:
    _native(_help, 1)(memory.ctypes.data)


def _end(memory: Words) -> None:
    _native(_end_helpers, 1)(memory.ctypes.data)


@functools.cache
def _native(function: _NativeFunction, num_arguments: int) -> _NativeFunction:
    """Compiles a function of integers. It runs without the interpreter's lock."""
    compiled = cfunc(types.void(*[types.int64] * num_arguments), cache=True, **OPTIONS)(function)
    native: _NativeFunction = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(compiled.address)
    return native


def _run_one(memory: int, entry: int, arguments: int, num_helpers: int) -> None:
    _run(int64s(memory), memory, entry, arguments, num_helpers)


def _run_all(memory: int, entries: int, arguments: int, nums_helpers: int, num_launches: int) -> None:
    for i in range(num_launches):
        struct = int64s(arguments)[i]
        _run(int64s(memory), memory, int64s(entries)[i], struct, int64s(nums_helpers)[i])
        int64s(struct)[0] = 0  # the next task of the next run


@inner
def _run(team: Pointer, memory: int, entry: int, arguments: int, num_helpers: int) -> None:
    if num_helpers <= 0:
        call_kernel(entry, arguments)
        return
    team[_ENTRY], team[_ARGUMENTS] = entry, arguments
    launch = ((team[_STATE] >> _LAUNCH) + 1) & _LAUNCH_NUMBERS
    exchange(team, (launch << _LAUNCH) + (1 << _OPEN) + (num_helpers << _MOST))
    if look_at(int64s(memory + 8 * _NUM_SLEEPING)) > 0:
        _wake(team, memory)
    call_kernel(entry, arguments)
    num_looks = 0
    state = fetch_add(team, -(1 << _OPEN))
    while state & MAX_HELPERS > 0:
        if num_looks < _LOOKS:
            pause()
            num_looks += 1
        else:
            call_c(team[_SCHED_YIELD])
        state = look_at(team)


@inner
def _wake(team: Pointer, memory: int) -> None:
    system_call(team[_SYSCALL], team[_FUTEX], memory + _UPPER_HALF, _WAKE, _ALL)


def _end_helpers(memory: int) -> None:
    exchange(int64s(memory), _ENDED)
    _wake(int64s(memory), memory)


def _help(memory: int) -> None:
    team, num_sleeping = int64s(memory), int64s(memory + 8 * _NUM_SLEEPING)
    last, num_looks = -1, 0
    state = look_at(team)
    while state != _ENDED:
        launch = state >> _LAUNCH
        may_enter = (state >> _OPEN) & 1 == 1 and state & MAX_HELPERS < (state >> _MOST) & MAX_HELPERS
        if may_enter and launch != last:
            if replaced(team, state, state + 1):
                call_kernel(team[_ENTRY], team[_ARGUMENTS])
                fetch_add(team, -1)
                last, num_looks = launch, 0
        elif num_looks < _LOOKS:
            pause()
            num_looks += 1
        else:
            fetch_add(num_sleeping, 1)  # before it looks again: whoever opens the team after that wakes it
            if look_at(team) >> 32 == state >> 32:
                system_call(team[_SYSCALL], team[_FUTEX], memory + _UPPER_HALF, _WAIT, (state >> 32) & 0xFFFFFFFF)
            fetch_add(num_sleeping, -1)
            num_looks = 0
        state = look_at(team)
