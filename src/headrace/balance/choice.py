"""The choice of a replica for one request: prefix against load. Pure functions. A replica is a server behind the
router, or one of the engines of a server.

The replica with the longest matched prefix is taken while its load is bounded:

    load ≤ LOAD_FACTOR x (load of the least loaded replica) + LOAD_SLACK        in requests that run or wait

This is the idea of consistent hashing with bounded loads, with the minimum in place of the mean. The factor limits the
imbalance of busy replicas. The slack keeps prefixes in place on nearly idle ones, where a factor alone would move them
at one request against none: a replica computes a few more sequences in the same step at little cost.

A request that has no prefix anywhere, or whose prefix is at a replica above the limit, goes to the least cost: the load
with requests that wait for their first token counted PENDING_WEIGHT times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LOAD_FACTOR = 1.5
LOAD_SLACK = 4.0  # requests
MIN_MATCH_SHARE = 0.25  # of the prompt; less is not worth an imbalance
PENDING_WEIGHT = 8.0  # a prefill takes as long as many decode steps
MIN_SCORE = 0.05  # a score counts as at least this: a load is divided by it

Policy = Literal["prefix", "round-robin"]
# prefix: it has the prefix. load: nobody has. spill: who has the prefix is loaded too much. turn: round robin.
Reason = Literal["prefix", "load", "spill", "turn"]
REASONS: tuple[Reason, ...] = ("prefix", "load", "spill", "turn")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take the request."""

    load: float  # requests that run or wait there
    num_pending: int = 0  # of these, streams without a first byte
    score: float = 1.0  # health, from 0 to 1
    num_matched: int = 0  # chunks of this prompt that it was sent before

    @property
    def weighted_load(self) -> float:
        """The load, larger the worse the replica's health is."""
        return (self.load + 1) / max(self.score, MIN_SCORE) - 1

    @property
    def cost(self) -> float:
        """What a new request without a prefix has to expect there: pending prompts are computed before its own."""
        return (self.load + 1 + (PENDING_WEIGHT - 1) * self.num_pending) / max(self.score, MIN_SCORE)


@dataclass(frozen=True, slots=True)
class Choice:
    index: int  # of the candidate
    reason: Reason


def choose(candidates: Sequence[Candidate], num_chunks: int, *, turn: int = 0) -> Choice:
    """Choose one of the candidates, of which there is at least one. `turn` breaks ties: it counts up."""
    num = len(candidates)
    loads = [candidate.weighted_load for candidate in candidates]
    order = [(turn + place) % num for place in range(num)]
    cheapest = min(order, key=lambda at: candidates[at].cost)
    holders = [at for at in order if is_worth_it(candidates[at].num_matched, num_chunks)]
    if not holders:
        return Choice(cheapest, "load")
    fitting = [at for at in holders if loads[at] <= load_limit(min(loads))]
    if not fitting:
        return Choice(cheapest, "spill")
    return Choice(max(fitting, key=lambda at: (candidates[at].num_matched, -candidates[at].cost)), "prefix")


def choose_in_turn(num_candidates: int, turn: int) -> Choice:
    """Round robin, to compare with."""
    return Choice(turn % num_candidates, "turn")


def load_limit(least_load: float) -> float:
    """The largest load at which a replica still gets requests for its prefixes."""
    return LOAD_FACTOR * least_load + LOAD_SLACK


def is_worth_it(num_matched: int, num_chunks: int) -> bool:
    return num_matched > 0 and num_matched >= MIN_MATCH_SHARE * num_chunks
