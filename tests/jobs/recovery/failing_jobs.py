"""Jobs whose engine fails, for tests of what follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.engine.start import Engine
from headrace.jobs.recovery.retry_rules import RetryRules
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport
from tests.jobs.faults import AT_ONCE

Start = Callable[..., Engine]
WriteLines = Callable[..., Path]


def run(source: Path, start: Any, rules: RetryRules = AT_ONCE, **options: Any) -> JobReport:
    output = source.parent / "out.jsonl"
    return run_job(JobSpec(input=str(source), output=str(output), **options), start=start, rules=rules, quiet=True)


def read(source: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (source.parent / "out.jsonl").read_text().splitlines()]
    assert len({line["index"] for line in lines}) == len(lines)
    return {line["index"]: line for line in lines}


def directory_of(source: Path) -> Path:
    return source.parent / "out.jsonl.job"


def prompts(num_lines: int, *, poison: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    return [
        {"prompt": f"line {number}{'!' if number in poison else ''}", "max_tokens": 4, "ignore_eos": True}
        for number in range(num_lines)
    ]
