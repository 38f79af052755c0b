"""The engine's profiler: records a window of steps with the torch profiler, and a log of these steps.

    start   waits for the submitted steps, so that the window holds whole steps; turns on ranges and the profiler
    step    one line of the log: tokens, sequences, contexts, and the times of the engine's thread
    stop    waits again; writes NAME.trace.json.gz and NAME.profile.json (the log, the model, the device's ceilings)

All calls are on the engine's thread; the trace is written by a thread of its own, so that steps go on. A window ends by
itself after `max_seconds` or `max_steps`. While nothing is recorded, a step pays for one comparison (`core.on_step`):
ranges are put around functions by `start` and taken away by `stop`. With the tool "cuda" it only calls CUDA's profiler
API and turns on NVTX ranges, for nsys and ncu.

`headrace.profile` reads the two files.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter, strftime, time
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, get_args

import msgspec

from headrace.arguments import refuses_unknown
from headrace.dist.mesh import Mesh
from headrace.engine.core import EngineCore, StepTimes
from headrace.engine.offloading import sizes_of
from headrace.engine.precision import BYTES_OF
from headrace.engine.settings import Settings
from headrace.errors import ConfigError, ProfilerError
from headrace.models.shards import Shards
from headrace.models.spec import ModelSpec
from headrace.models.weight_sizes import COPY_ROWS
from headrace.steps import IntArray, StepPlan
from headrace.version import __version__

if TYPE_CHECKING:
    import torch

    from headrace.kernels.ranges import Ranges

Tool = Literal["torch", "cuda"]
Result = TypeVar("Result")

NVTX_VARIABLE = "HEADRACE_NVTX"  # "1": NVTX ranges all the time, for a tool that records by time
MAX_SECONDS = 60.0
MAX_STEPS = 2000  # a step of 32 layers leaves about 500 events of 300 bytes: 300 MB before compression

_numbers = count(1)
_log = logging.getLogger(__name__)


@refuses_unknown(ConfigError)
@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How a window is recorded."""

    directory: str
    name: str | None = None  # of the files; default: from the time
    tool: Tool = "torch"
    max_seconds: float = MAX_SECONDS
    max_steps: int = MAX_STEPS

    def __post_init__(self) -> None:
        if self.tool not in get_args(Tool):
            raise ConfigError(f"tool must be {' or '.join(get_args(Tool))}, got {self.tool!r}")
        if not 0 < self.max_seconds <= 3600:
            raise ConfigError(f"max_seconds must be above 0 and at most 3,600, got {self.max_seconds!r}")
        if not 1 <= self.max_steps <= 100_000:
            raise ConfigError(f"max_steps must be between 1 and 100,000, got {self.max_steps!r}")
        if self.name is not None and (not self.name or not self.name.replace("-", "").replace("_", "").isalnum()):
            raise ConfigError(f"name must be letters, digits, - and _, got {self.name!r}")


class ProfiledRunner(Protocol):
    """What a runner offers to a profiler."""

    def call(self, function: Callable[[], Result]) -> Result: ...

    def use_ranges(self, ranges: Ranges | None) -> None: ...


class _Window:
    """An open window: its log, and the torch profiler that records it."""

    def __init__(self, options: ProfileOptions, profiler: torch.profiler.profile | None) -> None:
        self.options = options
        self.profiler = profiler
        self.lines: list[tuple[Any, ...]] = []
        self.started_at = time()
        self.started = perf_counter()
        self.offset = self.started_at - self.started  # from `perf_counter` to Unix time
        number = f"{os.getpid()}-{next(_numbers)}"
        self.name = options.name or strftime(f"headrace-%Y%m%d-%H%M%S-{number}")

    @property
    def is_full(self) -> str | None:
        """The limit that the window has reached."""
        if len(self.lines) >= self.options.max_steps:
            return f"max_steps {self.options.max_steps:,}"
        if perf_counter() - self.started >= self.options.max_seconds:
            return f"max_seconds {self.options.max_seconds:g}"
        return None


