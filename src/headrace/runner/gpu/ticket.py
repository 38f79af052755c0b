"""A submitted step of the GPU, its result once the step is done, and the pinned memory in which results arrive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.gpu.slots import RING_PLACES
from headrace.runner.results import step_logprobs, to_pinned
from headrace.runner.step_outputs import StepOutputs
from headrace.runner.verification import kept_logprobs
from headrace.sampling import SampledLogprobs
from headrace.steps import IntArray, StepPlan, StepResult

RESULTS_IN_FLIGHT = RING_PLACES  # as many as a pipeline may have stages, and more


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
    place: RingPlace | None = None  # that `results` are in, if a graph wrote them there

    def result(self) -> StepResult:
        """Wait for the step."""
        self.done.synchronize()
        assert self.place is None or self.place.is_filled, "a graph wrote its results to another place"
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
        starts, total = np.cumsum(num_rows) - num_rows, int(num_rows.sum())
        results = self.results.numpy()[:, :total].astype(np.int64)
        tokens, finished, num_sampled = results[0], results[1, starts], results[2, starts]
        is_kept = np.arange(total) - np.repeat(starts, num_rows) < np.repeat(num_sampled, num_rows)
        logprobs = None if self.logprobs is None else step_logprobs(self.logprobs)
        return StepResult(
            self.step,
            self.slots,
            tokens[is_kept],
            finished.astype(np.uint8),
            None if logprobs is None else kept_logprobs(logprobs, np.repeat(self.slots, num_rows), is_kept),
            num_sampled=num_sampled,
        )


@dataclass(frozen=True, slots=True)
class RingPlace:
    values: Tensor  # [2 * W + 1] int32, pinned: see `append_tokens`
    turn: int  # in which a graph fills it

    @property
    def results(self) -> Tensor:  # [2, W]
        return self.values[:-1].view(2, -1)

    @property
    def is_filled(self) -> bool:
        return (int(self.values[-1]) - self.turn) % (1 << 32) == 0


class ResultRing:
    """Owns the pinned memory to which graphs write their results themselves, one place after the other. Graphs count
    the turns on the device, the host counts replays."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.places = torch.zeros(RING_PLACES, 2 * max_rows + 1, dtype=torch.int32, pin_memory=True)
        self.turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_replays = 0

    def begin(self) -> None:
        """Count from now on: steps before this one were not replays."""
        self.turn.zero_()

    def next(self) -> RingPlace:
        """The place that the graph fills which was replayed last."""
        turn = self._num_replays
        self._num_replays += 1
        return RingPlace(self.places[turn % RING_PLACES], turn)


class TicketRing:
    """Owns the pinned memory for the results of the steps in flight, and starts their copies to it."""

    def __init__(self, max_values: int, device: torch.device) -> None:
        self._pinned = torch.empty(RESULTS_IN_FLIGHT, max_values, dtype=torch.int32, pin_memory=True)
        self._no_results = torch.empty(2, 0, dtype=torch.int32, device=device)

    def of(
        self,
        plan: StepPlan,
        results: Tensor,
        logprobs: SampledLogprobs | None = None,
        outputs: StepOutputs | None = None,
    ) -> Ticket:
        """Start copying the results to the host. Contiguous on both sides: any other copy would wait for the device."""
        pinned = self._pinned[plan.step % RESULTS_IN_FLIGHT, : results.numel()].view(results.shape)
        pinned.copy_(results, non_blocking=True)
        logprobs = None if logprobs is None else to_pinned(logprobs)
        outputs = None if outputs is None else outputs.to_pinned()
        done = torch.cuda.Event()
        done.record()
        return Ticket(plan.step, plan.slots[plan.samples], pinned, logprobs, outputs, done)

    def in_place(self, plan: StepPlan, place: RingPlace) -> Ticket:
        """The ticket of a step whose graph writes its results to pinned memory."""
        done = torch.cuda.Event()
        done.record()
        return Ticket(plan.step, plan.slots, place.results, None, None, done, place=place)

    def without_samples(self, plan: StepPlan, outputs: StepOutputs) -> Ticket:
        """The ticket of a step that only computes parts of prompts."""
        return self.of(plan, self._no_results, None, outputs)

    def passed_on(self, plan: StepPlan) -> Ticket:
        """The ticket of a stage whose hidden states go to the next one: its step has no results."""
        done = torch.cuda.Event()
        done.record()
        return Ticket(plan.step, plan.slots[:0], self._pinned[0, :0].view(2, 0), None, None, done)
