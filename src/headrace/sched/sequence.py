"""A sequence: one answer being generated, and its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from headrace.kv import BlockTable, Fetch, Salt
from headrace.steps import LoadedAdapter, ReadoutResult, SlotEntry
from headrace.types import NUM_DEVICE_STOPS, Request, SequenceTiming, TokenIds, TokenLogprobs


class State(Enum):
    WAITING = auto()  # in the queue, or until its parent has computed the prompt
    RUNNING = auto()  # owns a slot and blocks
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler. While it runs, its tokens and lengths are in the slot table."""

    request: Request
    index: int
    seed: int
    arrival: int  # order of arrival; a preempted sequence keeps it, and so its place in the queue
    end_len: int
    stop_token_ids: tuple[int, ...]
    token_ids: TokenIds  # all known tokens when it last left a slot; the prompt at first
    parent: Sequence | None = None  # the first sequence of its request, whose prompt blocks it shares
    siblings: list[Sequence] = field(default_factory=list)  # of a parent: those that wait for its prompt
    state: State = State.WAITING
    slot: int = -1
    table: BlockTable | None = None
    fetch: Fetch | None = None  # of its prompt's blocks from the disk
    started_at: float | None = None  # when it first got a slot
    first_token_at: float | None = None
    last_token_at: float | None = None  # when it last left a slot
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_delivered: int = 0  # answer tokens that events have carried
    logprobs: list[TokenLogprobs] | None = None  # not yet delivered
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of the tokens computed so far; None once delivered
    adapter: LoadedAdapter | None = None
    readout_results: list[ReadoutResult] = field(default_factory=list)  # of its prompt so far, since it last got a slot

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def salt(self) -> Salt | None:
        """Prompts share cached blocks only under the same salt: keys and values depend on the adapter."""
        given = self.request.cache_salt
        return given if self.adapter is None else (self.adapter.number, given or "")

    @property
    def adapter_entry(self) -> int:
        """See `SlotEntry.adapter`."""
        return 0 if self.adapter is None else self.adapter.index + 1

    @property
    def has_more_stops(self) -> bool:
        """Whether it has more stop ids than the device knows."""
        return len(self.stop_token_ids) > NUM_DEVICE_STOPS

    @property
    def timing(self) -> SequenceTiming:
        return SequenceTiming(self.started_at, self.first_token_at, self.last_token_at, self.num_preemptions)

    @property
    def delivers_next_token(self) -> bool:
        """Whether its next token is delivered at once."""
        return self.request.watched or (self.request.announced and self.num_delivered == 0)

    @property
    def has_exact_length(self) -> bool:
        """Whether it cannot end before its limit: nothing stops it."""
        return self.request.readout is not None or (not self.stop_token_ids and not self.request.params.stop)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not complete."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    @property
    def has_answer(self) -> bool:
        """Whether answer tokens were known when it last left a slot."""
        return len(self.token_ids) > self.prompt_len

    def slot_entry(self, num_computed: int) -> SlotEntry:
        """What the device is told when it gets its slot."""
        readout, params = self.request.readout, self.request.params
        return SlotEntry(
            slot=self.slot,
            token_ids=self.token_ids,
            num_computed=num_computed,
            prompt_len=self.prompt_len,
            end_len=self.end_len,
            seed=self.seed,
            params=params,
            stop_token_ids=self.stop_token_ids,
            num_prompt_logprobs=params.prompt_logprobs if self.needs_prompt_logprobs else None,
            second_start=None if readout is None else readout.second_start,
            adapter=self.adapter_entry,
        )


def sequences_of(
    request: Request,
    seeds: tuple[int, ...],
    *,
    stop_token_ids: tuple[int, ...],
    end_len: int,
    first_arrival: int,
    adapter: LoadedAdapter | None = None,
) -> list[Sequence]:
    """The sequences of a request, one for each seed; the first is the parent of the others."""
    sequences: list[Sequence] = []
    for index, seed in enumerate(seeds):
        parent = sequences[0] if sequences else None
        sequences.append(
            Sequence(
                request=request,
                index=index,
                seed=seed,
                arrival=first_arrival + index,
                end_len=end_len,
                stop_token_ids=stop_token_ids,
                token_ids=request.prompt_token_ids,
                parent=parent,
                adapter=adapter,
                logprobs=[] if request.params.uses_logprobs else None,
                prompt_logprobs=None if request.params.prompt_logprobs is None or parent is not None else [None],
            )
        )
    sequences[0].siblings = sequences[1:]
    return sequences


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's `index`-th sequence: the request's own for the first, scattered for the others."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)
