"""`LLM`: offline generation with the names that vLLM's users know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from threading import Lock
from time import sleep
from types import TracebackType
from typing import Any, Protocol, TypeVar, Unpack

from headrace.arguments import checks_arguments
from headrace.config import EMBEDDED_MODEL, EngineConfig, EngineOptions
from headrace.engine.answers import Answers, Progress
from headrace.engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from headrace.engine.core import EngineStats
from headrace.engine.offline_order import prefixes_first, starting_order, target_concurrency
from headrace.engine.progress import GenerateProgress
from headrace.engine.prompts import (
    Messages,
    Prompt,
    PromptReader,
    TokenizedPair,
    TokenizedPrompt,
    as_conversations,
    as_prompt_list,
    template_options,
)
from headrace.engine.readouts import ask_embedding, ask_score
from headrace.engine.settings import Settings
from headrace.engine.start import start_engine
from headrace.errors import EngineDeadError, RequestError
from headrace.garbage import collecting_less_often
from headrace.models.spec import ModelSpec
from headrace.text import Tokenizer
from headrace.types import (
    EmbeddingRequestOutput,
    Pooling,
    Request,
    RequestOutput,
    SamplingParams,
    ScoreRequestOutput,
    SequenceEvent,
    TokenLogprobs,
)

Input = TypeVar("Input")
Output_co = TypeVar("Output_co", covariant=True)

TOKENIZE_FIRST = 32  # prompts; the engine works on the first while the next are tokenized
TOKENIZE_AT_ONCE = 256
# Requests, and then a pause in which the engine has the interpreter for itself: a thread that never rests takes it
# again at each of the engine's hundreds of calls into the driver, and the first steps take three times as long.
SUBMIT_AT_ONCE = 32
SUBMIT_PAUSE_S = 0.002


class Pending(Protocol[Output_co]):
    """A request that was submitted, and what becomes of it."""

    @property
    def request(self) -> Request: ...

    @property
    def is_finished(self) -> bool: ...

    def take(self, event: SequenceEvent) -> Progress: ...

    def output(self) -> Output_co: ...


class LLM:
    """A model ready to answer lists of prompts.

    >>> llm = LLM()                                   # the embedded model, no account needed
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0].text
    """

    def __init__(self, model: str = EMBEDDED_MODEL, **settings: Unpack[EngineOptions]) -> None:
        self._events: SimpleQueue[list[SequenceEvent]] = SimpleQueue()
        self._engine = start_engine(EngineConfig(model=model, **settings), self._events.put)
        self._reader = PromptReader(self._engine.tokenizer, self._engine.spec.vocab_size, self._engine.grammars)
        self._ids = count()
        self._outputs: dict[str, Any] = {}  # of the call that runs
        self._is_busy = Lock()

    @property
    def settings(self) -> Settings:
        """The settings in force, each automatic choice with its reason."""
        return self._engine.settings

    @property
    def spec(self) -> ModelSpec:
        """The model in numbers."""
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
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (text or token ids); results come in the order of the prompts."""
        items = as_prompt_list(prompts)
        return self._run(items, sampling_params, use_tqdm=use_tqdm, priority=priority, is_chat=False)

    @checks_arguments(RequestError)
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, each a list of messages, through the model's chat template or a given one."""
        options = template_options(chat_template, add_generation_prompt, tools, chat_template_kwargs)
        texts = [self._reader.render(conversation, **options) for conversation in as_conversations(messages)]
        return self._run(texts, sampling_params, use_tqdm=use_tqdm, priority=None, is_chat=True)

    @checks_arguments(RequestError)
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The prompts' hidden states after the final norm: that of the last token, or the mean of all; `normalize`
        makes their length 1."""
        items = as_prompt_list(prompts)
        priorities = _one_each("priority", priority, 0, len(items))

        def ask(index: int, prompt: TokenizedPrompt) -> Pending[EmbeddingRequestOutput]:
            return ask_embedding(str(next(self._ids)), prompt, pooling, normalize=normalize, priority=priorities[index])

        order = prefixes_first(items)
        tokenized = self._tokenized([items[i] for i in order], is_chat=False)
        return self._collect(order, tokenized, ask, use_tqdm=use_tqdm)

    @checks_arguments(RequestError)
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[ScoreRequestOutput]:
        """How likely each continuation is after its prompt; one prompt may have several."""
        heads, tails = as_prompt_list(prompts), as_prompt_list(continuations)
        heads = heads * len(tails) if len(heads) == 1 else heads
        if len(heads) != len(tails):
            raise RequestError(
                f"{len(tails)} continuations for {len(heads)} prompts; give one for each, or one prompt for all",
                param="continuations",
            )
        priorities = _one_each("priority", priority, 0, len(heads))

        def ask(index: int, pair: TokenizedPair) -> Pending[ScoreRequestOutput]:
            return ask_score(str(next(self._ids)), pair, priority=priorities[index])

        pairs = self._reader.read_pairs(heads, tails)
        order = prefixes_first(heads)
        return self._collect(order, (pairs[i] for i in order), ask, use_tqdm=use_tqdm)

    @checks_arguments(RequestError)
    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The beams of the best scores for each prompt; see `headrace.engine.beam_search` for what it costs."""
        read = self._reader.read(as_prompt_list(prompts))
        for index, prompt in enumerate(read):
            if len(prompt.token_ids) + params.max_tokens > self.settings.max_model_len:
                raise RequestError(
                    f"prompt {index}: {len(prompt.token_ids):,} tokens and max_tokens ({params.max_tokens:,}) are more "
                    f"than the context of {self.settings.max_model_len:,}; lower max_tokens",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
        tokens = [tuple(prompt.token_ids.tolist()) for prompt in read]
        outputs = search(tokens, params, self._next_token_of_each, self._engine.eos_token_ids)
        return [self._with_texts(output) for output in outputs]

    def _next_token_of_each(self, beams: list[tuple[int, ...]], params: SamplingParams) -> list[TokenLogprobs]:
        found = []
        for output in self._run(beams, params, use_tqdm=False, priority=None, is_chat=False):
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
        """Empty the prefix cache: what follows finds nothing that came before. For measuring."""
        self._engine.client.forget_prefixes()

    def close(self) -> None:
        self._engine.close()

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
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params, SamplingParams(), len(prompts))
        priorities = _one_each("priority", priority, 0, len(prompts))

        def ask(index: int, prompt: TokenizedPrompt) -> Pending[RequestOutput]:
            own = self._reader.with_tokens(params[index])
            request = Request(str(next(self._ids)), prompt.token_ids, own, priorities[index], watched=bool(own.stop))
            return Answers(request, prompt.text, self._engine.tokenizer, self._engine.eos_token_ids)

        order = starting_order(prompts, params)
        tokenized = self._tokenized([prompts[i] for i in order], is_chat=is_chat)
        return self._collect(
            order, tokenized, ask, num_running=target_concurrency(params, self.settings), use_tqdm=use_tqdm
        )

    def _collect(
        self,
        order: list[int],
        inputs: Iterable[Input],
        ask: Callable[[int, Input], Pending[Output_co]],
        *,
        num_running: int | None = None,
        use_tqdm: bool,
    ) -> list[Output_co]:
        """Submit what `ask` makes of each input, which come in this order, and wait for all; outputs are in place."""
        tracked: dict[str, Pending[Output_co]] = {}
        with self._is_busy, collecting_less_often(), GenerateProgress(len(order), enabled=use_tqdm) as progress:
            self._engine.client.limit_running(num_running)
            try:
                for number, (index, given) in enumerate(zip(order, inputs, strict=True), start=1):
                    self._submit(index, given, ask, tracked)
                    self._take_events(tracked, wait=False)
                    if number % SUBMIT_AT_ONCE == 0:
                        sleep(SUBMIT_PAUSE_S)
                self._wait_for_all(tracked, progress)
            except BaseException:
                self._abandon(tracked)
                raise
            in_order = sorted(zip(order, tracked, strict=True), key=lambda pair: pair[0])
            return [self._outputs.pop(request_id) for _, request_id in in_order]

    def _tokenized(self, prompts: Sequence[Prompt], *, is_chat: bool) -> Iterator[TokenizedPrompt]:
        start, end = 0, TOKENIZE_FIRST
        while start < len(prompts):
            yield from self._reader.read(prompts[start:end], add_special_tokens=not is_chat)
            start, end = end, end + TOKENIZE_AT_ONCE

    def _submit(
        self,
        index: int,
        given: Input,
        ask: Callable[[int, Input], Pending[Output_co]],
        tracked: dict[str, Pending[Output_co]],
    ) -> None:
        try:
            pending = ask(index, given)
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
        """Take in what the engine has sent; how many requests that finished."""
        num_finished = 0
        while wait or not self._events.empty():
            events = self._events.get()
            wait = False
            if self._engine.client.failure is not None:
                raise EngineDeadError(f"the engine has stopped: {self._engine.client.failure}")
            num_finished += sum(self._take(event, tracked) for event in events)
        return num_finished

    def _take(self, event: SequenceEvent, tracked: dict[str, Pending[Output_co]]) -> bool:
        pending = tracked.get(event.request_id)
        if pending is None or pending.is_finished:
            return False
        progress = pending.take(event)
        if progress.stopped_index is not None:
            self._engine.client.abort(event.request_id, progress.stopped_index)
        if progress.is_finished:
            self._outputs[event.request_id] = pending.output()  # now, while the engine works on the others
        return progress.is_finished

    def _abandon(self, tracked: dict[str, Pending[Output_co]]) -> None:
        self._outputs.clear()
        if self._engine.client.failure is None:
            for request_id in tracked:
                self._engine.client.abort(request_id)


def _one_each(name: str, given: Any, default: Any, num_prompts: int) -> list[Any]:
    """A value for every prompt: the same for all, or a list with one for each."""
    if given is None:
        return [default] * num_prompts
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} entries for {num_prompts} prompts", param=name)
    return list(given)
