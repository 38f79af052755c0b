"""Starts a model on a GPU that is not there, as one that is: Triton itself looks up or compiles each kernel.

Run as a program with a model directory. Prints how many kernels it needed, and the names of those that it compiled.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import triton
from triton.runtime.jit import JITFunction

from headrace.config import EngineConfig
from headrace.engine.dry_start import DryStart
from headrace.hardware import GpuFacts
from headrace.runner.gpu import meta_gpu


def main(model: str) -> None:
    launch = JITFunction.run
    kernels: set[str] = set()
    compiled: list[str] = []

    def look_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernels.add(kernel.hash)
        return kernel

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    config = EngineConfig(model=model, load_format="random", max_model_len=512)
    gpu = GpuFacts("NVIDIA H200", 139 << 30, 138 << 30, (9, 0), has_flash_attention=False)
    not_recorded = mock.patch.object(meta_gpu, "record_launches", return_value=nullcontext([]))
    with mock.patch.object(JITFunction, "run", look_up), not_recorded:
        triton.knobs.compilation.listener = note
        DryStart.of(config, gpu).launches()
    sys.stdout.write(f"{len(kernels)} {' '.join(compiled)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
