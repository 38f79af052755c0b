"""A sequence: one answer in the making, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.kv import BlockTable
from headrace.steps import Reading
from headrace.types import Request, TokenIds, TokenLogprobs


class State(Enum):
    WAITING = auto()  # in the queue, or behind the sibling that computes the prompt
    RUNNING = auto()  # owns a row and blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler. While it runs, its tokens and lengths are in the row table."""

    request: Request
    index: int
    seed: int
    arrival: int  # order of arrival; a preempted sequence keeps it, and so its place
    end_len: int
    stop_token_ids: tuple[int, ...]
    token_ids: TokenIds  # all known tokens when it last left a row; the prompt at first
    leader: Sequence | None = None  # the sibling whose prompt blocks it shares
    siblings: list[Sequence] = field(default_factory=list)
    state: State = State.WAITING
    row: int = -1
    table: BlockTable | None = None
    has_started: bool = False  # it was in a row before
    num_cached_tokens: int = 0
    num_delivered: int = 0  # answer tokens that events have carried
    logprobs: list[TokenLogprobs] | None = None  # not yet delivered
    readings: list[Reading] = field(default_factory=list)  # of its prompt so far, since it last got a row

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def has_answer(self) -> bool:
        """Whether answer tokens were known when it last left a row."""
        return len(self.token_ids) > self.prompt_len


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th sequence: the request's own for the first, scattered for the others."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)
