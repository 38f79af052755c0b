"""The runner of rank 0: sends each plan to the other ranks, then runs it on its own device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from headrace.engine.profiler import ProfiledRunner
from headrace.engine.ranks import wire
from headrace.errors import EngineDeadError
from headrace.steps import Bitmask, IntArray, Masks, Runner, StepPlan, StepResult

if TYPE_CHECKING:
    from headrace.kernels.ranges import Ranges

Result = TypeVar("Result")


class Ranks(Protocol):
    """The other ranks, as the runner needs them."""

    def send(self, frame: bytes) -> None: ...

    def cause_of(self, error: BaseException) -> BaseException: ...

    @property
    def failure(self) -> EngineDeadError | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SentMasks:
    """Masks whose bits are sent to the other ranks once they are known."""

    step: int
    masks: Masks
    ranks: Ranks

    @property
    def slots(self) -> IntArray:
        return self.masks.slots

    def bits(self) -> Bitmask:
        bits = self.masks.bits()
        self.ranks.send(wire.encode(wire.mask_bits(self.step, bits)))
        return bits


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
