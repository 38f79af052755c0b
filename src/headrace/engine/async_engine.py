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
from headrace.engine.start import start_engine
from headrace.errors import EngineDeadError, RequestError
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


class AsyncEngine:
    """Make one inside a running event loop: `engine = await AsyncEngine.start(...)`.

    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)      # the whole text so far
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **settings: Unpack[EngineOptions]) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, asyncio.Queue[SequenceEvent | None]] = {}
        self._engine = start_engine(EngineConfig(model=model, **settings), self._deliver)
        self._reader = PromptReader(self._engine.tokenizer, self._engine.spec.vocab_size, self._engine.grammars)
        self._ids = count()

    @classmethod
    async def start(cls, model: str = EMBEDDED_MODEL, **settings: Unpack[EngineOptions]) -> AsyncEngine:
        """Load the model without stopping the event loop."""
        return await asyncio.to_thread(lambda: cls(model, **settings))

    @property
    def settings(self) -> Settings:
        return self._engine.settings

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

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
        params = sampling_params or SamplingParams()
        if params.structured_outputs is None:
            params = self._reader.with_tokens(params)
        else:  # compiling takes its time
            params = await asyncio.to_thread(self._reader.with_tokens, params)
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
    def _stream_of(self, pending: Answers | PendingReadout) -> Iterator[asyncio.Queue[SequenceEvent | None]]:
        """A submitted request's news; whoever leaves before its end aborts it."""
        request_id = pending.request.request_id
        news = self._open_stream(pending.request)
        try:
            yield news
        finally:
            del self._streams[request_id]
            if not pending.is_finished and self._engine.client.failure is None:
                self._engine.client.abort(request_id)

    def _open_stream(self, request: Request) -> asyncio.Queue[SequenceEvent | None]:
        if request.request_id in self._streams:
            raise RequestError(f"request id {request.request_id!r} is already running", param="request_id")
        self._loop = asyncio.get_running_loop()
        self._engine.client.submit(request)
        news: asyncio.Queue[SequenceEvent | None] = asyncio.Queue()
        self._streams[request.request_id] = news
        return news

    async def _take_news(self, news: asyncio.Queue[SequenceEvent | None], answers: Answers | PendingReadout) -> None:
        """Wait for an event, and take all that have come."""
        event = await news.get()
        while True:
            if event is None:
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
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
            self._loop.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[SequenceEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is not None:
                stream.put_nowait(event)
        if self._engine.client.failure is not None:
            for stream in self._streams.values():
                stream.put_nowait(None)
