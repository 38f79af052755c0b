"""Runs the tests with several seeds, prints a table of them, and writes a record: no test may fail by chance.

make test-seeds                                        ten seeds
python tools/test_seeds.py --seeds 100-119 -- tests/kernels tests/sampling

What follows `--` goes to pytest.
"""

# ruff: noqa: T201 (a command that prints)

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "test-seeds.json"
VARIABLE = "HEADRACE_TEST_SEED"
PASSED_CODES = (0, 1)  # of pytest: all passed, some failed; with any other, the run itself is broken
MAX_NAMES = 3  # of failed tests in a row of the table


@dataclass(frozen=True)
class Run:
    """The tests with one seed."""

    seed: int
    num_passed: int
    num_skipped: int
    failed: list[str]
    seconds: float
    mean_load: float  # processes that want to run, over the last minute of the run


def main() -> int:
    arguments = _read_arguments()
    runs = []
    print(f"{'seed':>12}  {'passed':>6}  {'failed':>6}  {'seconds':>7}  {'load':>5}  failed tests", flush=True)
    for seed in arguments.seeds:
        runs.append(run_tests(seed, arguments.pytest))
        print(row(runs[-1]), flush=True)
        write_record(arguments.json, runs, arguments.pytest)
    failed = Counter(name for run in runs for name in run.failed)
    for name, count in failed.most_common():
        print(f"{count} of {len(runs)} seeds: {name}")
    return 1 if failed else 0


def run_tests(seed: int, options: list[str]) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *options]
        start = perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, VARIABLE: str(seed)}, capture_output=True, text=True, check=False
        )
        seconds = perf_counter() - start
        if done.returncode not in PASSED_CODES:
            sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return read_report(report, seed, seconds)


def read_report(report: Path, seed: int, seconds: float) -> Run:
    """Counts the tests in pytest's report."""
    num_passed = num_skipped = 0
    failed = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            num_skipped += 1
        else:
            num_passed += 1
    return Run(seed, num_passed, num_skipped, sorted(set(failed)), round(seconds, 1), round(os.getloadavg()[0], 1))


def row(run: Run) -> str:
    names = ", ".join(run.failed[:MAX_NAMES]) + (" ..." if len(run.failed) > MAX_NAMES else "")
    numbers = f"{run.seed:>12}  {run.num_passed:>6,}  {len(run.failed):>6,}  {run.seconds:>7.1f}  {run.mean_load:>5.1f}"
    return f"{numbers}  {names}".rstrip()


def write_record(path: Path, runs: list[Run], options: list[str]) -> None:
    import torch

    record = {
        "command": " ".join(["python tools/test_seeds.py --", *options]),
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "num_failures": sum(len(run.failed) for run in runs),
        "runs": [asdict(run) for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "src", "tests"], cwd=ROOT, capture_output=True, check=False
    )
    return found.stdout.strip() + (" with changes" if changed.stdout else "")


def _seeds(text: str) -> range:
    """`10` is the first ten seeds from 1, `5-9` are five."""
    first, _, last = text.rpartition("-")
    return range(int(first or 1), int(last) + 1)


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_seeds, default=range(1, 11), help="how many, or the first and last: 100-119")
    parser.add_argument("--json", type=Path, default=RECORD, help="where the record is written")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
