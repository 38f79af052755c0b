"""A submitted step of the GPU, and its result once the step is done."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.runner.results import step_logprobs
from headrace.runner.step_outputs import StepOutputs
from headrace.runner.verification import kept_logprobs
from headrace.sampling import SampledLogprobs
from headrace.steps import IntArray, StepResult


@dataclass(frozen=True, slots=True)
class Ticket:
    """The tokens are in `results` once `done` has happened."""

    step: int
    slots: IntArray
    results: Tensor  # [2, B or more] int32, pinned: tokens, and the state of each slot (`StepResult.finished`)
    logprobs: SampledLogprobs | None  # pinned too
    outputs: StepOutputs | None  # prompt log-probabilities and readouts, pinned too
    done: torch.cuda.Event
    num_rows: IntArray | None = None  # of each slot, if drafts were verified: `results` is that of `accept_drafts`

    def result(self) -> StepResult:
        """Wait for the step."""
        self.done.synchronize()
        if self.num_rows is not None:
            return self._verified(self.num_rows)
        tokens, finished = self.results.numpy()[:, : len(self.slots)].copy()
        return StepResult(
            self.step,
            self.slots,
            tokens.astype(np.int64),
            finished.astype(np.uint8),
            None if self.logprobs is None else step_logprobs(self.logprobs),
            self.outputs.prompt_logprobs() if self.outputs is not None else (),
            self.outputs.readout_results() if self.outputs is not None else (),
        )

    def _verified(self, num_rows: IntArray) -> StepResult:
        tokens, finished, num_sampled = self.results.numpy().astype(np.int64)
        num_sampled = num_sampled[: len(self.slots)]
        starts = np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        is_kept = np.arange(len(tokens)) - starts < np.repeat(num_sampled, num_rows)
        logprobs = None if self.logprobs is None else step_logprobs(self.logprobs)
        return StepResult(
            self.step,
            self.slots,
            tokens[is_kept],
            finished[: len(self.slots)].astype(np.uint8),
            None if logprobs is None else kept_logprobs(logprobs, np.repeat(self.slots, num_rows), is_kept),
            num_sampled=num_sampled,
        )
