"""`headrace compile`: compiles a model's kernels for a GPU that need not be there."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.models import size_text
from headrace.cli.parser import CommandParser
from headrace.config import EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.hardware import GpuFacts

EXAMPLES = """\
examples:
  headrace compile Qwen/Qwen3-8B --gpu H100 -o kernels
  TRITON_CACHE_DIR=kernels headrace serve Qwen/Qwen3-8B        on the GPU: nothing is left to compile

Give the engine flags that the start will have: kernels depend on them. Triton must have the same version there."""


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    config = replace(engine_config(parser, given), model=given.model_name)
    if config.device == "cpu" or config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        raise ConfigError("kernels are compiled ahead for one GPU; leave out --device, -tp and -pp")
    started = perf_counter()
    os.environ["TRITON_CACHE_DIR"] = str(given.output.resolve())  # before Triton is imported
    num_kernels = _compile(config, _gpu(given.gpu), given.processes)
    _print(given, num_kernels, perf_counter() - started)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace compile",
        usage="headrace compile MODEL --gpu NAME -o DIR [engine options]",
        description="Compiles the Triton kernels that a start of the model on a GPU needs, into a directory that the "
        "start then uses as Triton's cache. Needs no GPU and no weights, only the model's config.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model_name", metavar="MODEL", help="a model directory, a GGUF file or a hub id")
    parser.add_argument("--gpu", required=True, metavar="NAME", help="such as H200; 'headrace plan --list' lists them")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR", help="may have other kernels")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="at once (default: one per core)"
    )
    add_engine_flags(parser)
    return parser


def _gpu(name: str) -> GpuFacts:
    from headrace.hardware import GpuFacts
    from headrace.plan.gpus import find_gpu

    found = find_gpu(name)
    if not found.runs_headrace:
        raise ConfigError(f"--gpu {name}: Headrace runs on NVIDIA GPUs")
    has_flash = find_spec("fa3_fwd") is not None  # as where the kernels will run
    memory = found.memory_bytes
    return GpuFacts(found.title, memory, memory, found.capability, has_flash_attention=has_flash)


def _compile(config: EngineConfig, gpu: GpuFacts, num_processes: int) -> int:
    from headrace.engine.compile_ahead import compile_start

    def tell(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\rheadrace: compiled {done} of {total} kernels", end="", file=sys.stderr, flush=True)

    num_kernels = compile_start(config, gpu, num_processes=num_processes, progress=tell)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return num_kernels


def _print(given: argparse.Namespace, num_kernels: int, seconds: float) -> None:
    size = sum(path.stat().st_size for path in given.output.rglob("*") if path.is_file())
    print(f"{given.output}: {num_kernels} kernels for {given.gpu}, {size_text(size)}, in {seconds:.0f} s")
    print(f"use it: TRITON_CACHE_DIR={given.output} headrace serve {given.model_name} ...")
