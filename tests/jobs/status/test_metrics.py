from __future__ import annotations

import dataclasses
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.engine.start import Engine
from headrace.errors import ConfigError
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.status.metrics import NOT_SHOWN, SERIES
from headrace.jobs.status.metrics_server import MetricsServer
from headrace.jobs.store.status_file import GpuStatus, JobStatus, Saved, WorkerStatus

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def status(**fields: object) -> JobStatus:
    given: dict[str, object] = {
        "state": "running",
        "output": "out.jsonl",
        "model": 'a "b"\\c',
        "pid": 1,
        "started_at": 5.0,
        "updated_at": 6.5,
        "seconds": 1.5,
        "lines_total": None,
        "lines_done": 7,
        "lines_answered": 4,
        "lines_failed": 3,
        "lines_in_flight": 2,
        "lines_ready": 1,
        **fields,
    }
    return JobStatus(**given)  # type: ignore[arg-type]


Samples = dict[tuple[str, str | None], float]


def values(text: str, *, model: str = 'a "b"\\c') -> Samples:
    """By name and by the value of the label beside `model_name`, which all samples have."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == model
            found[sample.name, next(iter(labels.values()), None)] = sample.value
    return found


def page(shown: JobStatus) -> str:
    with MetricsServer(0) as server:
        server.update(shown)
        assert server.url is not None
        return fetch(server.url)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
    return text


def test_counters_are_shown_by_key_and_unknown_values_are_left_out() -> None:
    shown = values(page(status(errors={"invalid_json": 2, "x": 1}, saved=Saved(prefix_tokens=9), retries={"error": 5})))
    assert shown["headrace:job_lines_done", None] == 7
    assert shown["headrace:job_lines_answered_total", None] == 4
    assert shown["headrace:job_lines_failed_total", "invalid_json"] == 2
    assert shown["headrace:job_saved_tokens_total", "prefix"] == 9
    assert shown["headrace:job_retries_total", "error"] == 5
    assert shown["headrace:job_state", "running"] == 1
    assert shown["headrace:job_state", "failed"] == 0
    assert not {"headrace:job_lines", "headrace:job_seconds_left"} & {name for name, _ in shown}


def test_the_page_has_the_name_type_help_and_label_of_every_series() -> None:
    known = {"lines_total": 9, "tokens_left": 1, "seconds_left": 1.0, "limited_by": "disk", "gpu_seconds": 1.0}
    by_key = {"errors": {"x": 1}, "retries": {"x": 1}, "engine_deaths": {"engine": 1}}
    gpu = GpuStatus(
        index=0, name="x", utilization=0.5, memory_bytes=1.0, memory_total_bytes=2.0, power_w=3.0, temperature_c=4.0
    )
    workers = [WorkerStatus(number=0, state="running"), WorkerStatus(number=1, state="starting")]
    full = status(**known, **by_key, cost=1.0, gpus=[gpu], workers=workers, workers_desired=2)
    families = list(text_string_to_metric_families(page(full)))
    assert [
        (f"{family.name}{'_total' * (family.type == 'counter')}", family.type, family.documentation)
        for family in families
    ] == [(series.shown_name, series.kind, series.help) for series in SERIES]
    labels = [{name for sample in family.samples for name in sample.labels} for family in families]
    assert labels == [{"model_name"} | ({series.label} if series.label else set()) for series in SERIES]


def test_what_a_gpu_does_not_report_is_left_out() -> None:
    gpus = [GpuStatus(index=0, name="x", power_w=300.0), GpuStatus(index=1, name="x", power_w=400.0, utilization=0.5)]
    shown = values(page(status(gpus=gpus)))
    assert (shown["headrace:job_gpu_power_watts", "0"], shown["headrace:job_gpu_power_watts", "1"]) == (300.0, 400.0)
    assert [label for name, label in shown if name == "headrace:job_gpu_utilization"] == ["1"]
    assert not any(name == "headrace:job_gpu_temperature_celsius" for name, _ in shown)


def test_large_counts_are_exact() -> None:
    shown = values(page(status(prompt_tokens=123_456_789_012)))
    assert shown["headrace:job_prompt_tokens_total", None] == 123_456_789_012


def test_every_field_of_a_status_is_shown_or_left_out_on_purpose() -> None:
    asked: set[str] = set()

    class Spy:
        def __getattr__(self, name: str) -> object:
            asked.add(name)
            return getattr(status(), name)

    for series in SERIES:
        series.read(Spy())  # type: ignore[arg-type]
    names = {field.name for field in dataclasses.fields(JobStatus)}
    assert asked | set(NOT_SHOWN) | {"lines_failed", "model"} == names  # errors by code, and the label of all
    assert not asked & set(NOT_SHOWN)


def test_every_series_is_documented() -> None:
    text = DOCS.read_text()
    assert [series.shown_name for series in SERIES if f"`{series.shown_name}`" not in text] == []


def test_the_last_status_is_served_to_this_machine_only() -> None:
    with MetricsServer(0) as server:
        assert server.url is not None and server.url.startswith("http://127.0.0.1:")
        assert fetch(server.url) == "", "the job has not begun"
        server.update(status())
        server.update(status(lines_done=8))
        assert values(fetch(server.url))["headrace:job_lines_done", None] == 8


def test_closing_frees_the_port() -> None:
    with MetricsServer(0) as server:
        assert server.url is not None
        port = int(server.url.removesuffix("/metrics").rpartition(":")[2])
    with MetricsServer(port) as server:
        assert server.url == f"http://127.0.0.1:{port}/metrics"
    assert server.url is None


def test_a_port_that_is_taken_is_refused_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*give another --metrics-port"):
            MetricsServer(port)
    with pytest.raises(ConfigError, match="between 0 and 65535"):
        JobSpec(input="a", output="b", metrics_port=70_000)


def test_a_job_serves_its_counters_while_it_runs(
    start: Callable[..., Engine], write_lines: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[str] = []
    update = MetricsServer.update

    def scraped(server: MetricsServer, status: JobStatus) -> None:
        update(server, status)
        assert server.url is not None
        pages.append(fetch(server.url))

    monkeypatch.setattr(MetricsServer, "update", scraped)
    source = write_lines({"prompt": "a", "max_tokens": 3}, {"prompt": "b", "max_tokens": 4}, "no json")
    run_job(JobSpec(input=str(source), output=str(tmp_path / "out.jsonl"), metrics_port=0), start=start, quiet=True)
    last = values(pages[-1], model="fake")
    assert last["headrace:job_lines_done", None] == 3
    assert last["headrace:job_completion_tokens_total", None] == 7
    assert last["headrace:job_lines_failed_total", "invalid_json"] == 1
    assert last["headrace:job_state", "finished"] == 1
