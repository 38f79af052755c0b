"""A job's check without its model: every line that could not be answered, and what the rest would take.

Lines go through the same parser, tokenizer and limits as in a run; only the weights are not loaded.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.config import EngineConfig
from headrace.engine.checks import RequestChecks
from headrace.engine.grammars import Grammars
from headrace.engine.prompts import PromptReader
from headrace.engine.resolve import resolve
from headrace.engine.start import open_model, tokenizer_of
from headrace.errors import JobError, RequestError
from headrace.hardware import read_facts, read_gpu
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.last_checks import LastChecks
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.lines import BadLine, LineParser
from headrace.jobs.input.prepare import LinePreparer, Work
from headrace.jobs.input.reply import JobFacts
from headrace.jobs.spec import STANDARD_STREAM, JobSpec
from headrace.jobs.status.report import ALL_ANSWERED, SOME_FAILED
from headrace.text import Tokenizer
from headrace.types import Request

SAMPLED_LINES = 1_000  # whose answers' size without text is looked at
BYTES_PER_TOKEN = 4.0  # of text, where the prompts do not tell


@dataclass(frozen=True, slots=True)
class Front:
    """What of an engine is known without its weights."""

    model_name: str
    tokenizer: Tokenizer | None
    vocab_size: int
    checks: RequestChecks
    grammars: Grammars | None = None


def open_front(config: EngineConfig) -> Front:
    checkpoint = open_model(config)
    facts = read_facts()
    if config.device != "cpu":
        facts = replace(facts, gpu=read_gpu())
    spec = checkpoint.spec
    limits = resolve(config, spec, facts).limits
    checks = RequestChecks(limits, spec.eos_token_ids, spec.vocab_size)
    tokenizer = tokenizer_of(config, checkpoint)
    grammars = Grammars(tokenizer, vocab_size=spec.vocab_size, eos_token_ids=spec.eos_token_ids)
    return Front(config.model, tokenizer, spec.vocab_size, checks, grammars)


@dataclass(frozen=True, slots=True)
class Rate:
    """Generated tokens a second, and how long answers are where that was seen."""

    tokens_per_second: float
    source: str
    tokens_per_answer: float | None = None

    @classmethod
    def read(cls, given: str) -> Rate:
        """A number, or the path of a summary that `--json-summary` wrote."""
        try:
            number = float(given)
        except ValueError:
            return cls._of_summary(given)
        if number <= 0:
            raise JobError(f"a rate must be above 0 tokens a second, got {given}")
        return cls(number, "as given")

    @classmethod
    def _of_summary(cls, path: str) -> Rate:
        try:
            with open(path, "rb") as file:
                summary = msgspec.json.decode(file.read(), type=dict[str, Any])
            rate, answered = float(summary["completion_tokens_per_second"]), int(summary["answered"])
            tokens = int(summary["completion_tokens"])
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise JobError(f"{path} is neither a number nor a summary of --json-summary: {error!r}") from None
        if rate <= 0 or answered <= 0:
            raise JobError(f"{path} is the summary of a job without answers; it tells no rate")
        return cls(rate, f"as in {path} ({summary.get('model')})", tokens / answered)


@dataclass(frozen=True, slots=True)
class Problem:
    line: int  # from 1
    offset: int  # bytes; of Parquet, rows
    code: str
    message: str

    def __str__(self) -> str:
        return f"line {self.line}, byte {self.offset}: {self.code}: {self.message}"


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """Filled by `check_job`, then only read."""

    input: str
    max_model_len: int
    rate: Rate | None
    num_lines: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code
    failure: str | None = None  # why the input could not be read to its end
    num_prompt_tokens: int = 0
    num_prompt_bytes: int = 0  # of the prompts that are text
    num_text_tokens: int = 0  # of the same
    longest_prompt: int = 0
    most_completion_tokens: int = 0
    num_sampled: int = 0
    num_sampled_bytes: int = 0
    free_bytes: int | None = None
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def num_bad(self) -> int:
        return self.errors.total()

    @property
    def num_good(self) -> int:
        return self.num_lines - self.num_bad

    @property
    def exit_code(self) -> int:
        return SOME_FAILED if self.num_bad or self.failure else ALL_ANSWERED

    @property
    def expected_completion_tokens(self) -> int | None:
        """Known only where an earlier run has shown how long answers are."""
        if self.rate is None or self.rate.tokens_per_answer is None:
            return None
        return min(self.most_completion_tokens, round(self.rate.tokens_per_answer * self.num_good))

    @property
    def most_bytes(self) -> int:
        """Of an output as JSON lines, if every answer is as long as it may be."""
        of_line = self.num_sampled_bytes / max(1, self.num_sampled)
        per_token = self.num_prompt_bytes / self.num_text_tokens if self.num_text_tokens else BYTES_PER_TOKEN
        return round(of_line * self.num_lines + per_token * self.most_completion_tokens)

    @property
    def seconds(self) -> float | None:
        if self.rate is None:
            return None
        tokens = self.expected_completion_tokens
        return (self.most_completion_tokens if tokens is None else tokens) / self.rate.tokens_per_second

    def rows(self) -> list[tuple[str, str]]:
        expected = self.expected_completion_tokens
        as_before = "" if expected is None else f", about {expected:,} if answers are as long as before"
        free = "" if self.free_bytes is None else f", {_size(self.free_bytes)} free"
        longest = f"the longest prompt {self.longest_prompt:,} of the context's {self.max_model_len:,}"
        rows = [
            ("tokens in", f"{self.num_prompt_tokens:,}; {longest}"),
            ("tokens out", f"at most {self.most_completion_tokens:,}{as_before}"),
            ("disk", f"at most {_size(self.most_bytes)} as JSON lines{free}"),
            ("time", self._time()),
        ]
        if self.num_bad:
            rows.append(("errors", ", ".join(f"{code} {count:,}" for code, count in self.errors.most_common())))
        rows += [("note", f"{note} ({count:,} lines)") for note, count in self.notes.most_common()]
        if self.free_bytes is not None and self.most_bytes > self.free_bytes:
            rows.append(("note", "the disk may become full before the end"))
        return rows

    def text(self) -> str:
        headline = f"headrace: {self.num_good:,} of {self.num_lines:,} lines of {self.input} can be answered"
        lines = [headline, *(f"  {name:<14}{value}" for name, value in self.rows())]
        if self.failure is not None:
            lines.append(f"headrace: the input could not be read to its end: {self.failure}")
        return "\n".join([*lines, ""])

    def as_json(self) -> dict[str, Any]:
        return {
            "input": self.input,
            "lines": self.num_lines,
            "answerable": self.num_good,
            "errors": self.num_bad,
            "errors_by_code": dict(self.errors),
            "failure": self.failure,
            "prompt_tokens": self.num_prompt_tokens,
            "longest_prompt": self.longest_prompt,
            "max_model_len": self.max_model_len,
            "completion_tokens_at_most": self.most_completion_tokens,
            "completion_tokens_expected": self.expected_completion_tokens,
            "output_bytes_at_most": self.most_bytes,
            "free_bytes": self.free_bytes,
            "seconds": self.seconds,
            "rate": None if self.rate is None else msgspec.to_builtins(self.rate),
            "notes": dict(self.notes),
        }

    def _time(self) -> str:
        if self.rate is None or self.seconds is None:
            return "not known; give --rate with tokens a second, or with the summary of an earlier run"
        bound = "at most" if self.expected_completion_tokens is None else "about"
        return f"{bound} {_duration(self.seconds)} at {self.rate.tokens_per_second:,.0f} tokens/s, {self.rate.source}"


def check_job(
    job: JobSpec, front: Front, *, tell: Callable[[Problem], None] = lambda problem: None, rate: Rate | None = None
) -> CheckReport:
    """Reads all lines. `tell` hears of each problem as it is found; only counts are kept."""
    report = CheckReport(
        input=job.input, max_model_len=front.checks.limits.max_model_len, rate=rate, free_bytes=_free_bytes(job.output)
    )
    check = _Check(job, front, report, tell)
    with closing(job.open_input()) as source:
        try:
            for batch in source.read_batches(limit=job.limit):
                check.take(batch)
        except JobError as error:
            report.failure = str(error)
    return report


class _Check:
    def __init__(self, job: JobSpec, front: Front, report: CheckReport, tell: Callable[[Problem], None]) -> None:
        parser = LineParser(job.defaults, seed=job.config.seed, model_name=front.model_name, template=job.template)
        prompts = PromptReader(front.tokenizer, front.vocab_size, front.grammars)
        self._preparer = LinePreparer(parser, prompts)
        self._last_checks = LastChecks(prompts)
        self._checks = front.checks
        self._facts = JobFacts(front.model_name, front.tokenizer)
        self._report = report
        self._tell = tell

    def take(self, lines: list[InputLine]) -> None:
        self._report.num_lines += len(lines)
        for line, item in zip(lines, self._last_checks.take(self._preparer.prepare(lines)), strict=True):
            if isinstance(item, BadLine):
                self._refuse(line, item.error)
            else:
                self._take_work(line, item)

    def _take_work(self, line: InputLine, work: Work) -> None:
        request = Request(str(line.index), work.token_ids, work.params, cache_salt=work.cache_salt)
        try:
            self._checks.check(request)
        except RequestError as error:
            self._refuse(line, error)
            return
        report, prompt_len = self._report, len(request.prompt_token_ids)
        report.num_prompt_tokens += prompt_len
        report.longest_prompt = max(report.longest_prompt, prompt_len)
        num_most = self._checks.limits.end_len(request) - prompt_len
        report.most_completion_tokens += num_most * request.params.num_sequences
        report.notes.update(work.notes)
        if work.num_text_bytes:
            report.num_text_tokens += prompt_len
            report.num_prompt_bytes += work.num_text_bytes
        if report.num_sampled < SAMPLED_LINES:
            report.num_sampled += 1
            report.num_sampled_bytes += self._len_without_text(work, request)

    def _len_without_text(self, work: Work, request: Request) -> int:
        empty = tuple(LineAnswer(i, "", 0, "length") for i in range(request.params.n))
        output = LineOutput(len(request.prompt_token_ids), empty)
        return len(work.reply.answer(output, self._facts)) + 1

    def _refuse(self, line: InputLine, error: RequestError) -> None:
        self._report.errors[error.code] += 1
        self._tell(Problem(line.number, line.offset, error.code, str(error)))


def _free_bytes(output: str) -> int | None:
    if output == STANDARD_STREAM or "://" in output:
        return None
    try:
        return shutil.disk_usage(os.path.dirname(output) or ".").free
    except OSError:
        return None


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"
