"""The counts of a job by line, and its report at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.engine.core import EngineStats
from headrace.engine.in_force import shape_of
from headrace.engine.settings import Choice, SettingInForce
from headrace.errors import JobError, RequestError
from headrace.hardware.describe import current_commit, machine_facts, package_versions
from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.prepare import Work
from headrace.jobs.input.reply import message_of
from headrace.jobs.status.bottleneck import Limit
from headrace.jobs.store.failure_log import FailureCounts
from headrace.jobs.store.status_file import GpuStatus, Saved, WorkerStatus
from headrace.models.digests import digest_of_local_model
from headrace.models.spec import ModelSpec
from headrace.startup import StartupStage, stage_seconds

MAX_NOTES = 20
MAX_FIRST_ERRORS = 3
MIN_LINES_TO_JUDGE = 1_000

# Exit codes; 1 and 2 are the command's own. RESUMABLE is what sysexits.h calls EX_TEMPFAIL.
ALL_ANSWERED, SOME_FAILED, CANCELLED, RESUMABLE, STOPPED = 0, 3, 4, 75, 130


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and its answer, as an example of the output."""

    index: int
    question: str
    text: str


@dataclass(slots=True)
class Tally:
    """Counts by line. Owned by the job's main loop until the report is made."""

    num_read: int = 0  # finished or not
    num_bad: int = 0  # errors that were found before the line could start
    num_answered: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code
    first_errors: list[str] = field(default_factory=list)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    sample: Sample | None = None

    @property
    def num_failed(self) -> int:
        return self.errors.total()

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    def add_answer(self, line: Work, output: LineOutput, *, is_copy: bool = False) -> None:
        """`is_copy`: the line is a duplicate and got the answer of its original."""
        self.num_answered += 1
        self.num_prompt_tokens += output.num_prompt_tokens
        if not is_copy:
            self.num_cached_tokens += output.num_cached_tokens
        for answer in output.answers:
            self.num_generated_tokens += answer.num_tokens
            self.finish_reasons[answer.finish_reason or "none"] += 1
        for note in line.notes:
            if note in self.notes or len(self.notes) < MAX_NOTES:
                self.notes[note] += 1
        sample = self.sample
        if line.question is not None and output.answers and (sample is None or line.reply.index < sample.index):
            self.sample = Sample(line.reply.index, line.question, output.answers[0].text)

    def add_error(self, index: int, error: RequestError) -> None:
        self.errors[error.code] += 1
        if len(self.first_errors) < MAX_FIRST_ERRORS:
            self.first_errors.append(message_of(error, index))

    def refuse_too_many_errors(
        self, max_error_rate: float, *, num_in_flight: int = 0, is_resumable: bool = False
    ) -> None:
        """Stop a job whose input is probably wrong as a whole. A few hundred lines are too few to decide that.

        Errors are found earlier than answers: a bad line when it is read, long before the lines around it run. So all
        errors are compared with all lines read, and those of lines that were started with all lines that were started.
        A line that is not finished counts as good.
        """
        num_started = self.num_done - self.num_bad + num_in_flight
        for num_failed, num_lines, which in (
            (self.num_failed, self.num_read, "lines"),
            (self.num_failed - self.num_bad, num_started, "lines that were started"),
        ):
            if num_lines >= MIN_LINES_TO_JUDGE and num_failed > max_error_rate * num_lines:
                again = "; finished lines are kept, and a higher rate continues the job" if is_resumable else ""
                first = f"; the first: {self.first_errors[0]}" if self.first_errors else ""
                raise JobError(
                    f"{num_failed:,} of the first {num_lines:,} {which} are errors, more than --max-error-rate "
                    f"{max_error_rate:g}{first}; see all with --check{again}"
                )


