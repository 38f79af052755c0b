"""`AsyncEngine`: the engine for asyncio programs; each request is a stream that can be left at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Unpack

from headrace.arguments import checks_arguments
from headrace.config import EMBEDDED_MODEL, EngineConfig, EngineOptions
from headrace.engine.answers import Answers
from headrace.engine.core import EngineStats
from headrace.engine.prompts import Messages, Prompt, PromptReader, TokenizedPrompt, template_options
from headrace.engine.readouts import PendingReadout, ask_embedding, ask_score
from headrace.engine.settings import Settings
from headrace.engine.start import Report, start_engine, start_engine_process
from headrace.engine.supervisor import EngineSupervisor, Phase, supervision
from headrace.errors import ConfigError, EngineDeadError, RequestError
from headrace.text import Tokenizer
from headrace.types import (
    EmbeddingRequestOutput,
    Pooling,
    Request,
    RequestOutput,
    SamplingParams,
    ScoreRequestOutput,
    SequenceEvent,
)

News = SequenceEvent | BaseException  # an exception: the engine has failed


class AsyncEngine:
    """Make one inside a running event loop: `engine = await AsyncEngine.start(...)`.

    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)      # the whole text so far
    """

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        own_process: bool = False,
        supervised: bool = False,
        step_timeout_s: float | None = None,
        max_engine_restarts: int | None = None,
        report: Report = lambda stage: None,
        **settings: Unpack[EngineOptions],
    ) -> None:
        """`own_process` keeps the engine's work out of this process. A `supervised` one is started again when it has
        died, or finishes no step for `step_timeout_s`. `report` hears how far the start has come."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, asyncio.Queue[News]] = {}
        config = EngineConfig(model=model, **settings)
        rules = supervision(supervised, step_timeout_s=step_timeout_s, max_restarts=max_engine_restarts)
        if own_process:
            self._engine = start_engine_process(config, self._deliver, supervision=rules, report=report)
        elif rules is not None:
            raise ConfigError("only an engine in a process of its own can be restarted; add own_process=True")
        else:
            self._engine = start_engine(config, self._deliver, report=report)
        self._reader = PromptReader(self._engine.tokenizer, self._engine.spec.vocab_size)
        self._ids = count()

    @classmethod
    async def start(
        cls,
        model: str = EMBEDDED_MODEL,
        *,
        own_process: bool = False,
        supervised: bool = False,
        step_timeout_s: float | None = None,
        max_engine_restarts: int | None = None,
        report: Report = lambda stage: None,
        **settings: Unpack[EngineOptions],
    ) -> AsyncEngine:
        """Load the model without stopping the event loop."""
        return await asyncio.to_thread(
            lambda: cls(
                model,
                own_process=own_process,
                supervised=supervised,
                step_timeout_s=step_timeout_s,
                max_engine_restarts=max_engine_restarts,
                report=report,
                **settings,
            )
        )

    @property
    def settings(self) -> Settings:
        return self._engine.settings

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def phase(self) -> Phase:
        """Whether it takes requests (`ready`), will again (`restarting`), or never will (`dead`)."""
        client = self._engine.client
        if isinstance(client, EngineSupervisor):
            return client.phase
        return "ready" if client.failure is None else "dead"

    @property
    def num_restarts(self) -> int:
        client = self._engine.client
        return client.num_restarts if isinstance(client, EngineSupervisor) else 0

    @property
    def failure(self) -> BaseException | None:
        """Why it takes no requests, if it takes none."""
        return self._engine.client.failure

    def get_tokenizer(self) -> Tokenizer:
        return self._reader.tokenizer

    @checks_arguments(RequestError)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The answer as it grows; with `best_of`, only its end, which alone tells the best.

        Leaving the loop early, or cancelling the task, aborts the request.
        """
        (tokenized,) = await asyncio.to_thread(self._reader.read, [prompt])
        async for output in self._stream(tokenized, sampling_params, request_id, priority, cache_salt):
            yield output

    @checks_arguments(RequestError)
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation through the model's chat template or a given one."""
        options = template_options(chat_template, add_generation_prompt, tools, chat_template_kwargs)
        text = self._reader.render(messages, **options)
        (tokenized,) = await asyncio.to_thread(self._reader.read, [text], add_special_tokens=False)
        async for output in self._stream(tokenized, sampling_params, request_id, priority, cache_salt):
            yield output

    @checks_arguments(RequestError)
    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """The prompt's hidden state after the final norm, of its last token or the mean of all."""
        (tokenized,) = await asyncio.to_thread(self._reader.read, [prompt])
        pending = ask_embedding(
            self._new_id(request_id), tokenized, pooling, normalize=normalize, priority=priority, cache_salt=cache_salt
        )
        await self._read_out(pending)
        return pending.output()

    @checks_arguments(RequestError)
    async def score(
        self,
        prompt: Prompt,
        continuation: Prompt,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ScoreRequestOutput:
        """How likely the continuation is after the prompt."""
        (pair,) = await asyncio.to_thread(self._reader.read_pairs, [prompt], [continuation])
        pending = ask_score(self._new_id(request_id), pair, priority=priority, cache_salt=cache_salt)
        await self._read_out(pending)
        return pending.output()

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish reason `abort`. Unknown ids are left in peace."""
        if request_id in self._streams:
            self._engine.client.abort(request_id)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)

    async def _stream(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> AsyncIterator[RequestOutput]:
        params = self._reader.with_tokens(sampling_params or SamplingParams())
        request = Request(self._new_id(request_id), prompt.token_ids, params, priority, cache_salt, watched=True)
        answers = Answers(request, prompt.text, self._engine.tokenizer, self._engine.eos_token_ids)
        with self._stream_of(answers) as news:
            while not answers.is_finished:
                await self._take_news(news, answers)
                if answers.can_be_shown:
                    yield answers.output()

    async def _read_out(self, pending: PendingReadout) -> None:
        with self._stream_of(pending) as news:
            while not pending.is_finished:
                await self._take_news(news, pending)

    def _new_id(self, request_id: str | None) -> str:
        return request_id or f"request-{next(self._ids)}"

    @contextmanager
    def _stream_of(self, pending: Answers | PendingReadout) -> Iterator[asyncio.Queue[News]]:
        """A submitted request's news; whoever leaves before its end aborts it."""
        request_id = pending.request.request_id
        news = self._open_stream(pending.request)
        try:
            yield news
        finally:
            del self._streams[request_id]
            if not pending.is_finished and self._engine.client.failure is None:
                self._engine.client.abort(request_id)

    def _open_stream(self, request: Request) -> asyncio.Queue[News]:
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is already running", param="request_id")
        self._loop = asyncio.get_running_loop()
        self._engine.client.submit(request)
        news: asyncio.Queue[News] = asyncio.Queue()
        self._streams[request.request_id] = news
        return news

    async def _take_news(self, news: asyncio.Queue[News], answers: Answers | PendingReadout) -> None:
        """Wait for an event, and take all that have come."""
        event = await news.get()
        while True:
            if isinstance(event, BaseException):
                raise EngineDeadError(f"the engine has stopped: {event}") from event
            if not answers.is_finished:
                progress = answers.take(event)
                if progress.stopped_index is not None:
                    self._engine.client.abort(event.request_id, progress.stopped_index)
            if news.empty():
                break
            event = news.get_nowait()
        if answers.error is not None:
            raise RequestError(answers.error)

    def _deliver(self, events: list[SequenceEvent]) -> None:
        """On the engine's thread: hand a step's events over to the event loop in one call."""
        if self._loop is not None and not self._loop.is_closed():
            failure = None if events else self._engine.client.failure  # as of now: it may be back before the loop looks
            try:
                self._loop.call_soon_threadsafe(self._dispatch, events, failure)
            except RuntimeError:
                pass  # the loop was closed just now, and with it all who waited

    def _dispatch(self, events: list[SequenceEvent], failure: BaseException | None) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put_nowait(event)
        if failure is not None:
            for stream in self._streams.values():
                stream.put_nowait(failure)
