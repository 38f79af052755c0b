"""Compiles the kernels of a start in other processes while the weights are read.

    start ─▶ import torch, load weights ──────────────▶ wait ─▶ measure, capture: every kernel is in Triton's cache
      └────▶ child: dry start (which kernels?) ─▶ forks: compile ─┘

A note in the cache says which starts are complete, so that later starts skip all of this. A child that fails costs
nothing but time: what it has not compiled is compiled when it is first launched.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from headrace.config import EngineConfig
from headrace.engine.dry_start import DryStart
from headrace.engine.process.child import die_with
from headrace.engine.process.engine_process import child_environment
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts, MachineFacts
from headrace.models import ModelSpec
from headrace.startup import OnStage

PROCESSES_VARIABLE = "HEADRACE_COMPILE_PROCESSES"  # 0: kernels are compiled one by one, when they are first launched
AUTOMATIC = "auto"  # processes by the number of cores; the default
_MAX_PROCESSES = 16
STALL_S = 120.0  # without a compiled kernel, after which the start goes on by itself; the slowest takes about 10 s
_MIN_CORES = 4  # with fewer, the child would take time from the start itself

Progress = Callable[[int, int], None]  # kernels compiled, and their number

_logger = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True):
    """What the child gets."""

    config: EngineConfig
    gpu: GpuFacts
    num_processes: int
    parent: int


def compile_start(config: EngineConfig, gpu: GpuFacts, *, num_processes: int, progress: Progress) -> int:
    """Compile the kernels of a start into Triton's cache, and note there that it is complete. Returns their number.
    Only for a process that does nothing else."""
    from headrace.kernels.gpu.compile_pool import compile_all

    start = DryStart.of(config, gpu)
    note = note_of(start.checkpoint.spec, start.settings, gpu)
    note.parent.mkdir(parents=True, exist_ok=True)
    with note.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several engines that start at once, one compiles
        if note.exists():
            return int(note.read_text())
        launches = start.launches()
        compile_all(launches, num_processes=num_processes, progress=progress)
        note.write_text(f"{len(launches)}\n")
    return len(launches)


def note_of(spec: ModelSpec, settings: Settings, gpu: GpuFacts) -> Path:
    """The file that says that all kernels of this start are in Triton's cache."""
    from headrace.kernels.gpu.compile_pool import cache_directory, code_digest

    what = replace(settings, num_blocks=0, choices=(), warnings=(), num_threads=1, cpu_affinity="none", seed=0)
    what = replace(what, load_format="auto", full_rate_seqs=None)
    described = repr((spec, what, gpu.capability, sys.version_info[:2], code_digest()))
    return cache_directory() / "headrace" / hashlib.blake2b(described.encode(), digest_size=16).hexdigest()


class CompileAhead:
    """The parent's end: owns the child."""

    def __init__(self, order: Order) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`; a pipe that nobody reads could fill up
        environment = child_environment() | {"CUDA_VISIBLE_DEVICES": ""}  # it needs no GPU
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            bufsize=0,  # `wait` asks the pipe whether there is a line
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.msgpack.encode(order))
        self._process.stdin.close()

    def wait(self, on_stage: OnStage) -> None:
        """Wait until the kernels are compiled, or the child has failed or makes no progress."""
        on_stage("compile")
        while (progress := self._next_progress()) is not None:
            on_stage("compile", *progress)
        if self._process.poll() is None:
            self._warn(f"no progress for {STALL_S:.0f} s")
        elif self._process.returncode != 0:
            self._log.seek(0)
            self._warn(self._log.read().decode(errors="replace").strip().rpartition("\n")[2])
        self.close()

    def _next_progress(self) -> tuple[int, int] | None:
        """Kernels done and their number; None: there is no more to wait for."""
        pipe = self._process.stdout
        assert pipe is not None
        if not select.select([pipe], [], [], STALL_S)[0]:
            return None
        line = pipe.readline()
        if not line:
            self._process.wait()
            return None
        done, total = map(int, line.split())
        return done, total

    def _warn(self, problem: str) -> None:
        _logger.warning("kernels were not compiled ahead (%s): each is compiled when it is first used", problem)

    def close(self) -> None:
        """End the child, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def begin(config: EngineConfig, spec: ModelSpec, settings: Settings, facts: MachineFacts) -> CompileAhead | None:
    """Start compiling; None: nothing is to be compiled, or there are too few cores for it."""
    gpu, num_processes = facts.gpu, _num_processes(facts)
    if settings.device != "cuda" or gpu is None or settings.num_ranks > 1 or not num_processes:
        return None
    if note_of(spec, settings, gpu).exists():
        return None
    return CompileAhead(Order(config, replace(gpu, place=None), num_processes, os.getpid()))


def _num_processes(facts: MachineFacts) -> int:
    given = os.environ.get(PROCESSES_VARIABLE, AUTOMATIC)
    if given != AUTOMATIC:
        if not given.isdecimal():
            raise ConfigError(f"{PROCESSES_VARIABLE} must be a number of processes, {AUTOMATIC!r} or 0, got {given!r}")
        return int(given)
    return min(_MAX_PROCESSES, facts.num_cores - 1) if facts.num_cores >= _MIN_CORES else 0


def main() -> None:
    """The child."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    die_with(order.parent)

    def tell(done: int, total: int) -> None:
        sys.stdout.write(f"{done} {total}\n")
        sys.stdout.flush()

    compile_start(order.config, order.gpu, num_processes=order.num_processes, progress=tell)
