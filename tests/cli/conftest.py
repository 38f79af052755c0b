"""Jobs that would have run: the command line without the engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.core import EngineStats
from headrace.engine.settings import Choice
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.report import JobReport, Tally
from headrace.sched import SchedulerStats


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "Hi"}\n')
    return path


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """The jobs that would have run. A line of the input may ask to fail."""
    seen: list[JobSpec] = []

    def run_job(job: JobSpec, **options: Any) -> JobReport:
        seen.append(job)
        errors = Counter({"invalid_json": 1}) if "bad" in Path(job.input).read_text() else Counter[str]()
        return JobReport(
            output=job.output,
            model_name="m",
            was_stopped="stop" in Path(job.input).read_text(),
            num_in_flight=0,
            tally=Tally(num_answered=1, errors=errors),
            seconds=1.0,
            start_seconds=1.0,
            stats=EngineStats(SchedulerStats(), 0.0, 0.0),
            choices=(Choice("device", "cpu", "the only one"),),
        )

    monkeypatch.setattr("headrace.jobs.run.run_job.run_job", run_job)
    monkeypatch.setattr("headrace.cli.fetching.fetch_if_missing", lambda model, **options: None)
    return seen
