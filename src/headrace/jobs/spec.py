"""What a job is: which lines, answered how, into which file. Checked before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import ConfigError, JobError
from headrace.types import SamplingParams

STANDARD_STREAM = "-"  # as a file name: stdin or stdout


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    input: str  # a path, or '-' for stdin
    output: str  # a path, or '-' for stdout
    config: EngineConfig = field(default_factory=EngineConfig)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams, for lines that do not say
    limit: int | None = None  # answer only this many lines
    overwrite: bool = False
    keep_order: bool = False  # publish in the input's order, not as answers finished
    redo: str | None = None  # do these rows again, see `jobs.redo`
    overrides: Mapping[str, Any] = field(default_factory=dict)  # parameters of the rows that are done again
    grace_s: float = 10.0  # what is in flight may still finish when the job is asked to stop

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.grace_s < 0:
            raise ConfigError(f"grace must not be negative, got {self.grace_s}")
        if self.overrides and self.redo is None:
            raise ConfigError("set changes rows that are done again: say which with redo (or retry-errors)")
        if self.redo is not None and self.overwrite:
            raise ConfigError("redo keeps the other rows and overwrite gives them up; give one")
        if not self.is_durable and (self.keep_order or self.redo is not None):
            raise ConfigError(f"keep-order and redo need an output that is a file, not {self.output}")
        SamplingParams(**self.defaults)  # refuses what no line could use

    @property
    def is_durable(self) -> bool:
        """Whether the output is a file, which can be published at once. Streams and devices are only written to."""
        return self.output != STANDARD_STREAM and (not os.path.exists(self.output) or os.path.isfile(self.output))

    @property
    def is_resumable(self) -> bool:
        return self.is_durable and self.input != STANDARD_STREAM and os.path.isfile(self.input)

    @property
    def directory(self) -> Path:
        """Where the job is kept until its output is published, and after."""
        return job_directory(self.output)

    def check_paths(self) -> None:
        """Refuse what could not be read or written, while that is still cheap."""
        if self.input != STANDARD_STREAM:
            _check_input(Path(self.input))
        if self.output != STANDARD_STREAM:
            self._check_output(Path(self.output))

    def _check_output(self, path: Path) -> None:
        if path.is_dir():
            raise JobError(f"the output {path} is a directory; name a file in it, such as {path / 'answers.jsonl'}")
        if self.input != STANDARD_STREAM and path.exists() and path.samefile(self.input):
            raise JobError(f"the output {path} is the input itself; give another file with -o")
        if path.is_file() and not self.overwrite and not self._has_job:
            raise JobError(f"the output {path} exists; give another file, or --overwrite to replace it")
        if not self.is_durable:
            _check_writable(path, "the output")
        elif path.parent.is_dir():
            _check_writable(self.directory.parent, "the output's directory")
        else:
            raise JobError(f"the output's directory {path.parent} does not exist; make it first")

    @property
    def _has_job(self) -> bool:
        return (self.directory / "manifest.json").is_file()


def job_directory(output: str) -> Path:
    """The same for every name of one file."""
    return Path(os.path.realpath(output) + ".job")


def _check_input(path: Path) -> None:
    if not path.exists():
        raise JobError(f"there is no input {path}")
    if path.is_dir():
        raise JobError(f"the input {path} is a directory; name a file of JSON lines in it")
    if not os.access(path, os.R_OK):
        raise JobError(f"the input {path} cannot be read: permission denied")


def _check_writable(path: Path, what: str) -> None:
    if not os.access(path, os.W_OK):
        raise JobError(f"{what} {path} cannot be written: permission denied")