class EngineProfiler:
    """Owned by the engine's loop. `start` and `stop` are called on its thread, like the core's steps."""

    def __init__(self, core: EngineCore, spec: ModelSpec, settings: Settings, model_name: str) -> None:
        self._core = core
        self._spec, self._settings, self._model_name = spec, settings, model_name
        self._windows = Counter(spec.windows)  # number of layers by the length of their window
        self._window: _Window | None = None
        self._ended: Future[dict[str, Any]] | None = None  # of a window that ended at its limit
        self._ceilings: dict[str, Any] | None = None
        if os.environ.get(NVTX_VARIABLE, "") == "1" and settings.device == "cuda":
            self._use_ranges("cuda")

    def start(self, options: ProfileOptions) -> dict[str, Any]:
        """Open a window. Raises ProfilerError if one is open."""
        if self._window is not None:
            raise ProfilerError(
                f"a profile is already being recorded ({self._window.name}); stop it first, or wait until it ends by "
                f"itself after {self._window.options.max_seconds:g} s",
                is_conflict=True,
            )
        if options.tool == "cuda" and self._settings.device != "cuda":
            raise ProfilerError(
                f"the tool 'cuda' needs a GPU; this engine runs on {self._settings.device}", is_conflict=True
            )
        directory = Path(options.directory)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not os.access(directory, os.W_OK):
                raise PermissionError(13, "no permission to write")
        except OSError as error:
            raise ProfilerError(f"the profile directory {directory} cannot be used: {error.strerror}") from error
        self._ended = None
        self._use_ranges(options.tool)
        started = perf_counter()
        try:
            profiler = self._runner.call(_start_cuda_tool if options.tool == "cuda" else self._start_torch)
        except BaseException:
            self._use_ranges(None)
            raise
        self._window = _Window(options, profiler)
        self._core.on_step = self._observe
        return {
            "name": self._window.name,
            "directory": str(directory.resolve()),
            "tool": options.tool,
            "max_seconds": options.max_seconds,
            "max_steps": options.max_steps,
            "start_seconds": round(perf_counter() - started, 4),
            "num_finished_steps": self._core.num_finished_steps,
            "at": time(),
        }

    def stop(self) -> Future[dict[str, Any]]:
        """Close the window; the future has its record once the files are written. Raises ProfilerError if there is
        none."""
        if self._window is None:
            ended, self._ended = self._ended, None
            if ended is not None:
                return ended
            raise ProfilerError("no profile is being recorded; start one first", is_conflict=True)
        return self._finish("request")

    def close(self) -> None:
        """Drop an open window when the engine ends."""
        if self._window is not None and self._window.profiler is not None:
            self._core.on_step, window, self._window = None, self._window, None
            try:
                self._runner.call(lambda: _stop_torch(window.profiler))
            except Exception as error:  # noqa: BLE001  the engine is ending for another reason
                _log.warning("the profile could not be ended: %r", error)

    @property
    def _runner(self) -> ProfiledRunner:
        runner: Any = self._core.runner
        if not hasattr(runner, "use_ranges"):
            raise ProfilerError(f"a {type(runner).__name__} cannot be profiled")
        profiled: ProfiledRunner = runner
        return profiled

    def _use_ranges(self, tool: Tool | None) -> None:
        from headrace.kernels.ranges import nvtx_ranges, torch_ranges

        if tool is None and os.environ.get(NVTX_VARIABLE, "") == "1" and self._settings.device == "cuda":
            tool = "cuda"
        self._runner.use_ranges(None if tool is None else torch_ranges if tool == "torch" else nvtx_ranges)

    def _start_torch(self) -> torch.profiler.profile:
        """Runs on the thread whose operations are recorded."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it prints a line for each start and stop
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # with CUDA graphs, a later start after a teardown may crash
        import torch

        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._settings.device == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        # With acc_events, stopping would make an object of each event: several seconds without a step.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        profiler = torch.profiler.profile(activities=kinds, acc_events=False)
        profiler.start()
        return profiler

    def _observe(self, plan: StepPlan | None, contexts: IntArray | None, times: StepTimes) -> None:
        window = self._window
        assert window is not None
        window.lines.append(self._line(window, plan, contexts, times))
        limit = window.is_full
        if limit is not None:
            _log.warning("the profile %s ends at its limit: %s", window.name, limit)
            self._end_at(limit)

    def _end_at(self, limit: str) -> None:
        """End the window within a step. A failure of the profiler must not end the engine: `stop` raises it."""
        try:
            self._ended = self._finish(limit)
        except Exception as error:  # noqa: BLE001
            _log.exception("the profiler has failed")
            self._ended = Future()
            self._ended.set_exception(ProfilerError(f"the profiler has failed: {error!r}"))

    def _line(
        self, window: _Window, plan: StepPlan | None, contexts: IntArray | None, times: StepTimes
    ) -> tuple[Any, ...]:
        """A `StepLine` of `headrace.profile.trace`."""
        at = [round(value + window.offset, 7) for value in times[:4]]
        host = (times.planned - times.started - times.waited) + (times.applied - times.collected)
        wait = times.waited + (times.collected - times.planned)
        spent = (round(host, 7), round(wait, 7))
        is_last = not self._core.has_work
        if plan is None or contexts is None:
            return (-1, *at, *spent, 0, 0, 0, 0, 0.0, 0.0, is_last)
        is_decode = plan.num_tokens == 1
        decoded, lens = contexts[is_decode], plan.num_tokens[~is_decode]
        before = contexts[~is_decode] - lens
        return (
            plan.step,
            *at,
            *spent,
            plan.num_batched_tokens,
            len(plan.slots),
            int(is_decode.sum()),
            int(plan.samples.sum()),
            self._mean_over_layers(decoded),
            # A window bounds the context of a prefill too, but not by much in a chunk: counted in full.
            float((lens * before + lens * (lens + 1) // 2).sum()),
            is_last,
        )

    def _mean_over_layers(self, contexts: IntArray) -> float:
        """Context tokens that a layer reads, in the mean over the layers."""
        total = 0
        for window, num_layers in self._windows.items():
            seen = contexts if window is None else contexts.clip(max=window)
            total += num_layers * int(seen.sum())
        return total / self._spec.num_layers

    # ---- the end of a window

    def _finish(self, stopped_by: str) -> Future[dict[str, Any]]:
        window = self._window
        assert window is not None
        self._core.on_step, self._window = None, None
        seconds = perf_counter() - window.started
        num_finished_steps = self._core.num_finished_steps
        runner, profiler = self._runner, window.profiler
        runner.call(_stop_cuda_tool if profiler is None else lambda: _stop_torch(profiler))
        self._use_ranges(None)
        if self._ceilings is None and profiler is not None:
            self._ceilings = runner.call(self._measure)
        record = self._record(window, seconds, stopped_by)
        record["num_finished_steps"], record["stopped_at"] = num_finished_steps, window.started_at + seconds
        record["resumed_at"] = time()
        future: Future[dict[str, Any]] = Future()
        if profiler is None:
            future.set_result(record)
        else:
            write = threading.Thread(target=_write, args=(window, record, future), name="headrace-profile-writer")
            write.start()
        return future

    def _measure(self) -> dict[str, Any]:
        import torch

        from headrace.runner.probe import measure_ceilings

        settings = self._settings
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        return measure_ceilings(device, dtype, settings.quantization)._asdict()

    def _record(self, window: _Window, seconds: float, stopped_by: str) -> dict[str, Any]:
        """A `ProfileRecord` of `headrace.profile.trace`."""
        import torch

        return {
            "trace": "" if window.profiler is None else window.name + ".trace.json.gz",
            "directory": str(Path(window.options.directory).resolve()),
            "name": window.name,
            "device": self._settings.device,
            "device_name": _device_name(self._settings.device),
            "window": {"seconds": round(seconds, 6), "num_steps": len(window.lines), "stopped_by": stopped_by},
            "model": model_numbers(self._spec, self._settings),
            "model_name": self._model_name,
            "ceilings": self._ceilings or {},
            "settings": {choice.name: choice.value for choice in self._settings.choices},
            "headrace_version": __version__,
            "torch_version": str(torch.__version__),
            "started_at": window.started_at,
            "steps": window.lines,
        }


def model_numbers(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """The numbers that the work of a step follows from: `ModelNumbers` of `headrace.profile.trace`."""
    element = 4 if settings.dtype == "float32" else 2
    kind = settings.quantization
    sizes = sizes_of(Shards(spec, Mesh()), element_bytes=element, kind=kind)
    head_params = spec.hidden_size * spec.vocab_size
    head_bytes = head_params * element
    if spec.packed_bits is not None and settings.device == "cpu":
        head_bytes = int(head_params * spec.packed_bits.head / 8)
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "q_size": spec.q_size,
        "kv_size": spec.kv_size,
        "mlp_width": spec.mlp_width,
        "vocab_size": spec.vocab_size,
        "active_params": _active_params(spec),
        "weight_bytes": sum(sizes.layers) - sizes.copies,
        "head_bytes": head_bytes,
        "few_rows": COPY_ROWS if sizes.head_copy else 0,
        "few_weight_bytes": sum(sizes.layers) - element * sizes.copies,  # an element of a copy is one byte
        "few_head_bytes": sizes.head_copy,
        "kv_token_bytes": spec.kv_elements_per_token * BYTES_OF[settings.kv_dtype],
        "activation_bytes": element,
        "logit_bytes": element,
        "is_fp8": kind == "fp8",
        "is_gated": spec.is_gated,
    }


def _active_params(spec: ModelSpec) -> int:
    """Weights of the layers' matrices that one token is multiplied with."""
    if spec.mixture is None:
        return spec.num_linear_params
    per_expert = (3 if spec.is_gated else 2) * spec.hidden_size * spec.mixture.expert_size
    num_idle = spec.mixture.num_experts - spec.mixture.num_chosen
    return spec.num_linear_params - len(spec.mixture.layers) * num_idle * per_expert


def _device_name(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    from headrace.hardware import read_facts

    facts = read_facts()
    return f"{facts.cpu_model} ({facts.num_cores} cores)"


def _stop_torch(profiler: torch.profiler.profile | None) -> None:
    assert profiler is not None
    profiler.stop()


def _start_cuda_tool() -> None:
    import torch

    torch.cuda.profiler.start()


def _stop_cuda_tool() -> None:
    import torch

    torch.cuda.profiler.stop()


def _write(window: _Window, record: dict[str, Any], future: Future[dict[str, Any]]) -> None:
    """Write the trace, then the record: a record without its trace would mislead."""
    directory = Path(window.options.directory)
    plain, path = directory / f".{window.name}.json", directory / f"{window.name}.trace.json.gz"
    try:
        assert window.profiler is not None
        window.profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        record["trace_bytes"] = path.stat().st_size
        plain.unlink()
        (directory / f"{window.name}.profile.json").write_bytes(msgspec.json.encode(record) + b"\n")
    except Exception as error:  # noqa: BLE001  the caller waits for the future
        for leftover in (plain, path):
            leftover.unlink(missing_ok=True)
        future.set_exception(ProfilerError(f"the profile could not be written to {directory}: {error}"))
    else:
        future.set_result(record)
