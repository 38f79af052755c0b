"""What a check found: counts of lines and tokens, and estimates of disk space and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.jobs.preflight.rate import Rate
from headrace.jobs.status.report import ALL_ANSWERED, SOME_FAILED

BYTES_PER_TOKEN = 4.0  # of text, where the prompts are token ids and show no ratio


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
    """Filled by `check_job`, read-only afterwards."""

    input: str
    max_model_len: int
    rate: Rate | None
    num_lines: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code
    failure: str | None = None  # why the input could not be read to the end
    num_prompt_tokens: int = 0
    num_prompt_bytes: int = 0  # of the prompts that are text
    num_text_tokens: int = 0  # of the same prompts
    longest_prompt: int = 0
    max_completion_tokens: int = 0
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
        """Expected tokens of all answers. None unless an earlier run measured the length of answers."""
        if self.rate is None or self.rate.tokens_per_answer is None:
            return None
        return min(self.max_completion_tokens, round(self.rate.tokens_per_answer * self.num_good))

    @property
    def max_output_bytes(self) -> int:
        """Upper bound for an output in JSON lines: every answer reaches its limit."""
        of_line = self.num_sampled_bytes / max(1, self.num_sampled)
        per_token = self.num_prompt_bytes / self.num_text_tokens if self.num_text_tokens else BYTES_PER_TOKEN
        return round(of_line * self.num_lines + per_token * self.max_completion_tokens)

    @property
    def seconds(self) -> float | None:
        if self.rate is None:
            return None
        tokens = self.expected_completion_tokens
        return (self.max_completion_tokens if tokens is None else tokens) / self.rate.tokens_per_second

    def rows(self) -> list[tuple[str, str]]:
        expected = self.expected_completion_tokens
        as_before = "" if expected is None else f", about {expected:,} if answers are as long as before"
        free = "" if self.free_bytes is None else f", {_size(self.free_bytes)} free"
        longest = f"the longest prompt {self.longest_prompt:,} of the context's {self.max_model_len:,}"
        rows = [
            ("tokens in", f"{self.num_prompt_tokens:,}; {longest}"),
            ("tokens out", f"at most {self.max_completion_tokens:,}{as_before}"),
            ("disk", f"at most {_size(self.max_output_bytes)} as JSON lines{free}"),
            ("time", self._time()),
        ]
        if self.num_bad:
            rows.append(("errors", ", ".join(f"{code} {count:,}" for code, count in self.errors.most_common())))
        rows += [
            ("note", f"{note} ({count:,} {'line' if count == 1 else 'lines'})")
            for note, count in self.notes.most_common()
        ]
        if self.free_bytes is not None and self.max_output_bytes > self.free_bytes:
            rows.append(("note", "the disk may become full before the end"))
        return rows

    def text(self) -> str:
        headline = f"headrace: {self.num_good:,} of {self.num_lines:,} lines of {self.input} can be answered"
        lines = [headline, *(f"  {name:<14}{value}" for name, value in self.rows())]
        if self.failure is not None:
            lines.append(f"headrace: the input could not be read to the end: {self.failure}")
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
            "completion_tokens_at_most": self.max_completion_tokens,
            "completion_tokens_expected": self.expected_completion_tokens,
            "output_bytes_at_most": self.max_output_bytes,
            "free_bytes": self.free_bytes,
            "seconds": self.seconds,
            "rate": None if self.rate is None else msgspec.to_builtins(self.rate),
            "notes": dict(self.notes),
        }

    def _time(self) -> str:
        if self.rate is None or self.seconds is None:
            return "not known; give --rate with tokens per second, or with the summary of an earlier run"
        bound = "at most" if self.expected_completion_tokens is None else "about"
        return f"{bound} {_duration(self.seconds)} at {self.rate.tokens_per_second:,.0f} tokens/s, {self.rate.source}"


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
