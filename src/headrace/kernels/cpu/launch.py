"""Compiles kernels with numba and runs them on the threads of torch's own OpenMP pool.

A kernel is a C function of one pointer, to a struct of its arguments. Every thread calls it with the same struct and
claims tasks from the struct's counter until none are left, so a slow core only takes fewer of them. Torch and our
kernels share one pool, because two pools of spinning threads would compete for the cores.
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
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic
from torch import Tensor

from headrace.startup import OnStage, ignore_stage

F = TypeVar("F", bound=Callable[..., Any])
Pointer: TypeAlias = Any  # a flat array without bounds, as mypy sees it inside a kernel
Arguments: TypeAlias = Any  # the struct of the kernel's arguments
Entry: TypeAlias = Callable[[int], None]  # a compiled kernel, given the address of its struct

# Sums may be reordered and fused; infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "fastmath": _FASTMATH}
_FIELDS: dict[str, tuple[Any, Any]] = {
    "pointer": (ctypes.c_void_p, types.intp),
    "integer": (ctypes.c_int64, types.int64),
    "float": (ctypes.c_float, types.float32),
}

MIN_TO_HELP = 4  # kernels to compile; fewer take less time than a process needs to begin
_HELPER = "import headrace.kernels.cpu, headrace.kernels.cpu.launch as launch; launch.compile_from_the_last()"

_EntryType = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def inner(function: F) -> F:
    """Compiles a function that kernels call."""
    compiled: F = njit(**_OPTIONS)(function)
    return compiled


class Recording(Protocol):
    """Gets the launches of a thread, which run as they do otherwise."""

    def add(self, kernel: Kernel, arguments: ctypes.Structure, tensors: Iterable[Tensor]) -> None:
        """`tensors`: those that the arguments point to."""


class _OfThread(threading.local):
    recording: Recording | None = None


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
        arguments = self._struct(0, *[v.data_ptr() if isinstance(v, Tensor) else v for v in values])
        if _of_thread.recording is not None:
            _of_thread.recording.add(self, arguments, (v for v in values if isinstance(v, Tensor)))
        num_threads = min(torch.get_num_threads(), num_tasks)
        if num_threads > 1:
            team()(self.entry, ctypes.addressof(arguments), num_threads)
        else:
            self.entry(ctypes.addressof(arguments))

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
        compiled = cfunc(types.void(types.CPointer(self._record)), cache=True, **_OPTIONS)(self._function)
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
    team()
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


@functools.cache
def team() -> Callable[[Entry, int, int], None]:
    """Returns the function that calls a kernel on several threads: torch's OpenMP pool, or own threads where it has
    none."""
    start = openmp_entry()
    if start is not None:
        return lambda entry, arguments, num_threads: start(entry, arguments, num_threads, 0)
    pool = ThreadPoolExecutor(max_workers=torch.get_num_threads(), thread_name_prefix="headrace-kernel")
    return lambda entry, arguments, num_threads: _consume(pool.map(entry, [arguments] * num_threads))


def _consume(results: Iterable[None]) -> None:
    for _ in results:
        pass


def openmp_entry() -> Callable[..., None] | None:
    """Returns libgomp's GOMP_parallel, or None where torch has no OpenMP."""
    library = _libgomp()
    if library is None:
        return None
    entry: Callable[..., None] = library.GOMP_parallel
    entry.restype = None  # type: ignore[attr-defined]
    entry.argtypes = (_EntryType, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)  # type: ignore[attr-defined]
    return entry


def team_size_address() -> int | None:
    """Returns where the function is that tells a thread how many there are in its team, or None where torch has no
    OpenMP."""
    library = _libgomp()
    return None if library is None else ctypes.cast(library.omp_get_num_threads, ctypes.c_void_p).value


def release_threads() -> None:
    """Ends the threads that wait for work of the calling thread. While libgomp knows of more threads than there are
    cores, each of them goes to sleep as soon as it waits, and is woken up again for each kernel: 20 us instead of 1."""
    library = _libgomp()
    if library is not None and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(_SOFT_PAUSE)


_SOFT_PAUSE = 1  # omp_pause_soft: what the program has set stays


@functools.cache
def _libgomp() -> ctypes.CDLL | None:
    if not torch.backends.openmp.is_available():
        return None
    for path in (*sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")), None):
        try:
            library = ctypes.CDLL(None if path is None else str(path))
            library.GOMP_parallel, library.omp_get_num_threads  # noqa: B018
        except (OSError, AttributeError):
            continue
        return library
    return None


def _pointer_to(element: Any) -> Any:
    """Returns an intrinsic that turns an address into a typed pointer."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(result))

        return result(types.intp), emit

    return pointer


floats = _pointer_to(types.float32)
int32s = _pointer_to(types.int32)
int64s = _pointer_to(types.int64)
uint8s = _pointer_to(types.uint8)


@intrinsic
def after(typing: Any, pointer: Any, distance: Any) -> Any:
    """Returns the pointer to pointer[distance]."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.intp), emit


@intrinsic
def _fetch_add(typing: Any, counter: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, ir.IntType(64)(1), "monotonic")

    return types.int64(counter), emit


@inner
def claim(pointer: Pointer) -> int:
    """Returns the next task that no thread has taken. `next_task` is the first field of every struct."""
    task: int = _fetch_add(pointer)
    return task


@inner
def arguments_at(pointer: Pointer) -> Arguments:
    return carray(pointer, 1)[0]
