"""Runs the steps of an encoder on a GPU. Only `collect` waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.layout import PackedLayout
from headrace.kernels.ranges import Ranges, wrap_methods
from headrace.models.encoder import Encoder
from headrace.runner.gpu.tiles import tiles_of_rows
from headrace.runner.gpu.upload import UploadRing
from headrace.runner.packing import PackedTexts, pack
from headrace.runner.readouts import PendingReadouts, ReadoutLayout, ReadoutValues, pool
from headrace.runner.results import to_pinned
from headrace.runner.shape import RunnerShape
from headrace.startup import OnStage, ignore_stage
from headrace.steps import IntArray, Masks, StepPlan, StepResult

Result = TypeVar("Result")

_RANGES = {"submit": "step", "_encode": "encode"}
_TILE_ROWS = (16, 32, 64, 128)  # tokens of a tile: the fewest that hold the longest text, so that little is padding
_WARM_UP_SIZES = (1, 64, 512, 4096)  # tokens, beside the largest step


@dataclass(frozen=True, slots=True)
class EncoderTicket:
    """A submitted step: its values are on the host once `done` has happened."""

    step: int
    readouts: PendingReadouts
    done: torch.cuda.Event


class GpuEncoderRunner:
    """Owns the weights on one GPU. A step needs nothing of the steps before it."""

    def __init__(self, encoder: Encoder, shape: RunnerShape, on_stage: OnStage = ignore_stage) -> None:
        self._encoder, self._device = encoder, encoder.device
        self._uses_flash = shape.uses_flash
        self._upload = UploadRing(encoder.device)
        on_stage("compile")
        self._warm_up(shape)

    @torch.inference_mode()
    def submit(self, plan: StepPlan, masks: Masks | None = None) -> EncoderTicket:
        texts = pack(plan)
        pooled = self._encode(texts)
        values = to_pinned(ReadoutValues(pooled, pooled.new_empty(0)))
        done = torch.cuda.Event()
        done.record()
        return EncoderTicket(plan.step, PendingReadouts(texts.readouts, values), done)

    def collect(self, ticket: EncoderTicket) -> StepResult:
        ticket.done.synchronize()
        return StepResult(ticket.step, *_NOTHING, readout_results=ticket.readouts.results())

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function after the submitted steps have ended on the device."""
        torch.cuda.synchronize(self._device)
        return function()

    def use_ranges(self, ranges: Ranges | None) -> None:
        """Put named ranges around what a step launches; None: no more."""
        wrap_methods(self, _RANGES, ranges)

    def close(self) -> None:
        if vars(self):
            torch.cuda.synchronize(self._device)
            vars(self).clear()

    def _encode(self, texts: PackedTexts) -> Tensor:
        """[P, outputs]: launches the step."""
        rows = next((size for size in _TILE_ROWS if size >= texts.lens[0]), _TILE_ROWS[-1])
        tiles = tiles_of_rows(texts.lens, 0, len(texts.lens), rows)
        readouts = texts.readouts
        arrays = (texts.token_ids, texts.positions, texts.types, texts.starts, tiles, readouts.indexes)
        upload = self._upload.begin(sum(array.size + 4 for array in arrays) + 3 * len(readouts.pooled_lens) + 16)
        places = [upload.put(array) for array in (*arrays, readouts.pooled_lens, readouts.shares.view(np.int32))]
        upload.send()
        token_ids, positions, types, starts, placed, kept, lens, shares = (upload.get(place) for place in places)
        layout = PackedLayout(
            positions=positions,
            types=types,
            starts=starts,
            lens=tuple(texts.lens.tolist()),
            tiles=placed.view(-1, 2),
            tile_rows=rows,
            uses_flash=self._uses_flash,
        )
        hidden = self._encoder.hidden(token_ids, layout)
        pooled = pool(self._encoder, hidden.index_select(0, kept), lens.long(), shares.view(torch.float32))
        self._upload.end()
        return pooled

    @torch.inference_mode()
    def _warm_up(self, shape: RunnerShape) -> None:
        """Run the largest step, whose memory the allocator keeps, and a few others: kernels are compiled and loaded."""
        max_len, most = self._encoder.max_len, shape.max_num_batched_tokens
        self._encode(_made_up([max_len] * max(1, most // max_len)))
        for size in _WARM_UP_SIZES:
            self._encode(_made_up([min(size, max_len)]))
        for rows in _TILE_ROWS:
            text_len = min(rows, max_len)
            self._encode(_made_up([text_len] * max(1, min(most // text_len, shape.max_num_seqs))))
        torch.cuda.synchronize(self._device)


def _made_up(text_lens: list[int]) -> PackedTexts:
    """A step of texts of these lengths, all of token 0, each with its mean."""
    lens: IntArray = np.array(text_lens, np.int64)
    starts = np.concatenate([[0], np.cumsum(lens)])
    nothing = np.zeros(starts[-1], np.int64)
    readouts = ReadoutLayout((), np.arange(starts[-1]), lens, np.ones(len(lens), np.float32), np.empty(0, np.int64))
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lens)
    return PackedTexts(nothing, positions, nothing, lens, starts, readouts)


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
