"""Compiles the kernels of a start in other processes while torch is imported and the weights are read.

    start ─▶ import torch, ask the GPU ─▶ resolve ─▶ load weights ─▶ wait ─▶ measure, capture: all kernels are cached
      │                                      │ order                  ▲
      └─▶ child: import the same ────────────┴─▶ dry start ─▶ note ───┘
                                                     └─▶ forks: compile each kernel as soon as it is found

The child begins before it is known whether it is needed, unless a hint says that it is not; if it is not, it is killed.
A note in the cache says which starts are complete (`compile_notes.py`). A child that fails costs nothing but time: what
it has not compiled is compiled when it is first launched.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from time import time
from typing import IO

import msgspec

from headrace.config import EngineConfig
from headrace.engine.compile_notes import hint_of, note_of, write_hint
from headrace.engine.dry_start import DryStart
from headrace.engine.process.engine_process import child_environment
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.garbage import collecting_less_often
from headrace.hardware import GpuFacts, MachineFacts, read_facts
from headrace.kernels.triton_setup import set_up_meanwhile
from headrace.models import ModelSpec
from headrace.parent_death import die_with
from headrace.startup import OnStage, mark

PROCESSES_VARIABLE = "HEADRACE_COMPILE_PROCESSES"  # 0: kernels are compiled one by one, when they are first launched
AUTOMATIC = "auto"  # processes by the number of cores; the default
_MAX_PROCESSES = 16
STALL_S = 120.0  # without a compiled kernel, after which the start goes on by itself; the slowest takes about 10 s
_LENGTH = struct.Struct("<I")  # before an order: a fork of the parent could keep the pipe open, so its end is no mark
_MIN_CORES = 4  # with fewer, the child would take time from the start itself

# What a dry start and a compiler import, before the parent knows what is to be compiled.
_MODULES = (
    "torch",
    "headrace.kernels.gpu.compile_pool",
    "headrace.models.weights.load",
    "headrace.models.weights.load_encoder",
    "headrace.models.weights.shapes_only",
    "headrace.runner.gpu.encoder_runner",
    "headrace.runner.gpu.gpu_runner",
    "headrace.runner.gpu.meta_gpu",
    "headrace.kernels.gpu.allowed_tokens",
    "headrace.kernels.gpu.scores",
)

Progress = Callable[[int, int], None]  # kernels compiled, and their number as far as it is known
Tell = Callable[[str], None]  # gets what has just ended

_logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What the child is to compile."""

    config: EngineConfig
    gpu: GpuFacts
    num_processes: int


