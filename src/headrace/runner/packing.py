"""Packs the texts of an encoder's step one after the other. Texts are sorted by length, so that equal ones meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.runner.readouts import ReadoutLayout, lay_out_readouts
from headrace.steps import IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """A step of an encoder, on the host. A plan computes whole prompts only, each in the step in which it starts."""

    token_ids: IntArray  # [T]
    positions: IntArray  # [T]
    types: IntArray  # [T] 1 for tokens of the second text of a pair
    lens: IntArray  # [S], the longest first
    starts: IntArray  # [S + 1]
    readouts: ReadoutLayout


def pack(plan: StepPlan) -> PackedTexts:
    entries = sorted(plan.slot_entries, key=lambda entry: len(entry.token_ids), reverse=True)
    assert len(entries) == len(plan.slots), "a step of an encoder computes the prompts that start in it"
    lens = np.array([len(entry.token_ids) for entry in entries], np.int64)
    starts = np.concatenate([[0], np.cumsum(lens)])
    types = np.zeros(starts[-1], np.int64)
    for entry, start, end in zip(entries, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if entry.second_start is not None:
            types[start + entry.second_start : end] = 1
    return PackedTexts(
        token_ids=np.concatenate([entry.token_ids for entry in entries]).astype(np.int64),
        positions=np.arange(starts[-1]) - np.repeat(starts[:-1], lens),
        types=types,
        lens=lens,
        starts=starts,
        readouts=lay_out_readouts(plan.readout_chunks, np.array([entry.slot for entry in entries]), lens),
    )
