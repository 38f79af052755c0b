"""Where a step's time goes on a GPU, against the ceiling of each part, with random weights.

    python benchmarks/profile_step.py --model llama-3.1-8b --json benchmarks/results/profile-h200.jsonl
    python benchmarks/profile_step.py --model llama-3.2-1b --workload decode --workload chat --pictures pages/

What `headrace profile` does, for the model shapes of `headrace bench`: one record per workload, with the split, the
ceilings, the overhead of profiling, and the nsys and ncu commands. `--check` also fails the run if a kernel of ours is
not classified, if the parts do not add up, or if more than 5 % of the device's busy time is in other kernels.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from about import commit

from headrace.bench.engines.shapes import SHAPES
from headrace.config import EngineConfig
from headrace.profile.commands import run_commands
from headrace.profile.picture import page
from headrace.profile.recording import RecordingOptions, record_run
from headrace.profile.report import Report
from headrace.profile.workload import WORKLOADS, workload_of

MAX_OTHER_SHARE = 0.05


def measure(model: str, workload: str, arguments: argparse.Namespace, directory: Path) -> Report | None:
    (directory / "config.json").write_text(json.dumps(SHAPES[model]))
    fp8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"} if arguments.fp8 else {}
    chosen = {name: int(value) for name, value in (item.split("=") for item in arguments.set)}
    config = EngineConfig(model=str(directory), load_format="random", **{"max_model_len": 4096} | fp8 | chosen)
    options = RecordingOptions(
        directory=str(arguments.dir),
        seconds=arguments.seconds,
        num_windows=arguments.windows,
        num_seqs=arguments.num_seqs,
        steps=arguments.steps,
        tool=arguments.tool,
    )
    command = ["python", "benchmarks/profile_step.py", "--model", model, "--workload", workload]
    command += ["--fp8"] if arguments.fp8 else []
    return record_run(
        config,
        workload_of(workload),
        options,
        commands=run_commands(command),
        print_line=lambda line: print(line, flush=True),
    )


def problems(report: Report) -> list[str]:
    """What is wrong with a report, for --check."""
    shares = {row.part: row.share for row in report.rows}
    found = []
    if abs(sum(shares.values()) - 1) > 1e-6:
        found.append(f"the parts add up to {sum(shares.values()):.4f}")
    if shares.get("other", 0.0) > MAX_OTHER_SHARE * report.busy_share:
        found.append(f"other kernels take {shares['other']:.1%}")
    names = {name for part, name in report.timeline.us_by_name() if part == "other" and name.startswith("_")}
    if names:
        found.append(f"kernels of no part: {sorted(names)}")
    for part in ("gemm", "decode_attention", "cache", "elementwise", "sampling"):
        row = next((row for row in report.rows if row.part == part), None)
        if row is None:
            found.append(f"no {part}")
        elif row.of_ceiling is None or row.of_ceiling <= 0:
            found.append(f"{part} has no ceiling")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), action="append", required=True, help="may be repeated")
    parser.add_argument("--workload", choices=list(WORKLOADS), action="append", help="may be repeated; default: all")
    parser.add_argument("--fp8", action="store_true", help="weights, activations and cache in eight bits")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=N", help="an integer engine setting")
    parser.add_argument("--num-seqs", type=int, help="sequences at once; default: as many as fit")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each window")
    parser.add_argument("--steps", type=int, help="of each window, instead of seconds")
    parser.add_argument("--tool", choices=("torch", "cuda"), default="torch", help="cuda: under nsys or ncu")
    parser.add_argument("--windows", type=int, default=3, help="recorded windows")
    parser.add_argument("--dir", type=Path, default=Path("headrace-profile"), help="for traces")
    parser.add_argument("--pictures", type=Path, help="a directory for one page per record")
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--json", type=Path, help="append the records here")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    pairs = [(model, workload) for model in arguments.model for workload in arguments.workload or list(WORKLOADS)]
    if len(pairs) > 1:
        raise SystemExit(max(in_own_process(*pair) for pair in pairs))
    wrong = record_of(*pairs[0], arguments)
    for problem in wrong:
        print(f"WRONG {problem}", flush=True)
    if wrong and arguments.check:
        raise SystemExit(1)


def in_own_process(model: str, workload: str) -> int:
    """Run this script for one of several records: an engine's GPU memory is free only when its process has ended."""
    given = iter(sys.argv[1:])
    others = [part for part in given if not (part in ("--model", "--workload") and next(given))]
    command = [sys.executable, __file__, "--model", model, "--workload", workload, *others]
    return subprocess.run(command, check=False).returncode


def record_of(model: str, workload: str, arguments: argparse.Namespace) -> list[str]:
    """Record one workload. Returns what is wrong with it."""
    with tempfile.TemporaryDirectory() as directory:
        report = measure(model, workload, arguments, Path(directory))
    if report is None:
        return []
    assert report.record is not None
    named = msgspec.structs.replace(report.record, model_name=model)  # not the temporary directory's name
    report = replace(report, record=named)
    print(f"\n{model} {workload}\n{report.table()}", flush=True)
    record = {
        "model": model,
        "workload": workload,
        "dtype": "fp8" if arguments.fp8 else "bfloat16",
        **{name: value for name, value in report.as_json().items() if name != "model"},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": "python benchmarks/profile_step.py " + " ".join(sys.argv[1:]),
        "commit": arguments.commit or commit(),
        "triton": importlib.metadata.version("triton"),
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        with arguments.json.open("a") as file:
            file.write(json.dumps(record) + "\n")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
        (arguments.pictures / f"profile-{model}-{workload}.html").write_text(page(report))
    return [f"{model} {workload}: {problem}" for problem in problems(report)]


if __name__ == "__main__":
    main()
