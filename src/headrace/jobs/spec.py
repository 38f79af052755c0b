"""What a job is: which lines, answered how, into which file. Checked before a model is loaded."""

from __future__ import annotations

import math
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
    gpu_price: float | None = None  # of an hour of the GPU, in any currency

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.gpu_price is not None and not 0 < self.gpu_price < math.inf:
            raise ConfigError(f"gpu_price must be a number above 0, got {self.gpu_price}")
        SamplingParams(**self.defaults)  # refuses what no line could use

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
        if path.is_file() and not self.overwrite:
            raise JobError(f"the output {path} exists; give another file, or --overwrite to replace it")
        if path.exists():
            _check_writable(path, "the output")
        elif path.parent.is_dir():
            _check_writable(path.parent, "the output's directory")
        else:
            raise JobError(f"the output's directory {path.parent} does not exist; make it first")


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
