"""The messages between node 0 and the host of another node, as msgpack of known types.

    host ─▶ node 0   Join
    node 0 ─▶ host   Joined, or Refused with the reason

After that each message is one of `engine/ranks/wire.py` with the rank that it is for or from in front of it. Rank 0
stands for all ranks of the node, and for the host itself in the other direction.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import msgspec

from headrace.config import EngineConfig
from headrace.engine.ranks import wire as ranks_wire

ALL_RANKS = THE_HOST = 0
HEARTBEAT = ranks_wire.encode(ranks_wire.Heartbeat())
CLOSE = ranks_wire.encode(ranks_wire.Close())
MUST_AGREE = (  # settings of all nodes; the others are those of node 0
    "nnodes",
    "model",
    "revision",
    "load_format",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
)
_RANK = Struct("<I")


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Join(_Message, frozen=True):
    node_rank: int
    version: str
    settings: dict[str, Any]  # those of MUST_AGREE
    hostname: str
    address: str  # of the node, as it reaches node 0
    num_gpus: int


class Joined(_Message, frozen=True):
    first_rank: int
    num_ranks: int  # on this node
    size: int  # ranks on all nodes


class Refused(_Message, frozen=True):
    text: str
    is_final: bool = True  # else the node may try again: its place may become free


Answer: TypeAlias = Joined | Refused

_encoder = msgspec.msgpack.Encoder()
_join_decoder = msgspec.msgpack.Decoder(Join)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class AddressedFrame(NamedTuple):
    rank: int
    frame: bytes


def encode(message: Join | Answer) -> bytes:
    return _encoder.encode(message)


def decode_join(frame: bytes) -> Join:
    return _join_decoder.decode(frame)


def decode_answer(frame: bytes) -> Answer:
    return _answer_decoder.decode(frame)


def addressed(rank: int, frame: bytes) -> bytes:
    return _RANK.pack(rank) + frame


def address_and_frame(payload: bytes) -> AddressedFrame:
    (rank,) = _RANK.unpack_from(payload)
    return AddressedFrame(rank, payload[_RANK.size :])


def settings_to_agree(config: EngineConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in MUST_AGREE} | {"model": str(config.model)}
