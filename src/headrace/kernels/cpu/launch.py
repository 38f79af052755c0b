"""Compiles kernels with numba, and runs them on several threads.

A kernel is a C function of one pointer, to a struct of its arguments. Every thread calls it with the same struct and
claims tasks from the struct's counter until none are left, so a slow core only takes fewer of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from numba import carray, cfunc, types
from torch import Tensor

from headrace.kernels.cpu.native import OPTIONS, Pointer, fetch_add, inner
from headrace.kernels.cpu.team import Team, can_have_helpers
from headrace.startup import OnStage, ignore_stage

Arguments: TypeAlias = Any  # the struct of the kernel's arguments
Entry: TypeAlias = Callable[[int], None]  # a compiled kernel, given the address of its struct

_FIELDS: dict[str, tuple[Any, Any]] = {
    "pointer": (ctypes.c_void_p, types.intp),
    "integer": (ctypes.c_int64, types.int64),
    "float": (ctypes.c_float, types.float32),
}

MIN_TO_HELP = 4  # kernels to compile; fewer take less time than a process needs to begin
_HELPER = "import headrace.kernels.cpu, headrace.kernels.cpu.launch as launch; launch.compile_from_the_last()"

_EntryType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Recording(Protocol):
    """Gets the launches of a thread, which run as they do otherwise."""

    def add(self, kernel: Kernel, arguments: ctypes.Structure, tensors: Iterable[Tensor], *, num_helpers: int) -> None:
        """`tensors`: those that the arguments point to. `num_helpers`: most threads beside the launching one."""


class _OfThread(threading.local):
    """A thread's own: it has its helpers, and records its launches."""

    recording: Recording | None = None

    @functools.cached_property
    def team(self) -> Team:
        return Team()


_of_thread = _OfThread()


@contextlib.contextmanager
def recorded_by(recording: Recording) -> Iterator[None]:
    assert _of_thread.recording is None
    _of_thread.recording = recording
    try:
        yield
    finally:
        _of_thread.recording = None


class Kernel:
    """A kernel, compiled at its first use. Calling it with a value for each field runs it to the end."""

    def __init__(self, function: Callable[[Pointer], None], fields: dict[str, str]) -> None:
        layout = {"next_task": "integer", **fields}
        members = [(name, _FIELDS[kind][0]) for name, kind in layout.items()]
        self._struct = type("Arguments", (ctypes.Structure,), {"_fields_": members})
        self._record = types.Record.make_c_struct([(name, _FIELDS[kind][1]) for name, kind in layout.items()])
        self._function = function

    def __call__(self, *values: Tensor | int | float, num_tasks: int) -> None:
        arguments = self._arguments(values)
        num_helpers = min(torch.get_num_threads(), num_tasks) - 1
        if _of_thread.recording is not None:
            tensors = (v for v in values if isinstance(v, Tensor))
            _of_thread.recording.add(self, arguments, tensors, num_helpers=num_helpers)
        if num_helpers <= 0:
            self.entry(ctypes.addressof(arguments))
        elif can_have_helpers():
            own_team().run(self.address, ctypes.addressof(arguments), num_helpers)
        else:
            _consume(_pool().map(self.entry, [ctypes.addressof(arguments)] * (num_helpers + 1)))

    def run_briefly(self, *values: Tensor | int | float) -> None:
        """Runs a kernel of one short task, which no graph records. It keeps the interpreter's lock: another thread that
        takes it would be waited for."""
        self._brief_entry(ctypes.addressof(self._arguments(values)))

    def _arguments(self, values: Iterable[Tensor | int | float]) -> ctypes.Structure:
        arguments: ctypes.Structure = self._struct(0, *[v.data_ptr() if isinstance(v, Tensor) else v for v in values])
        return arguments

    @functools.cached_property
    def _brief_entry(self) -> Entry:
        entry: Entry = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(self.address)
        return entry

    @property
    def is_on_disk(self) -> bool:
        """Whether numba's cache has it. The directory is named after the sources (`disk_cache.py`), the file after the
        function."""
        name = f"{self._function.__module__.rpartition('.')[2]}.{self._function.__name__}"
        return any(Path(os.environ["NUMBA_CACHE_DIR"]).glob(f"*/{name}-*.nbi"))

    @functools.cached_property
    def entry(self) -> Entry:
        entry: Entry = _EntryType(self.address)
        return entry

    @functools.cached_property
    def address(self) -> int:
        compiled = cfunc(types.void(types.CPointer(self._record)), cache=True, **OPTIONS)(self._function)
        self._keep_alive = compiled
        return int(compiled.address)


_kernels: list[Kernel] = []


def kernel(**fields: str) -> Callable[[Callable[[Pointer], None]], Kernel]:
    """Decorator. `fields` names the kernel's arguments and the kind of each: pointer, integer or float."""

    def register(function: Callable[[Pointer], None]) -> Kernel:
        _kernels.append(Kernel(function, fields))
        return _kernels[-1]

    return register


def compile_all(on_stage: OnStage = ignore_stage) -> None:
    """Compiles every imported kernel, or loads it from disk, so that no step has to."""
    with _helping():
        for number, each in enumerate(_kernels):
            on_stage("compile", number, len(_kernels))
            each.entry  # noqa: B018
    on_stage("compile", len(_kernels), len(_kernels))


def compile_from_the_last() -> None:
    """Compiles kernels that are not on disk yet, the last one first: another process begins with the first one."""
    for each in reversed(_kernels):
        if not each.is_on_disk:
            each.entry  # noqa: B018


@contextlib.contextmanager
def _helping() -> Iterator[None]:
    """Lets a second process compile too, on the first start of a machine: compiling holds the interpreter's lock."""
    num_missing = sum(not each.is_on_disk for each in _kernels)
    if num_missing < MIN_TO_HELP or torch.get_num_threads() < 2:
        yield
        return
    helper = _start_helper()
    try:
        yield
    finally:
        if helper is not None:
            helper.kill()
            helper.wait()


def _start_helper() -> subprocess.Popen[bytes] | None:
    silent = subprocess.DEVNULL
    command = [sys.executable, "-P", "-c", _HELPER]  # without modules of the working directory
    try:
        return subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent)
    except OSError:  # no interpreter to start, or no process left: the kernels are compiled here
        return None


def own_team() -> Team:
    """Returns the helpers of the calling thread."""
    return _of_thread.team


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Threads for systems on which no team can be."""
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="headrace-kernel")


def _consume(results: Iterable[None]) -> None:
    for _ in results:
        pass


@inner
def claim(pointer: Pointer) -> int:
    """Returns the next task that no thread has taken. `next_task` is the first field of every struct."""
    task: int = fetch_add(pointer, 1)
    return task


@inner
def arguments_at(pointer: Pointer) -> Arguments:
    return carray(pointer, 1)[0]
