"""Seconds from a new process to an engine that is ready, by stage: on a fresh machine, and with compiled kernels.

    python benchmarks/first_start.py --model llama-3.2-1b --json benchmarks/results/first-start-h200.jsonl

Each start is a process of its own with random weights. `one by one` and `ahead` begin with an empty cache of kernels:
the first compiles each kernel when it is first launched, the second in other processes while weights are read
(`engine/compile_ahead.py`). `compiled` starts again on the cache of the one before it. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from time import perf_counter, time
from typing import Any

from about import commit

from headrace.bench.engines.shapes import MAX_MODEL_LEN, SHAPES, shape_directory
from headrace.engine.compile_ahead import PROCESSES_VARIABLE

KINDS = ("one by one", "ahead", "compiled")


def start(model: str, began: float, num_blocks: int | None) -> dict[str, Any]:
    """Start in this process. Returns its times and how many kernels it compiled itself."""
    import torch
    import triton

    from headrace.config import EngineConfig
    from headrace.engine.start import start_engine
    from headrace.startup import stage_seconds

    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = note
    with shape_directory(model) as directory:
        config = EngineConfig(
            model=str(directory),
            load_format="random",
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=num_blocks,
        )
        engine = start_engine(config, lambda events: None)
        seconds = time() - began
        engine.close()
    stages = stage_seconds(engine.start_stages)
    return {
        "seconds": round(seconds, 2),
        "stages": stages,
        "compiled_by_the_engine": len(compiled),
        "num_threads": engine.settings.num_threads,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
    }


def start_in_process(model: str, kind: str, cache: Path, num_blocks: int | None) -> dict[str, Any]:
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    if kind == "one by one":
        environment |= {PROCESSES_VARIABLE: "0"}
    command = [sys.executable, __file__, "--model", model, "--began", str(time())]
    if num_blocks is not None:
        command += ["--num-gpu-blocks-override", str(num_blocks)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {"model": model, "kind": kind, **found}


def measure(models: list[str], kinds: list[str], budget_s: float, num_blocks: int | None) -> list[dict[str, Any]]:
    """A start is left out if it would begin after the budget."""
    began, found = perf_counter(), []
    for model in models:
        with tempfile.TemporaryDirectory(prefix="headrace-kernels-") as cache:
            for number, kind in enumerate(kinds):
                if perf_counter() - began > budget_s:
                    print(f"{model}, {kind}: left out, {budget_s:.0f} s are over", flush=True)
                    continue
                is_fresh = kind != "compiled"
                place = Path(cache) / (str(number) if is_fresh else str(number - 1))
                found.append(start_in_process(model, kind, place, num_blocks))
                each = found[-1]
                stages = ", ".join(f"{name} {seconds:.1f}" for name, seconds in each["stages"].items())
                compiled = each["compiled_by_the_engine"]
                print(f"{model:<16} {kind:<11} {each['seconds']:6.1f} s ({stages}); compiled {compiled}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), action="append", required=True, help="may be repeated")
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--budget-s", type=float, default=1e9, help="no start begins after this many seconds")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="where others use the GPU as well")
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)  # of a start in this process
    given = parser.parse_args()
    if given.began is not None:
        print(json.dumps(start(given.model[0], given.began, given.num_gpu_blocks_override)), flush=True)
        return
    found = measure(given.model, given.kind or list(KINDS), given.budget_s, given.num_gpu_blocks_override)
    if given.json:
        command = "python benchmarks/first_start.py " + " ".join(sys.argv[1:])
        about = {"command": command, "commit": given.commit or commit(), "date": date.today().isoformat()}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps(each | about) + "\n" for each in found))


if __name__ == "__main__":
    main()
