"""The messages between rank 0 and the other ranks, as msgpack of known types: nothing is pickled.

    rank 0 ─▶ rank   Start, Build, then Plan or SteadyPlan for each step, MaskBits where a grammar needs them, Close
    rank ─▶ rank 0   Heartbeats; Started, Loaded, Built; Result for each step, of a pipeline's last stage; or Failed

Arrays are sent as their bytes: a plan is encoded without a loop over its sequences, except those that enter a slot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias, get_type_hints

import msgspec
import numpy as np

from headrace.config import EngineConfig
from headrace.dist.mesh import Mesh
from headrace.dist.rendezvous import Rendezvous
from headrace.engine.process.wire import Failed, array_from, plain
from headrace.engine.settings import Settings
from headrace.steps import (
    Bitmask,
    BlockTransfers,
    Drafts,
    IntArray,
    ReadoutChunk,
    SlotEntry,
    StepPlan,
    StepResult,
    TableWrites,
)
from headrace.types import SamplingParams


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Start(_Message, frozen=True):
    config: EngineConfig
    settings: Settings  # an estimate: the size of the KV cache is not final
    mesh: Mesh
    backend: str
    rendezvous: Rendezvous
    device_index: int | None  # of its GPU


class Build(_Message, frozen=True):
    settings: Settings


class SentDrafts(msgspec.Struct, frozen=True, array_like=True):
    """See `steps.Drafts`."""

    lens: bytes  # int64 [S]
    tokens: bytes | None  # int64 [sum(lens)]


class Plan(_Message, frozen=True):
    step: int
    slots: bytes  # int64 [S]
    num_tokens: bytes  # int64 [S]
    samples: bytes  # bool [S]
    num_batched_tokens: int
    slot_entries: msgspec.Raw
    table_writes: bytes  # int64 [3, W]: slots, indexes, blocks
    copies: tuple[tuple[int, int], ...]
    transfers: BlockTransfers | None
    readout_chunks: tuple[ReadoutChunk, ...]
    mask_slots: bytes | None  # int64 [Q]
    next_tokens: bytes | None  # int64 [D]
    drafts: SentDrafts | None


class SteadyPlan(_Message, frozen=True):
    """The plan before, with another number and other table writes."""

    step: int
    table_writes: bytes
    transfers: BlockTransfers | None
    mask_slots: bytes | None
    next_tokens: bytes | None


class MaskBits(_Message, frozen=True):
    step: int
    num_rows: int
    bits: bytes  # int32 [num_rows, words]


class Close(_Message, frozen=True):
    pass


class Started(_Message, frozen=True):
    """Torch is imported."""


class Loaded(_Message, frozen=True):
    """Its part of the weights is loaded. The memory in bytes is that of its GPU; 0 on a CPU."""

    free_memory: int
    total_memory: int
    step_memory: int
    num_bytes_read: int  # of the model's files


class Built(_Message, frozen=True):
    """Its runner takes plans."""


class Result(_Message, frozen=True):
    result: StepResult


class Heartbeat(_Message, frozen=True):
    pass


Command: TypeAlias = Start | Build | Plan | SteadyPlan | MaskBits | Close
Reply: TypeAlias = Started | Loaded | Built | Result | Heartbeat | Failed


def _shaped(value: Any) -> Any:
    """Arrays of a result may have two dimensions: sent with their shape."""
    if isinstance(value, np.ndarray) and value.ndim == 2:
        return *plain(np.ascontiguousarray(value).reshape(-1)), value.shape
    return plain(value)


def _shaped_from(kind: type[Any], sent: Any) -> Any:
    name, data, *shape = sent
    flat = array_from(kind, (name, data))
    return flat.reshape(shape[0]) if shape else flat


_encoder = msgspec.msgpack.Encoder(enc_hook=_shaped)
_command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=array_from)
_reply_decoder = msgspec.msgpack.Decoder(Reply, dec_hook=_shaped_from)
_ENTRY_FIELDS = get_type_hints(SlotEntry) | {"params": dict[str, Any]}
_entries_decoder = msgspec.msgpack.Decoder(
    list[msgspec.defstruct("SentSlotEntry", [*_ENTRY_FIELDS.items()])],  # type: ignore[misc]
    dec_hook=array_from,
)


def encode(message: Command | Reply) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    command: Command = _command_decoder.decode(frame)
    return command


def decode_reply(frame: bytes) -> Reply:
    reply: Reply = _reply_decoder.decode(frame)
    return reply


def plan_message(plan: StepPlan, mask_slots: IntArray | None) -> Plan | SteadyPlan:
    masks = None if mask_slots is None else mask_slots.tobytes()
    next_tokens = None if plan.next_tokens is None else plan.next_tokens.tobytes()
    if plan.is_steady:
        return SteadyPlan(plan.step, _writes_sent(plan.table_writes), plan.transfers, masks, next_tokens)
    return Plan(
        step=plan.step,
        slots=plan.slots.tobytes(),
        num_tokens=plan.num_tokens.tobytes(),
        samples=plan.samples.tobytes(),
        num_batched_tokens=plan.num_batched_tokens,
        slot_entries=msgspec.Raw(_encoder.encode(plan.slot_entries)),
        table_writes=_writes_sent(plan.table_writes),
        copies=plan.copies,
        transfers=plan.transfers,
        readout_chunks=plan.readout_chunks,
        mask_slots=masks,
        next_tokens=next_tokens,
        drafts=None if plan.drafts is None else _drafts_sent(plan.drafts),
    )


def plan_of(message: Plan | SteadyPlan, last: StepPlan | None) -> StepPlan:
    """The plan as rank 0 has it. `last` is the one before."""
    writes = _writes_of(message.table_writes)
    next_tokens = None if message.next_tokens is None else np.frombuffer(bytearray(message.next_tokens), np.int64)
    if isinstance(message, SteadyPlan):
        assert last is not None
        steady = replace(last, step=message.step, table_writes=writes, slot_entries=(), copies=(), is_steady=True)
        return replace(steady, next_tokens=next_tokens, transfers=message.transfers)
    return StepPlan(
        step=message.step,
        slots=np.frombuffer(bytearray(message.slots), np.int64),
        num_tokens=np.frombuffer(bytearray(message.num_tokens), np.int64),
        samples=np.frombuffer(bytearray(message.samples), np.bool_),
        num_batched_tokens=message.num_batched_tokens,
        slot_entries=_entries_of(message.slot_entries),
        table_writes=writes,
        copies=message.copies,
        transfers=message.transfers,
        readout_chunks=message.readout_chunks,
        next_tokens=next_tokens,
        drafts=None if message.drafts is None else _drafts_of(message.drafts),
    )


def mask_slots_of(message: Plan | SteadyPlan) -> IntArray | None:
    return None if message.mask_slots is None else np.frombuffer(message.mask_slots, np.int64)


def mask_bits(step: int, bits: Bitmask) -> MaskBits:
    return MaskBits(step, len(bits), bits.tobytes())


def bits_of(message: MaskBits) -> Bitmask:
    return np.frombuffer(bytearray(message.bits), np.int32).reshape(message.num_rows, -1)


def _writes_sent(writes: TableWrites | None) -> bytes:
    return b"" if writes is None else np.stack([writes.slots, writes.indexes, writes.blocks]).tobytes()


def _writes_of(sent: bytes) -> TableWrites | None:
    return TableWrites(*np.frombuffer(bytearray(sent), np.int64).reshape(3, -1)) if sent else None


def _drafts_sent(drafts: Drafts) -> SentDrafts:
    return SentDrafts(drafts.lens.tobytes(), None if drafts.tokens is None else drafts.tokens.tobytes())


def _drafts_of(sent: SentDrafts) -> Drafts:
    tokens = None if sent.tokens is None else np.frombuffer(bytearray(sent.tokens), np.int64)
    return Drafts(np.frombuffer(bytearray(sent.lens), np.int64), tokens)


def _entries_of(sent: msgspec.Raw) -> tuple[SlotEntry, ...]:
    fields = map(msgspec.structs.asdict, _entries_decoder.decode(sent))
    return tuple(SlotEntry(**each | {"params": SamplingParams.of_checked(each["params"])}) for each in fields)
