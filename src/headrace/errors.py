"""Every error that Headrace raises on purpose.

    HeadraceError
    ├── ConfigError            a setting is unknown, impossible, or would be ignored   (also a ValueError)
    ├── ModelError             a model cannot be found, read or run
    │   ├── ModelNotFoundError      there is no such directory, file or hub model
    │   ├── UnsupportedModelError   its architecture or format is not one we know
    │   └── AdapterError            a LoRA adapter cannot be read, or does not fit the model or its tables
    ├── RequestError           one request is refused; carries the parameter at fault  (also a ValueError)
    ├── BatchError             a batched function returned no valid list of results
    ├── EngineDeadError        the engine stopped; nothing in flight will finish
    │   └── MachineLostError   its machine has gone, whatever the engine did
    ├── FailedRequestError     the engine failed on one valid request
    ├── ProfilerError          a profile cannot be started, stopped or written
    └── JobError               a batch job cannot start or continue
        └── ResumableJobError  the same command continues the job once the cause is gone
            └── NoRoomError    a full disk, or a quota that is used up

A message says what happened, with numbers, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadraceError(Exception):
    """The root: catch this to catch everything Headrace raises on purpose."""


class ConfigError(HeadraceError, ValueError):
    pass


class ModelError(HeadraceError):
    pass


class ModelNotFoundError(ModelError):
    pass


class UnsupportedModelError(ModelError):
    pass


class AdapterError(ModelError):
    pass


class RequestError(HeadraceError, ValueError):
    """One request is refused; `param` names the field at fault, `code` is the machine-readable reason."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BatchError(HeadraceError):
    pass


class EngineDeadError(HeadraceError):
    """The engine stopped. `code` is `engine_restarting` if it is being restarted, `asleep` if it was put to sleep, else
    `engine_dead`."""

    def __init__(self, message: str, *, code: str = "engine_dead") -> None:
        super().__init__(message)
        self.code = code


class MachineLostError(EngineDeadError):
    """The machine of the engine has gone, with everything on it. No request is the cause."""


class FailedRequestError(HeadraceError):
    """The engine failed on one request. The request itself was valid."""


class ProfilerError(HeadraceError):
    """`is_conflict`: the profiler is not in the state that the command needs, as when a profile is already recorded."""

    def __init__(self, message: str, *, is_conflict: bool = False) -> None:
        super().__init__(message)
        self.is_conflict = is_conflict


class JobError(HeadraceError):
    pass


class ResumableJobError(JobError):
    pass


class NoRoomError(ResumableJobError):
    pass


def reason_of(error: Exception) -> str:
    """The reason without number and path, for a message that names the file. Errors of fsspec are often a bare path."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return str(error) or type(error).__name__


def nearest(name: str, known: Iterable[str]) -> str:
    """', did you mean ...?' for the known name closest to `name`, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else ""
