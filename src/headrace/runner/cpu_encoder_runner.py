"""Runs the steps of an encoder on a CPU, one after the other on a thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from headrace.kernels import ops
from headrace.kernels.layout import PackedLayout
from headrace.kernels.ranges import Ranges, wrap_methods
from headrace.models.encoder import Encoder
from headrace.runner.cpu_threads import device_thread
from headrace.runner.packing import PackedTexts, pack
from headrace.runner.readouts import PendingReadouts, ReadoutValues, pool
from headrace.runner.shape import RunnerShape
from headrace.startup import OnStage, ignore_stage
from headrace.steps import Masks, StepPlan, StepResult

Result = TypeVar("Result")

_RANGES = {"_execute": "execute", "_encode": "encode"}


class CpuEncoderRunner:
    """Owns the weights, and nothing else: a step needs nothing of the steps before it."""

    def __init__(self, encoder: Encoder, shape: RunnerShape, on_stage: OnStage = ignore_stage) -> None:
        self._encoder = encoder
        self._stream = device_thread(shape.num_threads)
        on_stage("compile")
        self._stream.submit(ops.warm_up, encoder.device, encoder.dtype, on_stage).result()

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Future[StepResult]:
        return self._stream.submit(self._execute, plan)

    def collect(self, ticket: Future[StepResult]) -> StepResult:
        return ticket.result()

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the device's thread, after the submitted steps."""
        return self._stream.submit(function).result()

    def use_ranges(self, ranges: Ranges | None) -> None:
        """Put named ranges around steps, their parts and each operation; None: no more."""
        wrap_methods(self, _RANGES, ranges)
        ops.record_ranges(ranges)

    def close(self) -> None:
        """End after the submitted steps."""
        if vars(self):
            self._stream.shutdown()
            vars(self).clear()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        texts = pack(plan)
        values = ReadoutValues(self._encode(texts), torch.empty(0))
        return StepResult(plan.step, *_NOTHING, readout_results=PendingReadouts(texts.readouts, values).results())

    def _encode(self, texts: PackedTexts) -> torch.Tensor:
        layout = PackedLayout(
            positions=torch.from_numpy(texts.positions),
            types=torch.from_numpy(texts.types),
            starts=torch.from_numpy(texts.starts).int(),
            lens=tuple(texts.lens.tolist()),
        )
        hidden = self._encoder.hidden(torch.from_numpy(texts.token_ids), layout)
        readouts = texts.readouts
        kept, lens, shares = map(torch.from_numpy, (readouts.indexes, readouts.pooled_lens, readouts.shares))
        return pool(self._encoder, hidden[kept], lens, shares)


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8))