class Told(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line that the child writes: how far it is, or what has ended when."""

    done: int = 0
    total: int = 0
    name: str = ""
    at: float = 0.0  # `time.time`


def compile_start(
    config: EngineConfig, gpu: GpuFacts, *, num_processes: int, progress: Progress, tell: Tell = lambda name: None
) -> int:
    """Compile the kernels of a start into Triton's cache, and note there that it is complete. Returns their number.
    Only for a process that does nothing else."""
    from headrace.kernels.gpu.architectures import Architecture
    from headrace.kernels.gpu.compile_pool import CompilePool
    from headrace.kernels.gpu.launches import set_target

    start = DryStart.of(config, gpu)
    spec = start.checkpoint.spec
    note = note_of(spec, start.settings, gpu)
    note.parent.mkdir(parents=True, exist_ok=True)
    with note.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several engines that start at once, one compiles
        if not note.exists():
            set_target(Architecture(gpu.capability))  # for the forks too
            with CompilePool(num_processes, progress, lambda name, s: tell(f"compiled {name} ({s:.2f} s)")) as pool:
                tell("forked")
                start.launches(pool.add)
                tell("dry start")
                num_kernels = pool.finish()
            note.write_text(f"{num_kernels}\n")
    write_hint(config, spec)
    return int(note.read_text())


class CompileAhead:
    """The parent's end: owns the child."""

    def __init__(self) -> None:
        """Let the child import what it needs. Raises OSError."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`; a pipe that nobody reads could fill up
        environment = child_environment() | {"CUDA_VISIBLE_DEVICES": ""}  # it needs no GPU
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(os.getpid())],
                bufsize=0,  # `wait` asks the pipe whether there is a line
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        except OSError:
            self._log.close()
            raise
        assert self._process.stdin is not None
        self._stdin: IO[bytes] = self._process.stdin

    def compile(self, order: Order) -> None:
        """Let the child compile. Does not wait: the pipe has room for an order."""
        encoded = msgspec.msgpack.encode(order)
        with suppress(OSError):  # it has ended; `wait` says why
            self._stdin.write(_LENGTH.pack(len(encoded)) + encoded)

    def wait(self, on_stage: OnStage) -> None:
        """Wait until the kernels are compiled, or the child has failed or makes no progress."""
        on_stage("compile")
        while (told := self._next_line()) is not None:
            if told.name:
                mark(f"compiler: {told.name}", told.at)
            else:
                on_stage("compile", told.done, told.total)
        if self._process.poll() is None:
            self._warn(f"no progress for {STALL_S:.0f} s")
        elif self._process.returncode != 0:
            self._log.seek(0)
            self._warn(self._log.read().decode(errors="replace").strip().rpartition("\n")[2])
        self.close()

    def _next_line(self) -> Told | None:
        """What the child says next; None: there is no more to wait for."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], STALL_S)[0]:
            return None
        line = pipe.readline()
        if not line.endswith(b"\n"):
            self._process.wait()
            return None
        return msgspec.json.decode(line, type=Told)

    def _warn(self, problem: str) -> None:
        _logger.warning("kernels were not compiled ahead (%s): each is compiled when it is first used", problem)

    def close(self) -> None:
        """End the child, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._stdin, self._process.stdout, self._log):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


def begin_early(config: EngineConfig, spec: ModelSpec) -> CompileAhead | None:
    """Start the child if an engine of one GPU may need it, before torch is imported; None: most likely it does not."""
    return None if not _num_processes(read_facts()) or hint_of(config, spec).exists() else _begun()


def begin(
    early: CompileAhead | None, config: EngineConfig, spec: ModelSpec, settings: Settings, facts: MachineFacts
) -> CompileAhead | None:
    """Start compiling, in the child that has begun early if there is one, which is ended if nothing is to be compiled;
    None: nothing is, or there are too few cores for it."""
    gpu, num_processes = facts.gpu, _num_processes(facts)
    is_possible = settings.device == "cuda" and settings.num_ranks == 1 and num_processes > 0
    if gpu is None or not is_possible or note_of(spec, settings, gpu).exists():
        if gpu is not None and is_possible:
            write_hint(config, spec)
        if early is not None:
            early.close()
        return None
    ahead = _begun() if early is None else early
    if ahead is not None:
        ahead.compile(Order(config, replace(gpu, place=None), num_processes))
    return ahead


def _begun() -> CompileAhead | None:
    try:
        return CompileAhead()
    except OSError as error:  # no more processes, or no room for its log
        _logger.warning("kernels are not compiled ahead (%s): each is compiled when it is first used", error)
        return None


def _num_processes(facts: MachineFacts) -> int:
    given = os.environ.get(PROCESSES_VARIABLE, AUTOMATIC)
    if given != AUTOMATIC:
        if not given.isdecimal():
            raise ConfigError(f"{PROCESSES_VARIABLE} must be a number of processes, {AUTOMATIC!r} or 0, got {given!r}")
        return int(given)
    return min(_MAX_PROCESSES, facts.num_cores - 1) if facts.num_cores >= _MIN_CORES else 0


def main() -> None:
    """The child."""
    die_with(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print must not be read as progress

    def write(told: Told) -> None:
        out.write(msgspec.json.encode(told) + b"\n")

    def tell(name: str) -> None:
        write(Told(name=name, at=time()))

    tell("began")
    with collecting_less_often():
        hashing = set_up_meanwhile(lambda name: None, loads_driver=False)
        for module in _MODULES:
            import_module(module)
        tell("imported")
        if hashing is not None:
            hashing.join()  # no other thread may run when it forks
        tell("ready")
        if header := sys.stdin.buffer.read(_LENGTH.size):  # else the parent needs nothing
            given = msgspec.msgpack.decode(sys.stdin.buffer.read(*_LENGTH.unpack(header)), type=Order)
            tell("ordered")
            compile_start(
                given.config,
                given.gpu,
                num_processes=given.num_processes,
                progress=lambda done, total: write(Told(done, total)),
                tell=tell,
            )
    os._exit(0)  # without the exit handlers of libraries
