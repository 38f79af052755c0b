"""Seconds from a new process to an engine that is ready, by stage: on a fresh machine, and with compiled kernels.

    python benchmarks/first_start.py --model llama-3.2-1b --json benchmarks/results/first-start-h200.jsonl

Each start is a process of its own with random weights. `one by one` and `ahead` begin with an empty cache of kernels:
the first compiles each kernel when it is first launched, the second in other processes while torch is imported and
weights are read (`engine/compile_ahead.py`). `compiled` starts again on the cache of the one before it. Needs a GPU.

The timeline of a start has the second, from the begin of its process, at which each of its parts ended; `compiler` is
the process that compiles. Records have all of it; of compiled kernels, the slowest are printed.
"""

from __future__ import annotations

from time import perf_counter, time

UP_AT = time()  # the interpreter runs

import argparse  # noqa: E402
import compileall  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from datetime import date  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

KINDS = ("one by one", "ahead", "compiled")
MAX_KERNELS = 6  # that are printed


def start(directory: str, began: float, max_model_len: int, num_blocks: int | None) -> dict[str, Any]:
    """Start in this process. Returns its times and how many kernels it compiled itself."""
    from headrace.config import EngineConfig
    from headrace.engine.start import start_engine
    from headrace.startup import StartupStage, mark, marks, stage_seconds

    mark("interpreter up", UP_AT)
    mark("headrace imported")
    compiled: list[str] = []
    seen: set[str] = set()

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    def report(stage: StartupStage) -> None:
        if stage.name in seen:
            return
        seen.add(stage.name)
        mark(f"stage {stage.name} begins")
        if stage.name == "load":  # torch and Triton are imported, and no kernel was launched
            import triton

            triton.knobs.compilation.listener = note

    config = EngineConfig(
        model=directory,
        load_format="random",
        max_model_len=max_model_len,
        num_gpu_blocks_override=num_blocks,
    )
    engine = start_engine(config, lambda events: None, report=report)
    mark("ready")
    seconds = time() - began
    engine.close()

    import torch
    import triton

    return {
        "seconds": round(seconds, 2),
        "stages": stage_seconds(engine.start_stages),
        "timeline": [[round(each.at - began, 3), each.name] for each in marks()],
        "compiled_by_the_engine": len(compiled),
        "num_threads": engine.settings.num_threads,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]},
    }


def start_in_process(model: str, kind: str, cache: Path, num_blocks: int | None) -> dict[str, Any]:
    from headrace.bench.engines.shapes import MAX_MODEL_LEN, shape_directory
    from headrace.engine.compile_ahead import PROCESSES_VARIABLE

    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    if kind == "one by one":
        environment |= {PROCESSES_VARIABLE: "0"}
    with shape_directory(model) as directory:
        order = {"directory": str(directory), "began": time(), "max_model_len": MAX_MODEL_LEN, "num_blocks": num_blocks}
        command = [sys.executable, __file__, "--start", json.dumps(order)]
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {"model": model, "kind": kind, **found}


def print_timeline(timeline: list[list[Any]]) -> None:
    """A line for each part, with its end and the time since the last end of the same process."""
    last = {True: 0.0, False: 0.0}
    kernels = [each for each in timeline if each[1].startswith("compiler: compiled ")]
    for at, name in timeline:
        is_compiler = name.startswith("compiler: ")
        if not name.startswith("compiler: compiled "):
            indent = " " * 34 if is_compiler else ""
            print(f"  {at:7.2f} {at - last[is_compiler]:+6.2f}  {indent}{name}")
        last[is_compiler] = at
    slowest = sorted((name for _, name in kernels), key=lambda name: -float(name.split("(")[1].split()[0]))
    if kernels:
        names = ", ".join(name.removeprefix("compiler: compiled ") for name in slowest[:MAX_KERNELS])
        print(
            f"  {kernels[0][0]:7.2f} to {kernels[-1][0]:.2f}: {len(kernels)} kernels; the slowest: {names}", flush=True
        )


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
                print_timeline(each["timeline"])
                print(f"{model:<16} {kind:<11} {each['seconds']:6.1f} s ({stages}); compiled {compiled}", flush=True)
    return found


def main() -> None:
    if sys.argv[1:2] == ["--start"]:  # in the process of a start: nothing else is imported
        print(json.dumps(start(**json.loads(sys.argv[2]))), flush=True)
        return
    import headrace
    from headrace.bench.engines.shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), action="append", required=True, help="may be repeated")
    parser.add_argument("--kind", choices=KINDS, action="append", help="may be repeated (default: all)")
    parser.add_argument("--budget-s", type=float, default=1e9, help="no start begins after this many seconds")
    parser.add_argument("--json", type=Path, help="write the records here")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--num-gpu-blocks-override", type=int, metavar="N", help="where others use the GPU as well")
    given = parser.parse_args()
    compileall.compile_dir(Path(headrace.__file__).parent, quiet=1)  # as pip does
    found = measure(given.model, given.kind or list(KINDS), given.budget_s, given.num_gpu_blocks_override)
    if given.json:
        from about import commit

        command = "python benchmarks/first_start.py " + " ".join(sys.argv[1:])
        about = {"command": command, "commit": given.commit or commit(), "date": date.today().isoformat()}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps(each | about) + "\n" for each in found))


if __name__ == "__main__":
    main()
