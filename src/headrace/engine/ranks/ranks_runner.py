"""The runner of rank 0: sends each plan to the other ranks, then runs it on its own device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from headrace.engine.profiler import ProfiledRunner
from headrace.engine.ranks import wire
from headrace.errors import EngineDeadError, HeadraceError
from headrace.steps import Bitmask, DraftsBySlot, IntArray, Masks, Runner, StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.kernels.ranges import Ranges

Result = TypeVar("Result")


class Ranks(Protocol):
    """The other ranks, as the runner needs them."""

    def send(self, frame: bytes) -> None: ...

    def cause_of(self, error: BaseException) -> BaseException: ...

    @property
    def failure(self) -> EngineDeadError | None: ...

    def on_failure(self, call: Callable[[EngineDeadError], None]) -> None: ...

    def close(self) -> None: ...


class PipelineRanks(Ranks, Protocol):
    def expect_result(self, step: int) -> Future[StepResult]: ...


@dataclass(frozen=True, slots=True)
class SentMasks:
    """Masks whose bits are sent to the other ranks once they are known."""

    step: int
    masks: Masks
    ranks: Ranks

    @property
    def slots(self) -> IntArray:
        return self.masks.slots

    def bits(self, drafts: DraftsBySlot | None = None) -> Bitmask:
        bits = self.masks.bits(drafts)
        self.ranks.send(wire.encode(wire.mask_bits(self.step, bits)))
        return bits


class PipelineTicket(NamedTuple):
    own: Any  # of rank 0's part of the step
    result: Future[StepResult]


class RanksRunner:
    """Owns rank 0's runner and the processes of the other ranks."""

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> Any:
        message = wire.plan_message(plan, None if masks is None else masks.slots)
        self._ranks.send(wire.encode(message))
        try:
            return self._own.submit(plan, None if masks is None else SentMasks(plan.step, masks, self._ranks))
        except Exception as error:
            raise self._ranks.cause_of(error) from error

    def collect(self, ticket: Any) -> StepResult:
        try:
            result = self._own.collect(ticket)
        except Exception as error:
            raise self._ranks.cause_of(error) from error
        if self._ranks.failure is not None:  # a step that was ended on a GPU has a result, which is not one
            raise self._ranks.failure
        return result

    def on_failure(self, call: Callable[[EngineDeadError], None]) -> None:
        """Call this once a rank has failed, also while no step is in flight."""
        self._ranks.on_failure(call)

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function after the submitted steps, on rank 0."""
        return cast(ProfiledRunner, self._own).call(function)

    def use_ranges(self, ranges: Ranges | None) -> None:
        """Put named ranges around the steps of rank 0; None: no more."""
        cast(ProfiledRunner, self._own).use_ranges(ranges)

    def close(self) -> None:
        try:
            self._own.close()
        finally:
            self._ranks.close()


class PipelineRunner(RanksRunner):
    """The runner of rank 0 in a pipeline: it runs the first stage, and the last stage sends the results.

    The last stage waits for the bits of masks before it samples. They need the tokens of steps before, so a thread of
    their own waits for those, while the step is on its way."""

    _ranks: PipelineRanks

    def __init__(self, own: Runner, ranks: PipelineRanks) -> None:
        super().__init__(own, ranks)
        self._masks = ThreadPoolExecutor(1, "headrace-masks")
        self._in_flight: set[int] = set()
        self.max_in_flight = 0  # steps that were in the pipeline at the same time
        self.num_steps = 0
        self.num_overlapping_steps = 0  # that were submitted while another one was in the pipeline

    def submit(self, plan: StepPlan, masks: Masks | None = None) -> PipelineTicket:
        result = self._ranks.expect_result(plan.step)
        self._count(plan.step)
        self._ranks.send(wire.encode(wire.plan_message(plan, None if masks is None else masks.slots)))
        try:
            own = self._own.submit(plan)
        except Exception as error:
            raise self._ranks.cause_of(error) from error
        if masks is not None:
            self._masks.submit(self._send_bits, SentMasks(plan.step, masks, self._ranks))
        return PipelineTicket(own, result)

    def collect(self, ticket: PipelineTicket) -> StepResult:
        try:
            self._own.collect(ticket.own)  # a failure of this stage
        except Exception as error:
            raise self._ranks.cause_of(error) from error
        result = ticket.result.result()
        self._in_flight.discard(result.step)
        return result

    def _count(self, step: int) -> None:
        self.num_steps += 1
        self.num_overlapping_steps += bool(self._in_flight)
        self._in_flight.add(step)
        self.max_in_flight = max(self.max_in_flight, len(self._in_flight))

    def _send_bits(self, masks: SentMasks) -> None:
        try:
            masks.bits()
        except HeadraceError:
            pass  # a rank has gone, which `collect` reports

    def close(self) -> None:
        try:
            self._own.close()
        finally:
            self._masks.shutdown()
            self._ranks.close()
