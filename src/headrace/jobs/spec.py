"""The description of a job: input, output and options. Validated before a model is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.adapters import check_adapter_names
from headrace.config import MAX_ENGINES, EngineConfig
from headrace.errors import ConfigError, JobError
from headrace.jobs.formats import Source, open_source
from headrace.jobs.formats.file_format import format_of
from headrace.jobs.formats.locations import STANDARD_STREAM, can_be_read_again, check_bucket, exists, is_url, local_path
from headrace.jobs.formats.sinks import require_libraries
from headrace.jobs.input.plain_lines import PARAMETERS
from headrace.jobs.input.template import LineTemplate
from headrace.jobs.times import deadline_at
from headrace.openai.parser_names import AUTOMATIC, ParserNames, check_parser_names
from headrace.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    input: str  # a path, or '-' for stdin
    output: str  # a path, or '-' for stdout
    config: EngineConfig = field(default_factory=EngineConfig)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams, for lines that do not set them
    limit: int | None = None  # answer only this many lines
    overwrite: bool = False
    template: LineTemplate | None = None  # makes a request of each line; None: lines are requests
    input_format: str | None = None  # None: from the file name
    output_format: str | None = None
    max_error_rate: float = 0.1  # of at least 1,000 lines; 1 never stops
    gpu_price: float | None = None  # per GPU hour, in any currency
    keep_order: bool = False  # publish in the order of the input, not of completion
    redo: str | None = None  # repeat these lines, see `store.redo`
    overrides: Mapping[str, Any] = field(default_factory=dict)  # parameters of the repeated lines
    metrics_port: int | None = None  # serve the job's metrics on this port of localhost; 0: any free port
    deadline: str | None = None  # a time, or a duration from the start of the job: see `times`
    disk_wait_s: float = 3600.0  # how long to wait for space on a full disk
    auto_settings: dict[str, Any] | None = None  # of `config`, taken from a checkpoint: kept when the job is resumed
    workers: int | None = None  # engines side by side on this machine; None: one for each visible GPU, or one
    ray: str | None = None  # run the workers on the Ray cluster at this address, or 'auto'; None: on this machine
    parser_names: ParserNames = AUTOMATIC  # of tool calls and reasoning in answers to OpenAI's chat lines
    model_names: tuple[str, ...] = ()  # of the model itself, beside `config.model`: only adapters need them told apart
    grace_s: float = 10.0  # how long lines in flight may continue after a request to stop

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if not 0 <= self.max_error_rate <= 1:
            raise ConfigError(f"max_error_rate must be between 0 and 1, got {self.max_error_rate}")
        if self.gpu_price is not None and not 0 < self.gpu_price < math.inf:
            raise ConfigError(f"gpu_price must be a number above 0, got {self.gpu_price}")
        if self.metrics_port is not None and not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"metrics_port must be between 0 and 65535, got {self.metrics_port}")
        if self.workers is not None and not 1 <= self.workers <= MAX_ENGINES:
            raise ConfigError(f"workers must be between 1 and {MAX_ENGINES}, got {self.workers}")
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(f"grace must be a number of at least 0, got {self.grace_s}")
        if self.deadline is not None:
            self._check_deadline(self.deadline)
        if not 0 <= self.disk_wait_s < math.inf:
            raise ConfigError(f"disk_wait must be a time of 0 s or more, got {self.disk_wait_s}")
        if self.overrides and self.redo is None:
            raise ConfigError("set changes lines that are repeated: select them with redo (or retry-errors)")
        if self.redo is not None and self.overwrite:
            raise ConfigError("redo keeps the other lines and overwrite discards them; give one")
        if not self.is_durable and (self.keep_order or self.redo is not None):
            raise ConfigError(f"keep-order and redo need an output that is a file, not {self.output}")
        check_adapter_names(self.config.adapter_paths, self.model_names or (self.config.model,))
        check_parser_names(self.parser_names)
        SamplingParams(**self.defaults)  # refuses values that no line could use

    def _check_deadline(self, text: str) -> None:
        deadline_at(text, now=0.0)
        if not self.is_resumable:
            raise ConfigError(
                "a deadline needs an input that can be read again and an output that is a file: unfinished lines are "
                f"read once more and become error lines; got {self.input} and {self.output}"
            )

    @property
    def is_durable(self) -> bool:
        return is_durable(self.output)

    @property
    def is_resumable(self) -> bool:
        return self.is_durable and can_be_read_again(self.input)

    @property
    def directory(self) -> Path:
        """The job directory, which stays after the output is published."""
        return job_directory(self.output)

    def check_paths(self) -> None:
        """Refuse an input that cannot be read or an output that cannot be written, before a model is loaded."""
        format_of(self.input, self.input_format)
        require_libraries(format_of(self.output, self.output_format))
        if is_url(self.input):
            _check_object(self.input)
        elif self.input != STANDARD_STREAM:
            _check_input(Path(local_path(self.input)))
        if is_url(self.output):
            self._check_output_object()
        elif self.output != STANDARD_STREAM:
            self._check_output(Path(local_path(self.output)))

    def open_input(self) -> Source:
        """Refuses a table without the columns that the template names."""
        json_columns = PARAMETERS if self.template is None else ()
        source = open_source(self.input, format=self.input_format, json_columns=json_columns)
        try:
            self._check_columns(source)
        except JobError:
            source.close()
            raise
        return source

    def _check_columns(self, source: Source) -> None:
        if self.template is not None:
            self.template.check(source)
        elif source.columns is not None and not {"prompt", "messages"} & set(source.columns):
            raise JobError(
                f"{self.input} has no column 'prompt' or 'messages' but {', '.join(source.columns) or 'none at all'}; "
                "give the prompt with --prompt 'text with {column}', or --messages-column"
            )

    def _check_output_object(self) -> None:
        check_bucket(self.output)
        if not self.overwrite and not self._has_job and exists(self.output):
            raise JobError(f"the output {self.output} exists; give another, or --overwrite to replace it")

    def _check_output(self, path: Path) -> None:
        if path.is_dir():
            raise JobError(f"the output {path} is a directory; name a file in it, such as {path / 'answers.jsonl'}")
        given = local_path(self.input)
        if path.exists() and os.path.exists(given) and path.samefile(given):
            raise JobError(f"the output {path} is the input itself; give another file with -o")
        if path.is_file() and not self.overwrite and not self._has_job:
            raise JobError(f"the output {path} exists; give another file, or --overwrite to replace it")
        if not self.is_durable:
            _check_writable(path, "the output")
        elif path.parent.is_dir():
            _check_writable(self.directory.parent, "the output's directory")
        else:
            raise JobError(f"the output's directory {path.parent} does not exist; create it first")

    @property
    def _has_job(self) -> bool:
        return (self.directory / "manifest.json").is_file()


def is_durable(output: str) -> bool:
    """Whether it is a file or an object, which can be replaced atomically. Streams and devices can only be written."""
    if output == STANDARD_STREAM or is_url(output):
        return output != STANDARD_STREAM
    return not os.path.exists(local_path(output)) or os.path.isfile(local_path(output))


def job_directory(output: str) -> Path:
    """The same for every name of one file. For an object in a store it is in the working directory."""
    if is_url(output):
        digest = blake2b(output.encode(), digest_size=4).hexdigest()
        return Path.cwd() / f"{output.rpartition('/')[2]}-{digest}.job"
    return Path(os.path.realpath(local_path(output)) + ".job")


def _check_input(path: Path) -> None:
    if not path.exists():
        raise JobError(f"the input {path} does not exist")
    if path.is_dir():
        raise JobError(f"the input {path} is a directory; name a file of JSON lines in it")
    if not os.access(path, os.R_OK):
        raise JobError(f"the input {path} cannot be read: permission denied")


def _check_object(url: str) -> None:
    if not exists(url):
        raise JobError(f"the input {url} does not exist")


def _check_writable(path: Path, what: str) -> None:
    if not os.access(path, os.W_OK):
        raise JobError(f"{what} {path} cannot be written: permission denied")
