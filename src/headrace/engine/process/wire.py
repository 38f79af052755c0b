"""What a front and an engine in another process say to each other, as msgpack of known types: nothing is pickled.

    front ─▶ engine   Start, then Submit, Abort, LimitRunning, ForgetPrefixes, at last Close
    engine ─▶ front   Stages, Ready, then a Step for each step with news, and Pulses; Failed instead of either

The dataclasses that cross are sent by their fields, whatever these are; both ends are the same version. Sampling
parameters are made anew from them, as a user would make them; a part that they take as a mapping arrives as one.
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
from headrace.engine.settings import Settings
from headrace.types import Request, SamplingParams, SequenceEvent, TokenIds

_DTYPES: dict[str, np.dtype[Any]] = {
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
    request_id: str  # so that a request that cannot be read can be answered
    request: msgspec.Raw


class Abort(_Message, frozen=True):
    request_id: str
    index: int | None


class LimitRunning(_Message, frozen=True):
    num_seqs: int | None


class ForgetPrefixes(_Message, frozen=True):
    pass


class Close(_Message, frozen=True):
    pass


class Stage(_Message, frozen=True):
    """How far the start has come."""

    text: str


class Ready(_Message, frozen=True):
    settings: Settings
    checks: RequestChecks


class Failed(_Message, frozen=True):
    """Why there is no engine (any more): the exception's class and its text."""

    kind: str
    text: str


class Step(_Message, frozen=True):
    """The events of a step, without their tokens, which are in one piece; see `StepWriter` and `StepReader`."""

    events: msgspec.Raw
    token_ids: bytes
    num_tokens: bytes  # of each event
    stats: EngineStats | None  # from time to time


class Pulse(_Message, frozen=True):
    """The process lives; whether the engine moves is for the reader to see."""

    num_finished_steps: int
    has_work: bool


Command: TypeAlias = Start | Submit | Abort | LimitRunning | ForgetPrefixes | Close
EngineMessage: TypeAlias = Stage | Ready | Failed | Step | Pulse


def _plain(value: Any) -> Any:
    """An array as its type and bytes, numpy's numbers as Python's."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.str not in _DTYPES:
            raise TypeError(f"an array of {value.ndim} dimensions of {value.dtype} is not sent")
        return value.dtype.str, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not sent")


def _array(kind: type[Any], sent: Any) -> Any:
    name, data = sent
    return np.frombuffer(bytearray(data), _DTYPES[name])  # of a bytearray, so that it can be written to


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=_array)
_message_decoder = msgspec.msgpack.Decoder(EngineMessage, dec_hook=_array)
_REQUEST_FIELDS = get_type_hints(Request) | {"params": dict[str, Any]}
_request_decoder = msgspec.msgpack.Decoder(
    msgspec.defstruct("SentRequest", [*_REQUEST_FIELDS.items()]), dec_hook=_array
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
    return Request(**fields | {"params": SamplingParams(**fields["params"])})


class StepWriter:
    """Packs events. Owned by the one thread that sends them."""

    def __init__(self) -> None:
        self._parts: list[Any] = []  # of token ids
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
        return _plain(value)


class StepReader:
    """Unpacks them. Owned by the one thread that receives them."""

    def __init__(self) -> None:
        self._parts: Iterator[TokenIds] = iter(())
        self._decoder = msgspec.msgpack.Decoder(list[SequenceEvent], dec_hook=self._put_back)

    def events(self, step: Step) -> list[SequenceEvent]:
        tokens = np.frombuffer(bytearray(step.token_ids), np.int32)
        self._parts = iter(_cut(tokens, np.frombuffer(step.num_tokens, np.int32)))
        return self._decoder.decode(step.events)

    def _put_back(self, kind: type[Any], sent: Any) -> Any:
        return next(self._parts) if sent is None else _array(kind, sent)


def _cut(tokens: TokenIds, num_tokens: TokenIds) -> list[TokenIds]:
    if len(num_tokens) == 0:
        return []
    if (num_tokens == num_tokens[0]).all():  # one each, most of the time
        return list(tokens.reshape(len(num_tokens), -1))
    ends = np.cumsum(num_tokens).tolist()
    return [tokens[start:end] for start, end in pairwise([0, *ends])]
