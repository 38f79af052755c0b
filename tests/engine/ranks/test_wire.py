from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.dist.mesh import Mesh
from headrace.dist.rendezvous import Rendezvous
from headrace.engine.fake_settings import fake_settings
from headrace.engine.ranks import wire
from headrace.steps import BlockTransfers, Drafts, ReadoutChunk, SlotEntry, StepPlan, TableWrites
from headrace.types import SamplingParams, StructuredOutputs

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    logit_bias={5: 1.5},
    allowed_token_ids=[1, 2, 3],
    bad_words_token_ids=[[1, 2], [3]],
    stop=["end"],
    structured_outputs=StructuredOutputs(choice=["yes", "no"]),
)


def entry(slot: int) -> SlotEntry:
    return SlotEntry(
        slot=slot,
        token_ids=np.arange(7, dtype=np.int32),
        num_computed=2,
        prompt_len=6,
        end_len=40,
        seed=2**64 - 3,
        params=PARAMS,
        stop_token_ids=(0, 9),
        num_prompt_logprobs=2,
    )


def writes(count: int) -> TableWrites:
    return TableWrites(*(np.arange(count, dtype=np.int64) + offset for offset in (0, 10, 20)))


def plan_of(num_seqs: int, **changes: object) -> StepPlan:
    plan = StepPlan(
        step=5,
        slots=np.arange(num_seqs, dtype=np.int64),
        num_tokens=np.ones(num_seqs, np.int64),
        samples=np.ones(num_seqs, np.bool_),
        num_batched_tokens=num_seqs,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def sent(plan: StepPlan, last: StepPlan | None = None) -> StepPlan:
    command = wire.decode_command(wire.encode(wire.plan_message(plan, None)))
    assert isinstance(command, (wire.Plan, wire.SteadyPlan))
    return wire.plan_of(command, last)


def assert_equal(ours: object, theirs: object) -> None:
    """Equal field by field; arrays by their values and types."""
    assert type(ours) is type(theirs)
    if isinstance(ours, np.ndarray):
        assert isinstance(theirs, np.ndarray) and ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    elif isinstance(ours, (StepPlan, SlotEntry, TableWrites, ReadoutChunk, Drafts)):
        for name in ours.__slots__:
            assert_equal(getattr(ours, name), getattr(theirs, name))
    else:
        assert ours == theirs


def test_a_plan_arrives_as_it_was_sent() -> None:
    chunks = (
        ReadoutChunk(0, 1, 3, None, is_last=False),
        ReadoutChunk(1, 0, 2, np.array([4, 5], np.int32), is_last=True),
    )
    plan = plan_of(
        3, slot_entries=(entry(0), entry(2)), table_writes=writes(4), copies=((1, 2), (3, 4)), readout_chunks=chunks
    )
    assert_equal(sent(plan), plan)


def test_a_steady_plan_is_the_one_before_with_its_own_writes() -> None:
    first = plan_of(4, slot_entries=(entry(1),), table_writes=writes(1))
    steady = plan_of(4, step=6, is_steady=True, table_writes=writes(2), slots=first.slots)
    received = sent(first)
    again = sent(steady, received)
    assert_equal(again, steady)
    assert again.slots is received.slots  # the sampler knows by this that nothing has changed
    assert_equal(sent(plan_of(4, step=7, is_steady=True), again), plan_of(4, step=7, is_steady=True))


@pytest.mark.parametrize("tokens", [np.arange(5, dtype=np.int64), None], ids=["of the host", "of a model"])
def test_drafts_arrive_as_they_were_sent(tokens: np.ndarray | None) -> None:
    plan = plan_of(3, drafts=Drafts(np.array([2, 0, 3], np.int64), tokens), num_batched_tokens=8)
    assert_equal(sent(plan), plan)
    assert len(wire.encode(wire.plan_message(plan, None))) < 256  # one small frame


@pytest.mark.parametrize("num_seqs", [1, 1000])
def test_the_message_of_a_steady_step_does_not_grow_with_the_sequences(num_seqs: int) -> None:
    plan = plan_of(num_seqs, step=100_000, is_steady=True)
    assert len(wire.encode(wire.plan_message(plan, None))) < 32


def test_the_bits_of_masks_arrive_as_they_were_sent() -> None:
    bits = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    command = wire.decode_command(wire.encode(wire.mask_bits(9, bits)))
    assert isinstance(command, wire.MaskBits) and command.step == 9
    np.testing.assert_array_equal(wire.bits_of(command), bits)


def test_a_start_arrives_as_it_was_sent() -> None:
    config, settings = EngineConfig(tensor_parallel_size=4), fake_settings(tensor_parallel_size=4)
    start = wire.Start(config, settings, Mesh(3, 4), "gloo", Rendezvous(host="10.0.0.1", port=7, address="b"), None)
    assert wire.decode_command(wire.encode(start)) == start


def test_copies_from_and_to_the_host_tier_reach_the_ranks_also_in_a_steady_step() -> None:
    arrays = [np.arange(count, dtype=np.int64) for count in (2, 2, 3, 3)]
    first = plan_of(2, transfers=BlockTransfers(*arrays, is_urgent=True))
    found = sent(first)
    steady = sent(replace(first, step=6, is_steady=True), found)
    for plan in (found, steady):
        assert plan.transfers is not None and plan.transfers.is_urgent
        assert plan.transfers.in_blocks.tolist() == [0, 1, 2]
    assert sent(plan_of(2, step=7, is_steady=True), steady).transfers is None
