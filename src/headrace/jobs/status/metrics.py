"""A job's Prometheus series. A scrape shows the last `JobStatus`, which is made once a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headrace.jobs.store.status_file import JobState, JobStatus, WorkerState, WorkerStatus

Value = float | Mapping[str, float] | None  # None: unknown, so the series is left out

NOT_SHOWN = (
    "output",
    "pid",
    "updated_at",
    "error_lines",
    "epoch",
    "journal_bytes",
    "limited_because",
    "paused_because",
    "gpus_missing",
)


@dataclass(frozen=True, slots=True)
class JobSeries:
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[JobStatus], Value]
    label: str | None = None  # of the keys, where the value is a mapping

    @property
    def shown_name(self) -> str:
        """The name on the page, where that of a counter ends in `_total`."""
        return f"headrace:job_{self.name}" + ("_total" if self.kind == "counter" else "")

    def metric(self, status: JobStatus) -> Metric | None:
        value = self.read(status)
        if value is None:
            return None
        metric = Metric(f"headrace:job_{self.name}", self.help, self.kind)
        labels = {"model_name": status.model}
        if isinstance(value, Mapping):
            assert self.label is not None
            for key, one in value.items():
                metric.add_sample(self.shown_name, {**labels, self.label: key}, one)
        else:
            metric.add_sample(self.shown_name, labels, value)
        return metric


SERIES = (
    JobSeries("state", "gauge", "1 for the current state of the job.", lambda s: _one_of(s.state), "state"),
    JobSeries("started_timestamp_seconds", "gauge", "When this run began.", lambda s: s.started_at),
    JobSeries("seconds", "gauge", "Duration of this run so far.", lambda s: s.seconds),
    JobSeries("lines", "gauge", "Lines of the input, if known.", lambda s: s.lines_total),
    JobSeries("lines_done", "gauge", "Lines with a result, earlier runs included.", lambda s: s.lines_done),
    JobSeries("lines_before", "gauge", "Lines done by earlier runs.", lambda s: s.lines_before),
    JobSeries("lines_answered", "counter", "Lines answered.", lambda s: s.lines_answered),
    JobSeries("lines_failed", "counter", "Lines that became error lines, by code.", lambda s: s.errors, "code"),
    JobSeries("lines_in_flight", "gauge", "Lines submitted to the engine.", lambda s: s.lines_in_flight),
    JobSeries("lines_held", "gauge", "Finished lines that wait for disk space.", lambda s: s.lines_held),
    JobSeries(
        "lines_ready", "gauge", "Lines that are read and tokenized and wait for the engine.", lambda s: s.lines_ready
    ),
    JobSeries("prompt_tokens", "counter", "Prompt tokens of answered lines.", lambda s: s.prompt_tokens),
    JobSeries("completion_tokens", "counter", "Tokens of answers.", lambda s: s.completion_tokens),
    JobSeries(
        "tokens_per_second",
        "gauge",
        "Tokens per second over the last ten seconds, by kind.",
        lambda s: {"prompt": s.rates_now.prompt, "completion": s.rates_now.completion},
        "kind",
    ),
    JobSeries(
        "mean_tokens_per_second",
        "gauge",
        "Tokens per second over this run, by kind.",
        lambda s: {"prompt": s.rates_mean.prompt, "completion": s.rates_mean.completion},
        "kind",
    ),
    JobSeries(
        "prefix_hit_share",
        "gauge",
        "Share of prompt tokens found in the prefix cache, 0 to 1.",
        lambda s: s.prefix_hit_share,
    ),
    JobSeries("kv_use", "gauge", "Share of the KV cache in use, 0 to 1.", lambda s: s.kv_use),
    JobSeries("sequences_running", "gauge", "Sequences running.", lambda s: s.sequences_running),
    JobSeries("sequences_waiting", "gauge", "Sequences in the engine's queue.", lambda s: s.sequences_waiting),
    JobSeries(
        "saved_tokens",
        "counter",
        "Tokens that were not computed, by what saved them.",
        lambda s: {
            "prefix": s.saved.prefix_tokens,
            "duplicate_prompt": s.saved.duplicate_prompt_tokens,
            "duplicate_completion": s.saved.duplicate_completion_tokens,
        },
        "by",
    ),
    JobSeries(
        "duplicate_lines",
        "counter",
        "Duplicate lines, answered with the answer of an identical line.",
        lambda s: s.saved.duplicate_lines,
    ),
    JobSeries("tokens_left", "gauge", "Tokens left to compute, if known.", lambda s: s.tokens_left),
    JobSeries("seconds_left", "gauge", "Time left, if known.", lambda s: s.seconds_left),
    JobSeries("limited_by", "gauge", "1 for the current bottleneck.", lambda s: _given(s.limited_by), "limit"),
    JobSeries("gpu_seconds", "gauge", "GPU time used, loading included.", lambda s: s.gpu_seconds),
    JobSeries(
        "gpu_utilization",
        "gauge",
        "Share of time in which a kernel ran on the GPU, 0 to 1.",
        lambda s: _by_gpu(s, "utilization"),
        "gpu",
    ),
    JobSeries("gpu_memory_used_bytes", "gauge", "GPU memory in use.", lambda s: _by_gpu(s, "memory_bytes"), "gpu"),
    JobSeries(
        "gpu_memory_total_bytes", "gauge", "Memory of the GPU.", lambda s: _by_gpu(s, "memory_total_bytes"), "gpu"
    ),
    JobSeries("gpu_power_watts", "gauge", "Power draw of the GPU.", lambda s: _by_gpu(s, "power_w"), "gpu"),
    JobSeries(
        "gpu_temperature_celsius", "gauge", "Temperature of the GPU.", lambda s: _by_gpu(s, "temperature_c"), "gpu"
    ),
    JobSeries("workers", "gauge", "Workers by state, if there are several.", lambda s: _by_state(s.workers), "state"),
    JobSeries(
        "desired_workers",
        "gauge",
        "Workers that finish by the deadline and have something to do; without a deadline, at most those of the job.",
        lambda s: s.workers_desired,
    ),
    JobSeries(
        "worker_sequences_running",
        "gauge",
        "Sequences running, by worker, if there are several.",
        lambda s: _by_worker(s, lambda worker: worker.sequences_running),
        "worker",
    ),
    JobSeries(
        "worker_completion_tokens_per_second",
        "gauge",
        "Tokens of answers per second over the last ten seconds, by worker, if there are several.",
        lambda s: _by_worker(s, lambda worker: worker.rates_now.completion),
        "worker",
    ),
    JobSeries(
        "worker_lines_done",
        "counter",
        "Lines done in this run, by worker, if there are several.",
        lambda s: _by_worker(s, lambda worker: worker.lines_done),
        "worker",
    ),
    JobSeries(
        "worker_restarts",
        "counter",
        "Engines started again, by worker, if there are several.",
        lambda s: _by_worker(s, lambda worker: worker.restarts),
        "worker",
    ),
    JobSeries("cost", "gauge", "Cost so far, in the currency of --gpu-price.", lambda s: s.cost),
    JobSeries("retries", "counter", "Requests retried, by cause, in all runs.", lambda s: s.retries, "cause"),
    JobSeries("engine_deaths", "counter", "Engines lost, in all runs.", lambda s: s.engine_deaths, "lost"),
    JobSeries("poison_rows", "gauge", "Lines that killed the engine and became error lines.", lambda s: s.poison_rows),
    JobSeries(
        "memory_rungs", "gauge", "Engines replaced because they ran out of memory.", lambda s: len(s.memory_rungs)
    ),
    JobSeries(
        "suspects",
        "gauge",
        "Lines that run in isolation, because one of them may kill the engine.",
        lambda s: s.suspects,
    ),
)


class JobCollector(Collector):
    """Shows the last status. The job's thread replaces it; the metrics server's thread reads it."""

    def __init__(self) -> None:
        self.status: JobStatus | None = None  # None: the main loop has not started

    def collect(self) -> Iterator[Metric]:
        status = self.status
        if status is not None:
            yield from filter(None, (series.metric(status) for series in SERIES))


def _one_of(state: JobState) -> dict[str, float]:
    return {each: float(each == state) for each in get_args(JobState)}


def _by_gpu(status: JobStatus, field: str) -> dict[str, float] | None:
    """What the GPUs report, by index; what they do not is left out."""
    values = {str(gpu.index): getattr(gpu, field) for gpu in status.gpus}
    return {index: value for index, value in values.items() if value is not None} or None


def _by_worker(status: JobStatus, read: Callable[[WorkerStatus], float]) -> dict[str, float] | None:
    return {str(worker.number): float(read(worker)) for worker in status.workers} or None


def _by_state(workers: Sequence[WorkerStatus]) -> dict[str, float] | None:
    """Every state, so that a series does not end when no worker is in it."""
    counts = {state: float(sum(worker.state == state for worker in workers)) for state in get_args(WorkerState)}
    return counts if workers else None


def _given(name: str | None) -> dict[str, float] | None:
    return None if name is None else {name: 1.0}
