"""Turns sequence events into answers: detokenizes, matches stop strings and builds outputs.

The cost of taking an event or a delta does not grow with the length of the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from time import perf_counter

from headrace.text import Detokenizer, StopMatcher, Tokenizer
from headrace.types import (
    CompletionOutput,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestOutput,
    SamplingParams,
    SequenceEvent,
    TokenLogprobs,
)


@dataclass(slots=True)
class AnswerDelta:
    """The new part of one answer since the last call."""

    position: int  # of its request within its stream
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None  # of these tokens, if requested


class Answer:
    """The text and tokens of one sequence so far. Owned by its `Answers`."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.index = index
        self.token_ids: list[int] = []
        self._texts: list[str] = []  # joined on demand: appending to one string would copy it each time
        self._num_texts_taken = 0
        self._num_tokens_taken = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._params: SamplingParams = params
        self._logprobs: list[TokenLogprobs] | None = [] if params.uses_logprobs else None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt_tail_ids=request.prompt_token_ids[-8:].tolist(),
                skip_special_tokens=params.skip_special_tokens,
            )
        self._stops = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None

    def take(self, event: SequenceEvent, eos_token_ids: tuple[int, ...]) -> None:
        """Add an event's tokens, unless a stop string has already ended the answer."""
        if self.finish_reason is not None:
            return
        tokens = event.token_ids.tolist()
        hides_stop = event.stop_token_id is not None and not self._params.include_stop_str_in_output
        num_shown = len(tokens) - hides_stop
        # A step with drafts gives several tokens, and a stop string may end the answer before the last of them.
        num_at_once = len(tokens) if self._stops is None else 1
        for start in range(0, len(tokens), max(1, num_at_once)):
            end = start + num_at_once
            self.token_ids += tokens[start:end]
            if self._logprobs is not None and event.logprobs is not None:
                self._logprobs += event.logprobs[start:end]
            if self._detokenizer is not None:
                self._emit(self._detokenizer.push(tokens[start : min(end, num_shown)]))
            if self.finish_reason is not None:
                return
        if event.finish_reason is not None:
            self._flush()
            self.finish_reason = self.finish_reason or event.finish_reason
            if event.stop_token_id is not None and event.stop_token_id not in eos_token_ids:
                self.stop_reason = event.stop_token_id

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take_delta(self, position: int) -> AnswerDelta:
        """Return what is new since the last call."""
        texts, taken = self._texts, self._num_texts_taken
        text = texts[taken] if len(texts) == taken + 1 else "".join(texts[taken:])
        tokens = self.token_ids[self._num_tokens_taken :]
        logprobs = None
        if self._logprobs is not None and self._params.returns_logprobs:
            logprobs = self._logprobs[self._num_tokens_taken :]
        self._num_texts_taken = len(texts)
        self._num_tokens_taken += len(tokens)
        return AnswerDelta(position, self.index, text, tokens, self.finish_reason, self.stop_reason, logprobs)

    @property
    def mean_logprob(self) -> float:
        """Mean over its tokens; -inf if log-probabilities were not requested."""
        if not self._logprobs:
            return -math.inf
        return sum(entry.logprob for entry in self._logprobs) / len(self._logprobs)

    def output(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self._logprobs) if self._logprobs is not None and self._params.returns_logprobs else None,
        )

    def _flush(self) -> None:
        if self._detokenizer is not None:
            self._emit(self._detokenizer.flush())
        if self._stops is not None and self.finish_reason is None:
            self._texts.append(self._stops.flush())

    def _emit(self, text: str) -> None:
        if self._stops is None or len(self.token_ids) < self._params.min_tokens:
            self._texts.append(text)
            return
        emitted, matched = self._stops.push(text)
        self._texts.append(emitted)
        if matched is not None:
            self.finish_reason, self.stop_reason = "stop", matched


@dataclass(frozen=True, slots=True)
class Progress:
    """The effect of an event: whether the request is finished, and which sequence a stop string has ended."""

    is_finished: bool
    stopped_index: int | None = None


UNFINISHED = Progress(False)


@dataclass(slots=True, eq=False)
class Answers:
    """All answers of one request, from submission to the last event. Owned by the code that submitted it."""

    request: Request
    prompt: str | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    submitted_at: float = field(default_factory=perf_counter)
    first_token_at: float | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    position: int = 0  # within its stream
    _answers: list[Answer] = field(default_factory=list)
    _num_unfinished: int = 0
    _picks_best: bool = False
    _changed: dict[int, Answer] = field(default_factory=dict)  # by index, in order of their first new event

    def __post_init__(self) -> None:
        self._num_unfinished = self.request.params.num_sequences
        self._picks_best = self.request.params.picks_best
        self._answers = [Answer(i, self.request, self.tokenizer) for i in range(self._num_unfinished)]

    @property
    def is_finished(self) -> bool:
        return self.error is not None or self._num_unfinished == 0

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first answer, once all are finished."""
        return self._answers[0].finish_reason if self._num_unfinished == 0 else None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each answer."""
        return [len(answer.token_ids) for answer in self._answers]

    def take(self, event: SequenceEvent) -> Progress:
        if self.first_token_at is None and len(event.token_ids):
            self.first_token_at = perf_counter()
        if event.error is not None:
            self.error = event.error
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.index == 0:
            self.num_cached_tokens = event.num_cached_tokens
        answer = self._answers[event.index]
        if answer.finish_reason is not None:
            return Progress(self.is_finished)
        self._changed[event.index] = answer
        answer.take(event, self.eos_token_ids)
        if answer.finish_reason is None:
            return UNFINISHED if self.error is None else Progress(True)
        self._num_unfinished -= 1
        return Progress(self.is_finished, event.index if event.finish_reason is None else None)

    def take_deltas(self) -> list[AnswerDelta]:
        """Return the new part of each changed answer. With `best_of`, nothing is returned before the end."""
        if self._picks_best and not self.is_finished:
            return []
        changed = self._changed
        if len(changed) == 1:
            return [changed.popitem()[1].take_delta(self.position)]
        deltas = [answer.take_delta(self.position) for answer in changed.values()]
        changed.clear()
        return deltas

    @property
    def can_be_shown(self) -> bool:
        """Whether the answers can be shown. With `best_of`, only once all are finished and the best are known."""
        return not self._picks_best or self.is_finished

    def _chosen(self) -> list[Answer]:
        if not self.request.params.picks_best:
            return self._answers
        best_first = sorted(self._answers, key=lambda answer: answer.mean_logprob, reverse=True)
        return best_first[: self.request.params.n] if self.is_finished else []

    def output(self) -> RequestOutput:
        now = perf_counter()
        metrics = {"seconds": now - self.submitted_at}
        if self.first_token_at is not None:
            metrics["first_token_seconds"] = self.first_token_at - self.submitted_at
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_array=self.request.prompt_token_ids,
            outputs=tuple([answer.output(index) for index, answer in enumerate(self._chosen())]),
            finished=self.is_finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=metrics,
            error=self.error,
            prompt_logprobs=self.prompt_logprobs,
        )
