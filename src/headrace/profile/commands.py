"""The exact nsys and ncu commands for the same run.

Both use CUDA's profiler API: the run calls cudaProfilerStart and cudaProfilerStop around its steady window
(`--tool cuda`), so that start-up and the ramp of prefills are not recorded. The torch profiler must be off then: only
one tool at a time can record a GPU's activity. NVTX ranges are on while a window is open. Decode steps are CUDA
graphs, whose kernels nsys shows only with --cuda-graph-trace=node, and ncu only with --graph-profiling node.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

NSYS = (
    "nsys profile --trace=cuda,nvtx,osrt --sample=none --cuda-graph-trace=node --trace-fork-before-exec=true "
    "--capture-range=cudaProfilerApi --capture-range-end={end} --force-overwrite=true --output=headrace"
)
NSYS_BY_TIME = (
    "nsys profile --trace=cuda,nvtx,osrt --sample=none --cuda-graph-trace=node --trace-fork-before-exec=true "
    "--delay={delay} --duration={duration} --kill=none --force-overwrite=true --output=headrace"
)
NCU = (
    "ncu --target-processes all --profile-from-start off --graph-profiling node --nvtx --set basic "
    "--launch-count {count} --force-overwrite --export headrace"
)
NCU_LAUNCHES = 400  # about one decode step of 32 layers; each is run again for every group of counters


def own_commands(arguments: Sequence[str]) -> dict[str, str]:
    """For `headrace profile` with these arguments, in this process."""
    return run_commands(["headrace", "profile", *_without_tool(arguments)])


def run_commands(command: Sequence[str]) -> dict[str, str]:
    """For any command that takes --tool and --steps as `headrace profile` does."""
    run = shlex.join([*command, "--tool", "cuda"])
    return {
        "nsys": f"{NSYS.format(end='stop')} {run}",
        "ncu": f"{NCU.format(count=NCU_LAUNCHES)} {run} --steps 4",
    }


def server_commands(url: str, serve: Sequence[str], *, seconds: float) -> dict[str, str]:
    """For a server: it must be started by the tool. `repeat` keeps it alive after each window."""
    run = shlex.join(["headrace", "serve", *serve])
    trigger = shlex.join(["headrace", "profile", "--url", url, "--tool", "cuda", "--seconds", f"{seconds:g}"])
    return {
        "nsys": f"{NSYS.format(end='repeat')} {run}",
        "nsys by time": f"{NSYS_BY_TIME.format(delay=60, duration=max(1, round(seconds)))} {run}",
        "ncu": f"{NCU.format(count=NCU_LAUNCHES)} {run}",
        "then, to record a window": trigger,
    }


def _without_tool(arguments: Sequence[str]) -> list[str]:
    """The arguments without those that the tools' run replaces."""
    kept: list[str] = []
    skips = False
    for argument in arguments:
        if skips:
            skips = False
        elif argument in ("--tool", "--picture", "--json"):
            skips = True
        elif not argument.startswith(("--tool=", "--picture=", "--json=")):
            kept.append(argument)
    return kept
