"""`Conversation`: the message history of one chat, and its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.answers import Answers
from headrace.engine.prompts import PromptReader
from headrace.engine.start import Engine, start_engine
from headrace.engine.startup_display import library_display, log_warnings
from headrace.errors import EngineDeadError, ModelError, RequestError
from headrace.types import Request, SamplingParams, SequenceEvent

Events = SimpleQueue[list[SequenceEvent]]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    was_stopped: bool
    stats: str  # token count, speed, share of the prompt from the prefix cache


class Conversation:
    """Owns its engine. Each turn sends the whole history; the prefix cache saves all but the new part."""

    def __init__(self, engine: Engine, events: Events, params: SamplingParams, *, system: str | None = None) -> None:
        if engine.tokenizer is None or engine.tokenizer.chat_template is None:
            raise ModelError(
                f"the model {engine.model_name} has no chat template, so it cannot chat; use 'headrace run'"
            )
        self._engine = engine
        self._events = events
        self._params = params
        self._prompts = PromptReader(engine.tokenizer, engine.spec.vocab_size)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._system)
        self._ids = count()

    @classmethod
    def start(cls, config: EngineConfig, params: SamplingParams, *, system: str | None = None) -> Conversation:
        events: Events = SimpleQueue()
        with library_display() as display:
            engine = start_engine(config, events.put, report=display)
        log_warnings(engine.settings.warnings)
        try:
            return cls(engine, events, params, system=system)
        except BaseException:
            engine.close()
            raise

    @property
    def greeting(self) -> str:
        engine = self._engine
        return f"{engine.model_name} on {engine.settings.device}, ready in {engine.start_seconds:.1f} s"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, with the system message."""
        return list(self._messages)

    def clear(self) -> None:
        self._messages = list(self._system)

    def ask(self, question: str, show: Show) -> Turn:
        """Call `show` with each new piece of the answer. Ctrl-C ends it; the partial answer stays in the history."""
        asked = [*self._messages, {"role": "user", "content": question}]
        (prompt,) = self._prompts.read([self._prompts.render(asked)], add_special_tokens=False)
        request = Request(f"turn-{next(self._ids)}", prompt.token_ids, self._params, watched=True)
        answers = Answers(request, None, self._engine.tokenizer, self._engine.eos_token_ids)
        self._engine.client.submit(request)
        try:
            self._follow(answers, show)
        except KeyboardInterrupt:
            self._engine.client.abort(request.request_id)
        self._messages = [*asked, {"role": "assistant", "content": _text_of(answers)}]
        return Turn(was_stopped=not answers.is_finished, stats=_stats(answers))

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, answers: Answers, show: Show) -> None:
        num_shown = 0
        while not answers.is_finished:
            self._take_events(answers)
            text = _text_of(answers)
            if len(text) > num_shown:
                show(text[num_shown:])
                num_shown = len(text)
        if answers.error is not None:
            raise RequestError(answers.error)

    def _take_events(self, answers: Answers) -> None:
        """Wait for the events of a step. Late events of an earlier answer are ignored."""
        events = self._events.get()
        failure = self._engine.client.failure
        if failure is not None:
            raise EngineDeadError(f"the engine has stopped: {failure}") from failure
        for event in events:
            if event.request_id != answers.request.request_id or answers.is_finished:
                continue
            progress = answers.take(event)
            if progress.stopped_index is not None:
                self._engine.client.abort(event.request_id, progress.stopped_index)


def _text_of(answers: Answers) -> str:
    return answers.output().outputs[0].text


def _stats(answers: Answers) -> str:
    num_tokens, prompt_len = sum(answers.lengths), len(answers.request.prompt_token_ids)
    seconds = max(1e-9, perf_counter() - answers.submitted_at)
    wait = (
        "" if answers.first_token_at is None else f", first after {answers.first_token_at - answers.submitted_at:.2f} s"
    )
    return (
        f"{num_tokens:,} tokens · {num_tokens / seconds:,.0f} tokens/s{wait}"
        f" · {answers.num_cached_tokens:,} of {prompt_len:,} prompt tokens from the cache"
    )
