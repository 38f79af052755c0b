"""Reads what a profile has left: the record of the engine (JSON) and the trace of the torch profiler (Chrome's format,
plain or gzip). Also a trace alone, of another engine."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.errors import ConfigError

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


class Event(msgspec.Struct, frozen=True, gc=False):
    """One event of Chrome's trace format. Times in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0

    @property
    def end(self) -> float:
        return self.ts + self.dur


class _TraceFile(msgspec.Struct, frozen=True):
    traceEvents: list[Event]
    baseTimeNanoseconds: int = 0


@dataclass(frozen=True)
class Trace:
    """The events with a duration."""

    events: list[Event]
    base_ns: int  # Unix time of `ts` 0

    @property
    def has_kernels(self) -> bool:
        return any(event.cat in DEVICE_CATEGORIES for event in self.events)


class StepLine(msgspec.Struct, frozen=True, array_like=True):
    """One step of the engine's log. Times are Unix seconds; `kv_tokens` and `pairs` are means over the layers."""

    step: int
    started_at: float
    planned_at: float  # the step is submitted
    collected_at: float  # the result of an earlier step has arrived
    ended_at: float
    host_s: float
    wait_s: float
    num_tokens: int
    num_seqs: int
    num_decodes: int
    num_samples: int
    kv_tokens: float  # context tokens that decoding sequences read
    pairs: float  # of query and context tokens in prefills
    is_last: bool  # the engine had no work after it


class ModelNumbers(msgspec.Struct, frozen=True):
    """What the work of a step follows from."""

    num_layers: int
    hidden_size: int
    q_size: int
    kv_size: int
    mlp_width: int
    vocab_size: int
    active_params: int  # of the layers' matrices, for one token
    weight_bytes: int  # of all layers, as they are in memory
    head_bytes: int
    kv_token_bytes: int  # keys and values of a token, all layers
    activation_bytes: int  # of one element
    logit_bytes: int
    is_fp8: bool = False
    is_gated: bool = True
    few_rows: int = 0  # up to so many tokens a step reads copies of some matrices instead, which take
    few_weight_bytes: int = 0  # instead of `weight_bytes`
    few_head_bytes: int = 0  # instead of `head_bytes`, with so many samples


class Ceilings(msgspec.Struct, frozen=True):
    """What the device was measured to reach. None: it could not be measured."""

    bandwidth: float | None = None  # bytes per second, of a copy
    gemm_rate: float | None = None  # FLOP/s in the type of the weights
    note: str = ""


class Window(msgspec.Struct, frozen=True):
    seconds: float
    num_steps: int
    stopped_by: str = "request"  # or the limit that was reached


class ProfileRecord(msgspec.Struct, frozen=True):
    """What an engine writes beside its trace (`engine/profiler.py`)."""

    trace: str  # name of the file beside it; empty: none
    device: str
    device_name: str
    window: Window
    model: ModelNumbers
    ceilings: Ceilings
    steps: list[StepLine] = []
    settings: dict[str, str] = {}
    model_name: str = ""
    headrace_version: str = ""
    torch_version: str = ""
    started_at: float = 0.0


def read_profile(path: str | Path) -> tuple[ProfileRecord | None, Trace | None]:
    """Read a record with the trace beside it, or a trace with the record beside it, or a trace alone."""
    path = Path(path)
    data = _read_bytes(path)
    if b'"traceEvents"' in data[:1_000_000] or b'"traceEvents"' in data[-1_000_000:]:
        record_path = path.with_name(path.name.partition(".trace.json")[0] + ".profile.json")
        has_record = ".trace.json" in path.name and record_path.exists()
        return (read_record(record_path) if has_record else None), decode_trace(data, path)
    record = _decode_record(data, path)
    trace_path = path.with_name(record.trace) if record.trace else None
    if trace_path is None:
        return record, None
    return record, read_trace(trace_path)


def read_record(path: str | Path) -> ProfileRecord:
    return _decode_record(_read_bytes(Path(path)), Path(path))


def read_trace(path: str | Path) -> Trace:
    return decode_trace(_read_bytes(Path(path)), Path(path))


def decode_trace(data: bytes, path: Path) -> Trace:
    try:
        file = msgspec.json.decode(data, type=_TraceFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a trace of the torch profiler: {error}") from error
    return Trace([event for event in file.traceEvents if event.ph == "X"], file.baseTimeNanoseconds)


def _decode_record(data: bytes, path: Path) -> ProfileRecord:
    try:
        return msgspec.json.decode(data, type=ProfileRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is neither a trace nor a record of a profile: {error}") from error


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"{path} is not complete: {error}") from error
