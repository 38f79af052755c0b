"""`LLM`: offline generation with vLLM's names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike, fspath
from queue import SimpleQueue
from threading import Lock
from time import sleep
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack

from headrace.adapters import LoRARequest
from headrace.arguments import checks_arguments
from headrace.config import EngineOptions
from headrace.engine.answers import Answers, Progress
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from headrace.engine.core import EngineStats
from headrace.engine.llm_adapters import Adapters, OfflineAdapters, adapters_of
from headrace.engine.llm_pooling import PoolingCalls, per_prompt
from headrace.engine.offline_order import starting_order, target_concurrency
from headrace.engine.profiler import MAX_SECONDS, MAX_STEPS, ProfileOptions, Tool
from headrace.engine.progress import GenerateProgress
from headrace.engine.prompts import (
    Messages,
    Prompt,
    PromptReader,
    TokenizedPrompt,
    as_conversations,
    as_prompt_list,
    not_sampling_params,
    template_options,
)
from headrace.engine.reconfigure import reconfigure
from headrace.engine.settings import Settings
from headrace.engine.settings_file import config_from
from headrace.engine.start import Engine, start_engine
from headrace.engine.startup_display import library_display, log_warnings
from headrace.errors import ConfigError, EngineDeadError, ModelError, RequestError
from headrace.garbage import collecting_less_often
from headrace.models.spec import ModelSpec
from headrace.sched.events import MODEL_GAVE_NAN
from headrace.text import Tokenizer
from headrace.types import Request, RequestOutput, SamplingParams, SequenceEvent, TokenLogprobs

Input = TypeVar("Input")
Output_co = TypeVar("Output_co", covariant=True)

FIRST_TOKENIZE_BATCH = 32  # prompts; small, so that the engine starts while the next ones are tokenized
TOKENIZE_BATCH = 256
# Requests between two pauses in which the engine's thread has the GIL for itself. Without pauses this thread takes the
# GIL at each of the engine's hundreds of driver calls, and the first steps take three times as long.
SUBMIT_BATCH = 32
SUBMIT_PAUSE_S = 0.002
PROFILE_DIRECTORY = "headrace-profile"

_log = logging.getLogger(__name__)


class Pending(Protocol[Output_co]):
    """A request that collects its events and builds its output."""

    @property
    def request(self) -> Request: ...

    @property
    def is_finished(self) -> bool: ...

    def take(self, event: SequenceEvent) -> Progress: ...

    def output(self) -> Output_co: ...


class LLM(PoolingCalls):
    """A loaded model for offline batches of prompts.

    >>> llm = LLM()                                   # the default model, no account needed
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: str | PathLike[str] | None = None,
        **settings: Unpack[EngineOptions],
    ) -> None:
        """Load a model, by default the embedded one. `config` is a TOML file of settings, as `headrace tune` writes it;
        arguments win over the file. On a terminal, the stages of the start are shown on stderr."""
        self._events: SimpleQueue[list[SequenceEvent]] = SimpleQueue()
        with library_display() as display:
            self._engine = start_engine(config_from(model, config, settings), self._events.put, report=display)
            display.ready(self._engine.start_seconds, self._engine.start_stages)
        log_warnings(self._engine.settings.warnings)
        self._reader = _reader_of(self._engine)
        self._adapters = _adapters_of(self._engine)
        self._ids = count()
        self._outputs: dict[str, Any] = {}  # of the running call
        self._is_busy = Lock()
        self._is_reconfiguring = False

    @property
    def settings(self) -> Settings:
        """The resolved settings, each automatic value with its reason."""
        return self._engine.settings

    @property
    def spec(self) -> ModelSpec:
        """The model's architecture."""
        return self._engine.spec

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def get_tokenizer(self) -> Tokenizer:
        return self._reader.tokenizer

    @checks_arguments(RequestError)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate answers to prompts (text or token ids). Outputs are in the order of the prompts. `lora_request`: the
        adapter of all prompts, or one for each."""
        items = as_prompt_list(prompts)
        return _answered(
            self._run(
                items, sampling_params, use_tqdm=use_tqdm, priority=priority, is_chat=False, lora_request=lora_request
            )
        )

    @checks_arguments(RequestError)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations (lists of messages), rendered with the given chat template or the model's."""
        options = template_options(chat_template, add_generation_prompt, tools, chat_template_kwargs)
        texts = [self._reader.render(conversation, **options) for conversation in as_conversations(messages)]
        return _answered(
            self._run(texts, sampling_params, use_tqdm=use_tqdm, priority=None, is_chat=True, lora_request=lora_request)
        )

    @checks_arguments(RequestError)
    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """Return the best-scored beams of each prompt. `headrace.engine.beam_search` explains the cost."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, got {params!r}", param="params")
        items = as_prompt_list(prompts)
        self._refuse_long(items)
        read = self._reader.read(items)
        for index, prompt in enumerate(read):
            if len(prompt.token_ids) + params.max_tokens > self.settings.max_model_len:
                raise RequestError(
                    f"prompt {index}: {len(prompt.token_ids):,} tokens and max_tokens ({params.max_tokens:,}) are more "
                    f"than the context of {self.settings.max_model_len:,}; lower max_tokens",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
        tokens = [tuple(prompt.token_ids.tolist()) for prompt in read]
        # Without prefix caching the beams still share blocks, among themselves.
        salt = None if self.settings.enable_prefix_caching else f"beam-search-{next(self._ids)}"
        step = partial(self._next_token_of_each, salt=salt)
        outputs = search(tokens, params, step, self._engine.eos_token_ids)
        return [self._with_texts(output) for output in outputs]

    def _next_token_of_each(
        self, beams: list[tuple[int, ...]], params: SamplingParams, *, salt: str | None
    ) -> list[TokenLogprobs]:
        found = []
        for output in self._run(beams, params, use_tqdm=False, priority=None, is_chat=False, shared_salt=salt):
            if output.error is not None:
                raise RequestError(output.error)
            assert output.outputs[0].logprobs is not None
            found.append(output.outputs[0].logprobs[0])
        return found

    def _with_texts(self, output: BeamSearchOutput) -> BeamSearchOutput:
        if self._engine.tokenizer is None:
            return output
        texts = self._engine.tokenizer.decode_batch([beam.tokens for beam in output.sequences])
        return BeamSearchOutput(
            tuple(replace(beam, text=text) for beam, text in zip(output.sequences, texts, strict=True))
        )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. For measurements."""
        self._engine.client.forget_prefixes()

    def reconfigure(self, **settings: Unpack[EngineOptions]) -> None:
        """Change the settings without loading the weights again, while no call runs.

        The result is that of a new `LLM` of the same model with these settings: what is not given has its default, not
        its earlier value. Only settings of the model (tokenizer, revision, load_format, dtype, quantization, device)
        stay as loaded, and refuse another value. The KV cache is allocated anew, so cached prefixes are lost, and
        `stats` starts at zero. If the new settings fail, the old ones stay in force and the error is raised.
        """
        if not self._is_busy.acquire(blocking=False):
            raise ConfigError("settings can be changed only while no call runs; wait for the others to end")
        try:
            self._refuse_if_dead()
            self._is_reconfiguring = True
            self._engine, error = reconfigure(self._engine, settings, self._events.put)
            self._reader = _reader_of(self._engine)
            self._adapters = _adapters_of(self._engine)
        finally:
            self._is_reconfiguring = False
            self._is_busy.release()
        if error is not None:
            raise error
        log_warnings(self._engine.settings.warnings)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        directory: str | PathLike[str] = PROFILE_DIRECTORY,
        tool: Tool = "torch",
        max_seconds: float = MAX_SECONDS,
        max_steps: int = MAX_STEPS,
    ) -> None:
        """Record the engine's steps from now on. `generate` may run on another thread meanwhile.

        `stop_profile` writes a trace and a record into the directory; 'headrace profile --trace' reads them. A profile
        ends by itself after `max_seconds` or `max_steps`. `profile_prefix` names the files.
        """
        options = ProfileOptions(
            directory=fspath(directory), name=profile_prefix, tool=tool, max_seconds=max_seconds, max_steps=max_steps
        )
        self._engine.client.start_profile(options).result()

    def stop_profile(self) -> dict[str, Any]:
        """End the profile. Returns its record, which has the names of its files."""
        return self._engine.client.stop_profile().result()

    def close(self) -> None:
        """Stop the engine. Calls that still wait on other threads, and all later ones, raise `EngineDeadError`."""
        self._engine.close()
        self._events.put([])  # wakes a call that waits; it finds the engine's failure

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        is_chat: bool,
        shared_salt: str | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer prompts. Those of calls with the same `shared_salt` share blocks, even without prefix caching."""
        params = per_prompt("sampling_params", sampling_params, SamplingParams(), len(prompts))
        for each in params:
            if not isinstance(each, SamplingParams):
                raise not_sampling_params(each)
        priorities = per_prompt("priority", priority, 0, len(prompts))
        adapters = adapters_of(lora_request, len(prompts))
        self._refuse_long(prompts)

        def build(index: int, prompt: TokenizedPrompt) -> Pending[RequestOutput]:
            own = self._reader.with_tokens(params[index])
            request = Request(
                str(next(self._ids)),
                prompt.token_ids,
                own,
                priorities[index],
                shared_salt,
                watched=bool(own.stop),
                shares_blocks=shared_salt is not None,
                adapter=None if (adapter := adapters[index]) is None else adapter.lora_name,
            )
            return Answers(request, prompt.text, self._engine.tokenizer, self._engine.eos_token_ids)

        order = starting_order(prompts, params)
        tokenized = self._tokenized([prompts[i] for i in order], is_chat=is_chat)
        return self._collect(
            order,
            tokenized,
            build,
            num_running=target_concurrency(params, self.settings),
            use_tqdm=use_tqdm,
            adapters=adapters,
        )

    def _collect(
        self,
        order: list[int],
        inputs: Iterable[Input],
        build: Callable[[int, Input], Pending[Output_co]],
        *,
        num_running: int | None = None,
        use_tqdm: bool,
        adapters: Sequence[LoRARequest | None] = (),
    ) -> list[Output_co]:
        """Submit a request for each input and wait for all of them. `adapters` are loaded first.

        `inputs` come in the order of `order` (indices of prompts); outputs are in the order of the prompts.
        """
        tracked: dict[str, Pending[Output_co]] = {}
        if not self._is_reconfiguring:
            self._refuse_if_dead()  # first: in a forked process nobody releases the lock
        with self._is_busy, collecting_less_often(), GenerateProgress(len(order), enabled=use_tqdm) as progress:
            self._adapters.load(adapters)
            self._engine.client.limit_running(num_running)
            try:
                for number, (index, given) in enumerate(zip(order, inputs, strict=True), start=1):
                    self._submit(index, given, build, tracked)
                    self._take_events(tracked, wait=False)
                    if number % SUBMIT_BATCH == 0:
                        sleep(SUBMIT_PAUSE_S)
                self._wait_for_all(tracked, progress)
            except BaseException:
                self._abort_all(tracked)
                raise
            in_order = sorted(zip(order, tracked, strict=True), key=lambda pair: pair[0])
            return [self._outputs.pop(request_id) for _, request_id in in_order]

    def _refuse_long(self, prompts: Sequence[Prompt], noun: str = "prompt") -> None:
        """Refuse a text that is much too long for the context before any is tokenized."""
        for index, prompt in enumerate(prompts):
            try:
                self._reader.check_long_prompt(prompt, param=noun)
            except RequestError as error:
                raise RequestError(f"{noun} {index}: {error}", param=error.param, code=error.code) from None

    def _tokenized(self, prompts: Sequence[Prompt], *, is_chat: bool) -> Iterator[TokenizedPrompt]:
        start, end = 0, FIRST_TOKENIZE_BATCH
        while start < len(prompts):
            yield from self._reader.read(prompts[start:end], add_special_tokens=not is_chat)
            start, end = end, end + TOKENIZE_BATCH

    def _submit(
        self,
        index: int,
        given: Input,
        build: Callable[[int, Input], Pending[Output_co]],
        tracked: dict[str, Pending[Output_co]],
    ) -> None:
        try:
            pending = build(index, given)
            self._engine.client.submit(pending.request)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}", param=error.param, code=error.code) from None
        tracked[pending.request.request_id] = pending

    def _wait_for_all(self, tracked: dict[str, Pending[Output_co]], progress: GenerateProgress) -> None:
        num_done = sum(pending.is_finished for pending in tracked.values())
        while num_done < len(tracked):
            num_done += self._take_events(tracked, wait=True)
            progress.update(num_done, self.stats)

    def _take_events(self, tracked: dict[str, Pending[Output_co]], *, wait: bool) -> int:
        """Process the events that have arrived. Returns the number of requests that finished."""
        num_finished = 0
        while wait or not self._events.empty():
            events = self._events.get()
            wait = False
            self._refuse_if_dead()
            num_finished += sum(self._take(event, tracked) for event in events)
        return num_finished

    def _refuse_if_dead(self) -> None:
        failure = self._engine.client.failure
        if failure is not None:
            raise EngineDeadError(f"the engine has stopped: {failure}") from failure

    def _take(self, event: SequenceEvent, tracked: dict[str, Pending[Output_co]]) -> bool:
        pending = tracked.get(event.request_id)
        if pending is None or pending.is_finished:
            return False
        progress = pending.take(event)
        if progress.stopped_index is not None:
            self._engine.client.abort(event.request_id, progress.stopped_index)
        if progress.is_finished:
            self._outputs[event.request_id] = pending.output()  # built now, while the engine works on the others
        return progress.is_finished

    def _abort_all(self, tracked: dict[str, Pending[Output_co]]) -> None:
        self._outputs.clear()
        if self._engine.client.failure is None:
            for request_id in tracked:
                self._engine.client.abort(request_id)


def _reader_of(engine: Engine) -> PromptReader:
    return PromptReader(
        engine.tokenizer, engine.spec.vocab_size, engine.grammars, max_model_len=engine.settings.max_model_len
    )


def _adapters_of(engine: Engine) -> OfflineAdapters:
    given = {} if engine.config is None else engine.config.adapter_paths
    return OfflineAdapters(engine.client, engine.settings.adapters, given)


def _answered(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Raise if the model gave NaN for every prompt: there is nothing to return. Log a warning if some failed."""
    failed = [output.error for output in outputs if output.error is not None]
    if not failed:
        return outputs
    if len(failed) == len(outputs) and set(failed) == {MODEL_GAVE_NAN}:
        raise ModelError(f"all {len(outputs):,} prompts failed: {MODEL_GAVE_NAN}")
    _log.warning("%d of %d prompts failed (RequestOutput.error); the first: %s", len(failed), len(outputs), failed[0])
    return outputs
