"""What a benchmark needs of an engine, whichever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.bench.workloads import Workload
from headrace.engine.settings import SettingInForce, Source
from headrace.errors import HeadraceError

# Why an engine did not start or did not survive. `unsupported`: it has no such setting or mode.
FailureKind = Literal["not_installed", "bad_setting", "oom", "timeout", "crash", "unreachable", "unsupported"]


__all__ = [
    "Engine",
    "EngineFailure",
    "FailureKind",
    "OfflineRun",
    "RunningEngine",
    "SettingInForce",
    "Source",
]


class EngineFailure(HeadraceError):
    """An engine that did not start, or died. `log_tail` has its last lines."""

    def __init__(self, kind: FailureKind, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.log_tail = log_tail


@dataclass(frozen=True, slots=True)
class OfflineRun:
    """One workload through an engine in process."""

    seconds: float
    output_lens: list[int]  # tokens of each answer, in the order of the requests
    prompt_lens: list[int]
    counters: Mapping[str, float] = field(default_factory=dict)  # num_steps, num_preemptions, host_ms_per_step, ...


class RunningEngine(ABC):
    """A started engine. `stop` must be called; a context manager does."""

    name: str
    start_s: float | None  # from the launch to ready; None: the settings were changed without a restart
    model_name: str  # under which requests ask for it
    address: str | None = None  # base URL, if it serves HTTP

    @abstractmethod
    def settings_in_force(self) -> dict[str, SettingInForce]: ...

    @abstractmethod
    def versions(self) -> dict[str, str]: ...

    def model_facts(self) -> dict[str, Any]:
        """Name, digest of the files and shape of the model, as far as they are known."""
        return {"name": self.model_name}

    def counters(self) -> dict[str, float]:
        """Lifetime counters now, under names without the engine's prefix: num_preemptions, prefix_hit_tokens, ...

        A benchmark takes the difference of two calls. Empty if the engine has none.
        """
        return {}

    def run_offline(self, workload: Workload) -> OfflineRun:
        raise EngineFailure("unsupported", f"{self.name} serves over HTTP here and does not run in process")

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        """Apply other settings without a restart. False: they need one, and nothing has changed.

        The engine is then as if it had been started with these settings alone. Raises EngineFailure for settings that
        `start` would refuse; those before stay in force.
        """
        return False

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, so that rounds are equal. False if the engine cannot."""
        return False

    def is_alive(self) -> bool:
        return True

    def failure(self) -> EngineFailure | None:
        """Why it is not alive any more, by its exit code and log; None while it is."""
        return None if self.is_alive() else EngineFailure("crash", f"{self.name} has ended", self.log_tail())

    def pids(self) -> list[int]:
        """Its processes on this machine, for CPU time and memory."""
        return []

    def log_tail(self) -> str:
        return ""

    def launch_command(self) -> str | None:
        """The command line that a user would type to get this engine."""
        return None

    @abstractmethod
    def stop(self) -> None: ...

    def stop_safely(self, say: Callable[[str], None]) -> None:
        """Stop it; an error is said and not raised, since what was measured stays measured."""
        try:
            self.stop()
        except KeyboardInterrupt:
            self.stop()  # an interruption must not leave an engine behind that holds the device
            raise
        except Exception as error:  # noqa: BLE001
            say(f"  {self.name} did not stop cleanly: {error}")

    def __enter__(self) -> RunningEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Engine(ABC):
    """A kind of engine that can be started with settings, perhaps many times."""

    name: str

    @abstractmethod
    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        """Start with these settings (vLLM's names), over HTTP or in process. Raises EngineFailure."""
