from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engine.core import EngineCore
from headrace.runner.fake import FakeRunner
from headrace.runner.readouts import PendingReadouts, ReadoutValues, lay_out_readouts
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import ReadoutChunk
from headrace.types import Readout, Request, SamplingParams, SequenceEvent

TARGETS = np.array([7, 8], np.int32)


def test_readout_chunks_are_found_among_the_tokens_of_a_step_pooling_first() -> None:
    slots, num_tokens = np.array([4, 0, 9, 2]), np.array([1, 3, 4, 2])
    chunks = (
        ReadoutChunk(9, 2, 2, TARGETS, is_last=False),
        ReadoutChunk(2, 0, 2, None, is_last=True, num_pooled=8),
        ReadoutChunk(0, 2, 1, None, is_last=True),
    )
    layout = lay_out_readouts(chunks, slots, num_tokens)
    assert layout.shares.tolist() == [0.125, 1.0]
    assert layout.indexes.tolist() == [8, 9, 3, 6, 7]
    assert layout.pooled_lens.tolist() == [2, 1]
    assert layout.targets.tolist() == [7, 8]


def test_values_return_to_the_slots_that_asked() -> None:
    more = np.array([1], np.int32)
    chunks = (
        ReadoutChunk(3, 0, 2, TARGETS, is_last=False),
        ReadoutChunk(1, 0, 2, None, is_last=True),
        ReadoutChunk(0, 0, 1, more, is_last=True),
    )
    layout = lay_out_readouts(chunks, np.array([3, 1, 0]), np.array([2, 2, 1]))
    values = ReadoutValues(torch.tensor([[0.5, 0.25]]), torch.tensor([-1.0, -2.0, -3.0]))
    found = PendingReadouts(layout, values).results()
    assert [(each.slot, each.is_last, each.values.tolist()) for each in found] == [
        (1, True, [0.5, 0.25]),
        (3, False, [-1.0, -2.0]),
        (0, True, [-3.0]),
    ]


def test_the_fake_runner_computes_readouts() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=64, num_blocks=40)
    core = EngineCore(Scheduler(limits), FakeRunner(max_num_seqs=4))
    prompt, params = np.arange(1, 12, dtype=np.int32), SamplingParams(max_tokens=3)
    core.add(Request("scores", prompt, params, readout=Readout(targets=prompt[3:])))
    core.add(Request("mean", prompt, params, readout=Readout(pooling="mean")))
    core.add(Request("answer", prompt, params))
    events: dict[str, SequenceEvent] = {}
    while core.has_work:
        events |= {event.request_id: event for event in core.step()}
    scores, mean = events["scores"].readout, events["mean"].readout
    assert scores is not None and scores.tolist() == [-token for token in range(4, 12)]
    assert mean is not None and mean.tolist() == pytest.approx([1.0], rel=1e-6)
    assert len(events["answer"].token_ids) == 3 and events["answer"].readout is None
