"""The log of a process on stderr, as text or as JSON.

As JSON, every line on stderr is one object: records of `logging` with their extra fields, lines that commands and
libraries print, warnings, uncaught exceptions, and the output of child processes (`copy_lines`).
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, BinaryIO, Literal, TextIO

LogFormat = Literal["text", "json"]

TEXT_FORMAT = "headrace: %(message)s"
PRINTED = "headrace"  # the logger of lines that commands print
FOREIGN = "stderr"  # and of lines that others print
INFO_LOGGERS = ("headrace.access", "headrace.load")  # of the others, warnings and errors are shown

_STANDARD = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"})
_PREFIX = re.compile(r"headrace(?: [a-z]+)?: (?=(?:(error|warning): )?)")
_is_json = False


def is_json() -> bool:
    """Whether this process writes its log as JSON."""
    return _is_json


def set_up_logs(log_format: LogFormat) -> None:
    """Set up `logging`, once per process; JSON cannot be turned off again."""
    if log_format == "json":
        _set_up_json()
    elif not _is_json:
        logging.basicConfig(format=TEXT_FORMAT, level=logging.WARNING, stream=sys.stderr)
    for name in INFO_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)


def _set_up_json() -> None:
    global _is_json  # noqa: PLW0603  the log belongs to the process
    if _is_json:
        return
    _is_json = True
    sys.stderr = lines = JsonLines(sys.stderr)
    handler = logging.StreamHandler(lines.out)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    warnings.formatwarning = lambda message, category, *where, **more: f"{category.__name__}: {message}"  # one line
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda failed: _log_uncaught(failed.exc_type, failed.exc_value, failed.exc_traceback)
    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
        os.environ.setdefault(name, "1")


def _log_uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        logging.getLogger(PRINTED).critical("uncaught %s", kind.__name__, exc_info=(kind, error, trace))


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: ts, level, logger, message, its extra fields, and an exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            fields["exception"] = {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": self.formatException(record.exc_info),
            }
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json_line(record.levelname, record.name, record.getMessage(), fields, created=record.created)


def json_line(
    level: str, logger: str, message: str, fields: Mapping[str, Any] | None = None, *, created: float | None = None
) -> str:
    """One object, without the end of the line. `created`: seconds since 1970; default: now."""
    at = datetime.now(UTC) if created is None else datetime.fromtimestamp(created, UTC)
    head = {
        "ts": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level.lower(),
        "logger": logger,
        "message": message,
    }
    return json.dumps(head | _finite(fields or {}) | head, default=str)


def _finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()
    }


class JsonLines(io.TextIOBase):
    """Stands for stderr: each printed line becomes an object. `out` is the stream behind it."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self._rest = ""  # of a line that has not ended yet
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
            for line in lines:
                self._emit(line)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            line, self._rest = self._rest, ""
            self._emit(line)
            self.out.flush()

    def fileno(self) -> int:
        return self.out.fileno()

    def isatty(self) -> bool:
        return False  # no progress bars, no colours

    def _emit(self, line: str) -> None:
        if line.strip():
            self.out.write(_printed(line) + "\n")
            self.out.flush()


def _printed(line: str, logger: str = FOREIGN) -> str:
    """A line of text as an object. Lines of commands start with the name of the program and perhaps a level."""
    found = _PREFIX.match(line)
    if found is None:
        return json_line("info", logger, line)
    return json_line(found[1] or "info", PRINTED, line[found.end() :])


def copy_lines(source: BinaryIO, logger: str) -> None:
    """Copy the output of a child process to the log, until it ends. Lines that are no objects become the message of
    one: a native library or an interpreter that crashes writes text."""
    out = sys.stderr.out if isinstance(sys.stderr, JsonLines) else sys.stderr
    with source:
        for raw in source:
            line = raw.decode(errors="replace").rstrip("\r\n")
            if not line.strip():
                continue
            is_object = line.startswith('{"ts":') and line.endswith("}")
            out.write((line if is_object else _printed(line, logger)) + "\n")
            out.flush()