@dataclass(frozen=True, kw_only=True)
class JobReport:
    output: str
    model_name: str
    was_stopped: bool
    num_in_flight: int  # when it was stopped
    tally: Tally
    seconds: float  # from the first line read to the last written
    start_seconds: float
    start_stages: tuple[StartupStage, ...] = ()
    stats: EngineStats
    choices: tuple[Choice, ...]
    in_force: Mapping[str, SettingInForce] = field(default_factory=dict)  # every setting; empty without an engine
    spec: ModelSpec | None = None
    saved: Saved = field(default_factory=Saved)
    is_on_gpu: bool = False
    gpu_price: float | None = None  # per hour
    num_before: int = 0  # lines that earlier runs finished
    num_error_lines: int | None = None  # in the whole output; None: the same as in this run
    job_directory: str | None = None  # None: the output is a stream, and nothing else is kept
    is_resumable: bool = False
    was_cancelled: bool = False
    was_expired: bool = False  # by the deadline: unfinished lines became error lines
    failures: FailureCounts = field(default_factory=FailureCounts)  # of all runs
    seconds_by_limit: Mapping[Limit, float] = field(default_factory=dict)  # how long each bottleneck was the one
    num_gpus: int = 1  # that the job held, if it ran on GPUs
    workers: tuple[WorkerStatus, ...] = ()  # empty if there was only one
    gpus: tuple[GpuStatus, ...] = ()
    gpus_missing: str | None = None  # why there are no figures of GPUs

    @property
    def gpu_hours(self) -> float | None:
        """Time for which GPUs were held, loading included, summed over them."""
        return self.num_gpus * (self.start_seconds + self.seconds) / 3600 if self.is_on_gpu else None

    @property
    def cost(self) -> float | None:
        """The cost in the currency of the price."""
        return None if self.gpu_hours is None or self.gpu_price is None else self.gpu_hours * self.gpu_price

    def cost_per_million(self, num_tokens: int) -> float | None:
        return None if self.cost is None or not num_tokens else self.cost * 1e6 / num_tokens

    @property
    def exit_code(self) -> int:
        if self.was_cancelled:
            return CANCELLED
        if self.was_stopped:
            return RESUMABLE if self.is_resumable else STOPPED
        num_errors = self.tally.num_failed if self.num_error_lines is None else self.num_error_lines
        return SOME_FAILED if num_errors else ALL_ANSWERED

    @property
    def outcome(self) -> str:
        if self.was_cancelled:
            return "cancelled"
        if self.was_expired:
            return "expired"
        return "stopped" if self.was_stopped else "finished"

    @property
    def prompt_tokens_per_second(self) -> float:
        return self.tally.num_prompt_tokens / max(1e-9, self.seconds)

    @property
    def generated_tokens_per_second(self) -> float:
        return self.tally.num_generated_tokens / max(1e-9, self.seconds)

    @property
    def host_seconds_per_step(self) -> float:
        return self.stats.host_seconds / max(1, self.stats.scheduler.num_steps)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields of `--json-summary`. Shares are between 0 and 1. Settings, machine and versions are as in
        records of benchmarks."""
        tally, scheduler = self.tally, self.stats.scheduler
        return {
            "output": self.output,
            "model": self.model_name,
            "outcome": self.outcome,
            "resumable": self.is_resumable and self.was_stopped,
            "requests": tally.num_done,
            "done_before": self.num_before,
            "answered": tally.num_answered,
            "errors": tally.num_failed,
            "errors_by_code": dict(tally.errors),
            "finish_reasons": dict(tally.finish_reasons),
            "prompt_tokens": tally.num_prompt_tokens,
            "cached_prompt_tokens": tally.num_cached_tokens,
            "completion_tokens": tally.num_generated_tokens,
            "saved": asdict(self.saved),
            "prompt_tokens_per_second": self.prompt_tokens_per_second,
            "completion_tokens_per_second": self.generated_tokens_per_second,
            "seconds": self.seconds,
            "start_seconds": self.start_seconds,
            "start_stages": stage_seconds(self.start_stages),
            "workers": [asdict(worker) for worker in self.workers],
            "gpu_hours": self.gpu_hours,
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "gpus_missing": self.gpus_missing,
            "cost": self.cost,
            "cost_per_million_tokens": self.cost_per_million(tally.num_prompt_tokens + tally.num_generated_tokens),
            "cost_per_million_completion_tokens": self.cost_per_million(tally.num_generated_tokens),
            "prefix_hit_share": scheduler.prefix_hit_share,
            "kv_use_peak": scheduler.max_kv_use,
            "kv_waste": scheduler.kv_waste,
            "preemptions": scheduler.num_preemptions,
            "steps": scheduler.num_steps,
            "tokens_per_step": scheduler.mean_batched_tokens,
            "host_seconds_per_step": self.host_seconds_per_step,
            "wait_seconds_per_step": self.stats.wait_seconds / max(1, scheduler.num_steps),
            "recomputed_tokens": scheduler.num_recomputed_tokens,
            "limited_by_seconds": dict(self.seconds_by_limit),
            "settings": {name: asdict(setting) for name, setting in self.in_force.items()},
            "model_digest": digest_of_local_model(self.model_name),
            "model_shape": None if self.spec is None else shape_of(self.spec),
            "machine": machine_facts(),
            "versions": package_versions(),
            "commit": current_commit(),
            "notes": dict(tally.notes),
            "trouble": asdict(self.failures),
        }
