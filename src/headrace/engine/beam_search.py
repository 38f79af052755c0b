"""Beam search on top of the engine, with vLLM's names and scores.

Each search step submits every beam as a request for one token. Beams share the blocks of their common prefixes through
the prefix cache; where that is disabled, a search uses it under a salt of its own (`Request.shares_blocks`). Tokens
past a beam's last full block are computed again in every step: a token of a beam costs the prefill of half a block on
average, and one round trip to the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from headrace.arguments import refuses_unknown
from headrace.errors import RequestError
from headrace.types import MAX_LOGPROBS, FinishReason, SamplingParams, TokenLogprobs, check_flag

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # two candidates per beam, so that enough remain if half of them end

Step = Callable[
    [list[tuple[int, ...]], SamplingParams], list[TokenLogprobs]
]  # returns the next token of each list of tokens


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """The score of a beam is the sum of its log-probabilities / (its length, prompt included) ** `length_penalty`."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 and 1 are the same: beams use the model's own log-probabilities
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens)  # checks the value
        check_flag("ignore_eos", self.ignore_eos)
        if not isinstance(self.beam_width, int) or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"beam_width must be between 1 and {MAX_BEAM_WIDTH}, got {self.beam_width!r}", param="beam_width"
            )
        if self.temperature not in (0, 1):
            raise RequestError(
                f"temperature must be 0 or 1 in a beam search, got {self.temperature!r}: beams are compared by the "
                "model's own log-probabilities; use generate() with n or best_of to sample",
                param="temperature",
            )
        if not isinstance(self.length_penalty, (int, float)) or not abs(self.length_penalty) < 100:
            raise RequestError(f"length_penalty must be a number, got {self.length_penalty!r}", param="length_penalty")


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    tokens: tuple[int, ...]  # prompt and answer, including the end-of-sequence token if there is one
    cum_logprob: float = 0.0  # of the answer
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the answer's tokens, each with the other candidates
    text: str | None = None  # of all tokens
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    sequences: tuple[BeamSearchSequence, ...]  # best first


SearchSteps = Generator[tuple[list[tuple[int, ...]], SamplingParams], list[TokenLogprobs], list[BeamSearchOutput]]


@dataclass(slots=True)
class Beams:
    """One prompt's beams. Owned by `search`."""

    running: list[BeamSearchSequence]
    ended: list[BeamSearchSequence]


def search(
    prompts: Sequence[tuple[int, ...]], params: BeamSearchParams, step: Step, eos_token_ids: tuple[int, ...]
) -> list[BeamSearchOutput]:
    """Search for all prompts together, one token per step."""
    steps = search_steps(prompts, params, eos_token_ids)
    found: list[TokenLogprobs] | None = None
    while True:
        try:
            asked = next(steps) if found is None else steps.send(found)
        except StopIteration as end:
            outputs: list[BeamSearchOutput] = end.value
            return outputs
        found = step(*asked)


def search_steps(
    prompts: Sequence[tuple[int, ...]], params: BeamSearchParams, eos_token_ids: tuple[int, ...]
) -> SearchSteps:
    """Run the search as a generator: yields the beams that need a token, receives their tokens, returns the outputs."""
    score = Score(params.length_penalty, eos_token_ids)
    ends = () if params.ignore_eos else eos_token_ids
    one_token = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=True, detokenize=False
    )
    groups = [Beams([BeamSearchSequence(prompt)], []) for prompt in prompts]
    for _ in range(params.max_tokens):
        running = [beam for group in groups for beam in group.running]
        if not running:
            break
        found = iter((yield [beam.tokens for beam in running], one_token))
        for group in groups:
            candidates = [new for beam in group.running for new in _continued(beam, next(found), ends)]
            group.ended += [beam for beam in candidates if beam.finish_reason == "stop"]
            unfinished = [beam for beam in candidates if beam.finish_reason is None]
            group.running = sorted(unfinished, key=score, reverse=True)[: params.beam_width]
    return [BeamSearchOutput(_best(group, params, score)) for group in groups]


@dataclass(frozen=True, slots=True)
class Score:
    length_penalty: float
    eos_token_ids: tuple[int, ...]

    def __call__(self, beam: BeamSearchSequence) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in self.eos_token_ids)
        return beam.cum_logprob / float(max(1, length) ** self.length_penalty)


def _continued(beam: BeamSearchSequence, found: TokenLogprobs, ends: tuple[int, ...]) -> list[BeamSearchSequence]:
    return [
        BeamSearchSequence(
            tokens=(*beam.tokens, token),
            cum_logprob=beam.cum_logprob + logprob,
            logprobs=(*beam.logprobs, _with_candidates(token, logprob, rank, found)),
            finish_reason="stop" if token in ends else None,
        )
        for rank, (token, logprob) in enumerate(zip(found.top_token_ids, found.top_logprobs, strict=True), 1)
    ]


def _with_candidates(token: int, logprob: float, rank: int, found: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(token, logprob, rank, found.top_token_ids, found.top_logprobs)


def _best(group: Beams, params: BeamSearchParams, score: Score) -> tuple[BeamSearchSequence, ...]:
    truncated = [
        BeamSearchSequence(beam.tokens, beam.cum_logprob, beam.logprobs, finish_reason="length")
        for beam in group.running
    ]
    return tuple(sorted([*group.ended, *truncated], key=score, reverse=True)[: params.beam_width])
