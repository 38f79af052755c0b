"""`AsyncEngine`: the engine for asyncio programs. Each request is a stream; leaving the stream aborts the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike
from typing import Any, Unpack

from headrace.adapters import LoRARequest
from headrace.arguments import checks_arguments
from headrace.config import EngineOptions
from headrace.engine.answer_stream import AnswerStream
from headrace.engine.answers import Answers
from headrace.engine.async_adapters import AsyncAdapters
from headrace.engine.async_beam_search import search_beams
from headrace.engine.async_pooling import AsyncPoolingCalls
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.event_dispatch import EventDispatch
from headrace.engine.event_queue import EventQueue
from headrace.engine.group import EngineGroup, EngineState, OnLost, check_data_parallel_size
from headrace.engine.pooling_prompts import PoolingReader
from headrace.engine.process.supervisor import EngineSupervisor, Phase, phase_of, supervision
from headrace.engine.profiler import ProfileOptions
from headrace.engine.prompts import (
    Messages,
    Prompt,
    PromptReader,
    TokenizedPrompt,
    not_sampling_params,
    template_options,
)
from headrace.engine.readout_stream import ReadoutStream
from headrace.engine.readouts import PendingReadout
from headrace.engine.settings import Settings
from headrace.engine.settings_file import config_from
from headrace.engine.shared_client import SharedClient
from headrace.engine.start import Engine, start_engine, start_engine_group, start_engine_process
from headrace.engine.startup_display import log_stage, log_warnings
from headrace.engine.submission import OnTiming
from headrace.errors import ConfigError, FailedRequestError, RequestError
from headrace.models.spec import ModelSpec
from headrace.startup import Report, StartupStage
from headrace.text import Tokenizer
from headrace.types import (
    Request,
    RequestOutput,
    SamplingParams,
)


class AsyncEngine(AsyncPoolingCalls):
    """An engine for asyncio programs. Create it inside the event loop: `engine = await AsyncEngine.start(...)`.

    >>> async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=8)):
    ...     print(output.outputs[0].text)      # the whole text so far
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | PathLike[str] | None = None,
        own_process: bool = False,
        supervised: bool = False,
        step_timeout_s: float | None = None,
        max_engine_restarts: int | None = None,
        data_parallel_size: int = 1,
        report: Report = log_stage,
        **settings: Unpack[EngineOptions],
    ) -> None:
        """Load the model and start the engine. `config` is a TOML file of settings; arguments win over it.

        With `own_process` the engine runs in its own process. With `supervised` that process is restarted when it dies
        or finishes no step for `step_timeout_s`. `data_parallel_size`: so many engines, in processes of their own,
        which divide the machine and the requests. `report` is called with the stages of each start, on any thread; by
        default they are logged at level INFO.
        """
        engine_config = config_from(model, config, settings)
        rules = supervision(supervised, step_timeout_s=step_timeout_s, max_restarts=max_engine_restarts)
        check_data_parallel_size(data_parallel_size, own_process=own_process)
        if data_parallel_size > 1:
            start = partial(
                start_engine_group, engine_config, size=data_parallel_size, supervision=rules, report=report
            )
            self._set_up(lambda deliver: start(deliver, self._events.lose))
        elif own_process:
            self._set_up(lambda deliver: start_engine_process(engine_config, deliver, supervision=rules, report=report))
        elif rules is not None:
            raise ConfigError("only an engine in its own process can be supervised; add own_process=True")
        else:
            self._set_up(lambda deliver: start_engine(engine_config, deliver, report=report))
        log_warnings(self._engine.settings.warnings)

    @classmethod
    def over(cls, start: Callable[[Deliver], Engine]) -> AsyncEngine:
        """Wrap an engine that `start` creates. `start` receives the callback for the engine's events."""
        engine = cls.__new__(cls)
        engine._set_up(start)
        return engine

    @classmethod
    def over_group(cls, start: Callable[[Deliver, OnLost], Engine]) -> AsyncEngine:
        """The same for several engines: `start` also receives the callback for those that die."""
        engine = cls.__new__(cls)
        engine._set_up(lambda deliver: start(deliver, engine._events.lose))
        return engine

    def _set_up(self, start: Callable[[Deliver], Engine]) -> None:
        self._events = EventDispatch(failure=lambda: self.failure, requests_at=self._requests_at)
        self._engine = start(self._events.deliver)
        self._group = self._engine.client if isinstance(self._engine.client, EngineGroup) else None
        self._reader = PromptReader(
            self._engine.tokenizer,
            self._engine.spec.vocab_size,
            self._engine.grammars,
            max_model_len=self._engine.settings.max_model_len,
        )
        self.pooling_reader = PoolingReader(self._reader, self._engine.spec.pooler)
        self._ids = count()
        self._share_numbers = count()
        self._adapters = AsyncAdapters(self._engine.client, self._engine.adapters)

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        *,
        config: str | PathLike[str] | None = None,
        own_process: bool = False,
        supervised: bool = False,
        step_timeout_s: float | None = None,
        max_engine_restarts: int | None = None,
        data_parallel_size: int = 1,
        report: Report = log_stage,
        **settings: Unpack[EngineOptions],
    ) -> AsyncEngine:
        """Load the model on a thread, without blocking the event loop."""
        return await asyncio.to_thread(
            lambda: cls(
                model,
                config=config,
                own_process=own_process,
                supervised=supervised,
                step_timeout_s=step_timeout_s,
                max_engine_restarts=max_engine_restarts,
                data_parallel_size=data_parallel_size,
                report=report,
                **settings,
            )
        )

    @property
    def settings(self) -> Settings:
        return self._engine.settings

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self._engine.spec

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def start_seconds(self) -> float:
        """How long the first start took."""
        return self._engine.start_seconds

    @property
    def start_stages(self) -> tuple[StartupStage, ...]:
        """The stages of the first start."""
        return self._engine.start_stages

    @property
    def phase(self) -> Phase:
        """`ready` (accepts requests), `restarting` or `asleep` (will accept them again) or `dead` (will not). Of
        several engines, the best one counts."""
        return phase_of(self._engine.client) if self._group is None else self._group.phase

    @property
    def num_restarts(self) -> int:
        return sum(state.num_restarts for state in self.states)

    @property
    def pid(self) -> int | None:
        """The id of the engine's process, or of the first of several; None if the engine runs on a thread."""
        return self.states[0].pid

    @property
    def num_engines(self) -> int:
        return 1 if self._group is None else len(self._group.members)

    @property
    def total_settings(self) -> Settings:
        """The settings with the slots and blocks of all engines."""
        each = [state.settings for state in self.states]
        return (
            self.settings
            if len(each) == 1
            else replace(
                self.settings,
                max_num_seqs=sum(settings.max_num_seqs for settings in each),
                num_blocks=sum(settings.num_blocks for settings in each),
            )
        )

    @property
    def states(self) -> list[EngineState]:
        """Each engine at this moment."""
        if self._group is not None:
            return self._group.states
        return [EngineState.of(self._engine.client, self._engine.settings)]

    def engine_of(self, request_id: str) -> int:
        """The number of the engine that runs the request; 0 if none does."""
        return 0 if self._group is None else self._group.place_of(request_id) or 0

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the engine, or None while it accepts requests."""
        return self._engine.client.failure

    @property
    def adapters(self) -> Mapping[str, str]:
        """The loaded LoRA adapters: the path of each by name."""
        return self._adapters.paths

    @property
    def reader(self) -> PromptReader:
        """Converts prompts to token ids. Thread-safe."""
        return self._reader

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self._reader.tokenizer

    async def compiled(self, params: SamplingParams) -> SamplingParams:
        """Compile the grammar of the parameters, if they have one, on a thread beside the event loop."""
        if params.structured_outputs is None:
            return params
        return await asyncio.to_thread(self._reader.with_tokens, params)

    def prepare(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        watched: bool = True,
        announced: bool = False,
        shares_blocks: bool = False,
        adapter: str | None = None,
    ) -> Answers:
        """Build a request without submitting it. Its grammar is compiled.

        An unwatched request gets its tokens in one event at the end. An `announced` one also gets an event with its
        first token.
        """
        params = self._reader.with_tokens(sampling_params)
        watched = watched or bool(params.stop)
        request = Request(
            self._new_id(request_id),
            prompt.token_ids,
            params,
            priority,
            cache_salt,
            watched=watched,
            announced=announced,
            shares_blocks=shares_blocks,
            adapter=adapter,
        )
        return Answers(request, prompt.text, self._engine.tokenizer, self._engine.eos_token_ids)

    def open(self, requests: Sequence[Answers], *, on_timing: OnTiming | None = None) -> AnswerStream:
        """Combine prepared requests into one stream for one reader. Entering the stream submits them."""
        return AnswerStream(self, requests, on_timing=on_timing)

    def open_readouts(self, pending: Sequence[PendingReadout], *, on_timing: OnTiming | None = None) -> ReadoutStream:
        """The same as `open` for embeddings and scores."""
        return ReadoutStream(self, pending, on_timing=on_timing)

    async def beam_search(
        self,
        prompt: TokenizedPrompt,
        params: BeamSearchParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        opened: Callable[[AnswerStream], None] | None = None,
        adapter: str | None = None,
    ) -> BeamSearchOutput:
        """Return the best beams. Each search step is a new stream, which is passed to `opened`."""
        shares_blocks = not self.settings.enable_prefix_caching  # among the beams, under a salt of their own
        salt = f"beam-search-{next(self._ids)}" if shares_blocks else cache_salt
        prepare = partial(
            self.prepare,
            priority=priority,
            cache_salt=salt,
            watched=False,
            shares_blocks=shares_blocks,
            adapter=adapter,
        )
        ends = self._engine.eos_token_ids
        return await search_beams(self, prompt, params, eos_token_ids=ends, prepare=prepare, opened=opened)

    @checks_arguments(RequestError)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the answer as it grows. With `best_of`, yield only the final output. An adapter that is not loaded is
        loaded first.

        Leaving the loop early, or cancelling the task, aborts the request.
        """
        adapter = await self._adapters.name_of(lora_request)
        (tokenized,) = await asyncio.to_thread(self._reader.read_within_context, [prompt])
        async for output in self._stream(tokenized, sampling_params, request_id, priority, cache_salt, adapter):
            yield output

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter from a directory, while requests run. `replaces`: one of the same name."""
        await self._adapters.load(name, path, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that run with it go on to their end."""
        await self._adapters.unload(name)

    @checks_arguments(RequestError)
    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `generate`, for a conversation rendered with the given chat template, or the model's."""
        options = template_options(chat_template, add_generation_prompt, tools, chat_template_kwargs)
        text = self._reader.render(messages, **options)
        (tokenized,) = await asyncio.to_thread(self._reader.read_within_context, [text], add_special_tokens=False)
        adapter = await self._adapters.name_of(lora_request)
        async for output in self._stream(tokenized, sampling_params, request_id, priority, cache_salt, adapter):
            yield output

    async def abort(self, request_id: str) -> None:
        """End a request; its stream closes with finish reason `abort`. Unknown ids are ignored."""
        if request_id in self._events.readers:
            self._engine.client.abort(request_id)

    def abort_all(self) -> None:
        """End all requests; each stream closes with finish reason `abort`."""
        for request_id in list(self._events.readers):
            self._engine.client.abort(request_id)

    async def start_profile(self, options: ProfileOptions, engine: int = 0) -> dict[str, Any]:
        """Record the steps of an engine from now on; see `engine/profiler.py`."""
        if self._group is not None:
            self._group.profile_next(engine)
        return await asyncio.wrap_future(self._engine.client.start_profile(options))

    async def stop_profile(self) -> dict[str, Any]:
        """End the profile. Returns its record, which has the names of its files."""
        return await asyncio.wrap_future(self._engine.client.stop_profile())

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, except for blocks that running requests hold."""
        self._engine.client.forget_prefixes()

    async def sleep(self) -> None:
        """End the processes of the engines, which frees all of their memory. Requests in flight end with an error."""
        await self._on_each(EngineSupervisor.sleep)

    async def wake_up(self) -> None:
        """Start the engines that sleep again. They load the model as at the first start."""
        await self._on_each(EngineSupervisor.wake_up)

    async def _on_each(self, call: Callable[[EngineSupervisor], None]) -> None:
        clients = [self._engine.client] if self._group is None else [member.client for member in self._group.members]
        supervised = [client for client in clients if isinstance(client, EngineSupervisor)]
        if len(supervised) != len(clients):
            raise ConfigError("only an engine in its own process, and supervised, can sleep")
        await asyncio.gather(*(asyncio.to_thread(call, client) for client in supervised))

    def share(
        self, deliver: Deliver, *, priority: int = 0, cache_salt: str | None = None, max_sequences: int, engine: int = 0
    ) -> Engine:
        """One engine for another front, such as a batch job, with a client of its own (`SharedClient`). Events of its
        requests go to `deliver`, on the engine's thread. May be called from any thread, by one at a time."""
        client = SharedClient(
            self._engine.client if self._group is None else self._group.members[engine].client,
            deliver,
            engine=engine,
            number=next(self._share_numbers),
            priority=priority,
            cache_salt=cache_salt,
            max_sequences=max_sequences,
            adapters=self._adapters.paths,
            on_close=self._events.unshare,
        )
        self._events.share(client)
        return replace(self._engine, client=client)

    async def close(self) -> None:
        """Stop the engine. Requests in flight, and all later ones, raise `EngineDeadError`."""
        await asyncio.to_thread(self._engine.close)
        self._events.deliver([])

    async def _stream(
        self,
        prompt: TokenizedPrompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        adapter: str | None,
    ) -> AsyncIterator[RequestOutput]:
        given = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(given, SamplingParams):
            raise not_sampling_params(given)
        params = await self.compiled(given)
        answers = self.prepare(prompt, params, request_id, priority=priority, cache_salt=cache_salt, adapter=adapter)
        with self.open([answers]) as stream:
            while not answers.is_finished:
                try:
                    await stream.deltas()
                except FailedRequestError as error:
                    raise RequestError(str(error)) from None
                if answers.can_be_shown:
                    yield answers.output()

    def _requests_at(self, engine: int) -> list[str]:
        return [] if self._group is None else self._group.requests_at(engine)

    def _new_id(self, request_id: str | None) -> str:
        return request_id or f"request-{next(self._ids)}"

    # ---- used by AnswerStream

    def subscribe(self, request: Request, event_queue: EventQueue) -> None:
        """Submit a request. Its events go to `event_queue`."""
        if request.request_id in self._events.readers:
            raise RequestError(
                f"request id {request.request_id!r} is already running; give each request its own", param="request_id"
            )
        self._events.use_loop(asyncio.get_running_loop())
        self._engine.client.submit(request)
        self._events.readers[request.request_id] = event_queue

    def unsubscribe(self, request_id: str, *, abort: bool) -> None:
        """Stop delivering the events of this request. `abort` ends it in the engine too."""
        del self._events.readers[request_id]
        if abort and self._engine.client.failure is None:
            self._engine.client.abort(request_id)
        if self._group is not None:
            self._group.release(request_id)

    def abort_one(self, request_id: str, index: int) -> None:
        """End one sequence of a request whose text a stop string has ended."""
        self._engine.client.abort(request_id, index)
