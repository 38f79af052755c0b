"""The messages between a front and an engine in another process, as msgpack of known types: nothing is pickled.

    front ─▶ engine   Start, then Submit, Abort, LimitRunning, ForgetPrefixes, StartProfile, StopProfile, LoadAdapter,
                      UnloadAdapter, at last Close
    engine ─▶ front   Stages, Ready, then a Step for each step with events, Heartbeats, Profiled, AdapterAnswers; or
                      Failed

Dataclasses are sent by their fields; both ends are the same version. Sampling parameters are built again from their
fields with their constructor, so a part that it accepts as a mapping may arrive as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, TypeAlias, get_type_hints

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.engine.checks import RequestChecks
from headrace.engine.core import EngineStats
from headrace.engine.profiler import ProfileOptions
from headrace.engine.settings import Settings
from headrace.startup import StartupStage
from headrace.types import Request, SamplingParams, SequenceEvent, TokenIds

_DTYPES: dict[str, np.dtype[Any]] = {
    "|u1": np.dtype(np.uint8),
    "<i4": np.dtype(np.int32),
    "<i8": np.dtype(np.int64),
    "<f4": np.dtype(np.float32),
    "<f8": np.dtype(np.float64),
}


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Start(_Message, frozen=True):
    config: EngineConfig


class Submit(_Message, frozen=True):
    request_id: str  # apart from the request, so that one that cannot be decoded gets an answer
    request: msgspec.Raw


class Abort(_Message, frozen=True):
    request_id: str
    index: int | None


class LimitRunning(_Message, frozen=True):
    num_seqs: int | None


class ForgetPrefixes(_Message, frozen=True):
    pass


class StartProfile(_Message, frozen=True):
    number: int  # of the command; its answer has the same
    options: ProfileOptions


class StopProfile(_Message, frozen=True):
    number: int


class LoadAdapter(_Message, frozen=True):
    number: int
    name: str
    path: str
    replaces: bool


class UnloadAdapter(_Message, frozen=True):
    number: int
    name: str


class Close(_Message, frozen=True):
    pass


class Stage(_Message, frozen=True):
    """Progress of the start."""

    stage: StartupStage


class Ready(_Message, frozen=True):
    settings: Settings
    checks: RequestChecks


class Failed(_Message, frozen=True):
    """Why the engine failed, at its start or later: the exception's class and its text."""

    kind: str
    text: str


class Step(_Message, frozen=True):
    """The events of a step. Their tokens are sent as one buffer; see `StepWriter` and `StepReader`."""

    events: msgspec.Raw
    token_ids: bytes
    num_tokens: bytes  # of each event
    stats: EngineStats | None  # not in every step


class Heartbeat(_Message, frozen=True):
    """Sent at regular intervals while the process lives. The fields show whether its engine makes progress."""

    num_finished_steps: int
    has_work: bool


class Profiled(_Message, frozen=True):
    """The answer to a command of the profiler: what it did, or why it could not."""

    number: int
    result: dict[str, Any] | None
    error: str | None
    is_conflict: bool = False  # see ProfilerError


class AdapterAnswer(_Message, frozen=True):
    """The answer to a command about an adapter."""

    number: int
    error: str | None = None  # why it was refused; None: it is done


Command: TypeAlias = (
    Start
    | Submit
    | Abort
    | LimitRunning
    | ForgetPrefixes
    | StartProfile
    | StopProfile
    | LoadAdapter
    | UnloadAdapter
    | Close
)
EngineMessage: TypeAlias = Stage | Ready | Failed | Step | Heartbeat | Profiled | AdapterAnswer


def plain(value: Any) -> Any:
    """An array as its dtype and bytes; a numpy scalar as a Python number."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of {value.ndim} dimensions of {value.dtype} is not sent")
        return value.dtype.str, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not sent")


def array_from(kind: type[Any], sent: Any) -> Any:
    name, data = sent
    return np.frombuffer(bytearray(data), _DTYPES[name])  # a bytearray makes the array writable


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=array_from)
_message_decoder = msgspec.msgpack.Decoder(EngineMessage, dec_hook=array_from)
_REQUEST_FIELDS = get_type_hints(Request) | {"params": dict[str, Any]}
_request_decoder = msgspec.msgpack.Decoder(
    msgspec.defstruct("SentRequest", [*_REQUEST_FIELDS.items()]), dec_hook=array_from
)


def encode(message: Command | EngineMessage) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    command: Command = _command_decoder.decode(frame)
    return command


def decode_message(frame: bytes) -> EngineMessage:
    message: EngineMessage = _message_decoder.decode(frame)
    return message


def submission(request: Request) -> Submit:
    return Submit(request.request_id, msgspec.Raw(_encoder.encode(request)))


def request_of(submit: Submit) -> Request:
    fields = msgspec.structs.asdict(_request_decoder.decode(submit.request))
    return Request(**fields | {"params": SamplingParams.of_checked(fields["params"])})


class StepWriter:
    """Packs events. Used by the thread that sends them."""

    def __init__(self) -> None:
        self._parts: list[Any] = []  # token ids, one array per event
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._set_aside)

    def step(self, events: list[SequenceEvent], stats: EngineStats | None = None) -> Step:
        self._parts.clear()
        encoded = msgspec.Raw(self._encoder.encode(events))
        num_tokens = np.fromiter(map(len, self._parts), np.int32, len(self._parts))
        return Step(encoded, b"".join(self._parts), num_tokens.tobytes(), stats)

    def _set_aside(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == np.int32:
            self._parts.append(value)
            return None
        return plain(value)


class StepReader:
    """Unpacks events. Used by the thread that receives them."""

    def __init__(self) -> None:
        self._parts: Iterator[TokenIds] = iter(())
        self._decoder = msgspec.msgpack.Decoder(list[SequenceEvent], dec_hook=self._put_back)

    def events(self, step: Step) -> list[SequenceEvent]:
        tokens = np.frombuffer(bytearray(step.token_ids), np.int32)
        self._parts = iter(_split(tokens, np.frombuffer(step.num_tokens, np.int32)))
        return self._decoder.decode(step.events)

    def _put_back(self, kind: type[Any], sent: Any) -> Any:
        return next(self._parts) if sent is None else array_from(kind, sent)


def _split(tokens: TokenIds, num_tokens: TokenIds) -> list[TokenIds]:
    if len(num_tokens) == 0:
        return []
    if (num_tokens == num_tokens[0]).all():  # usually one each
        return list(tokens.reshape(len(num_tokens), -1))
    ends = np.cumsum(num_tokens).tolist()
    return [tokens[start:end] for start, end in pairwise([0, *ends])]
