"""What a start on a GPU begins before torch is imported, which takes seconds of one core and needs the interpreter.

main thread        import torch ─────────────────▶ ask the GPU, resolve ─▶ load weights ─▶ first kernel
headrace-cuda      create the CUDA context ────────┘                                         │
headrace-triton    hash Triton, load its driver module ──────────────────────────────────────┘
another process    import torch, compile kernels (`compile_ahead.py`)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from threading import Thread

from headrace.config import EngineConfig
from headrace.engine import compile_ahead
from headrace.engine.compile_ahead import CompileAhead
from headrace.hardware import has_gpu_driver
from headrace.hardware.cuda_context import create_context_meanwhile
from headrace.kernels.triton_setup import set_up_meanwhile
from headrace.models import ModelSpec
from headrace.startup import mark


@dataclass(frozen=True, slots=True)
class EarlyStart:
    """None: it was not begun."""

    compiler: CompileAhead | None = None
    context: Thread | None = None
    triton: Thread | None = None

    def wait_for_context(self) -> None:
        if self.context is not None:
            self.context.join()

    def wait_for_triton(self) -> None:
        if self.triton is not None:
            self.triton.join()

    def close(self) -> None:
        """End the process that compiles; the threads end by themselves."""
        if self.compiler is not None:
            self.compiler.close()


def begin_early(config: EngineConfig, spec: ModelSpec) -> EarlyStart:
    """Begin what an engine of one GPU will need; nothing for others."""
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.device == "cpu" or num_ranks > 1 or not has_gpu_driver():
        return EarlyStart()
    compiler = compile_ahead.begin_early(config, spec)
    mark("compiler started" if compiler is not None else "no compiler needed yet")
    context = None if "torch" in sys.modules else create_context_meanwhile(mark)
    triton = set_up_meanwhile(mark)
    mark("Triton imported")
    return EarlyStart(compiler, context, triton)
