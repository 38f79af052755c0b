"""The calls of `LLM` that return embeddings, classes and scores, with vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.arguments import checks_arguments
from headrace.engine.answers import Progress
from headrace.engine.offline_order import longest_first, prefixes_first
from headrace.engine.pooling import (
    ClassificationRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    check_scoring,
    check_task,
    check_truncation,
    pair_scores,
)
from headrace.engine.pooling_prompts import PoolingReader
from headrace.engine.prompts import Prompt, PromptReader, TokenizedPair, TokenizedPrompt, as_prompt_list, text_of
from headrace.engine.readouts import PendingPooling, pooling_request, score_request
from headrace.errors import RequestError
from headrace.models.pooler import PoolerTask
from headrace.types import EmbeddingRequestOutput, Pooling, Request, ScoreRequestOutput, SequenceEvent

if TYPE_CHECKING:
    from headrace.engine.start import Engine

Input = TypeVar("Input")
Output = TypeVar("Output")

READ_AT_ONCE = 256  # prompts; the engine works while the next ones are tokenized


class PoolingCalls(ABC):
    """What `LLM` has beside generation. Owns nothing: the fields are those of `LLM`."""

    _engine: Engine
    _reader: PromptReader
    _ids: Iterator[int]

    @abstractmethod
    def _collect(
        self, order: list[int], inputs: Iterable[Any], build: Callable[[int, Any], Any], *, use_tqdm: bool
    ) -> list[Any]: ...

    @abstractmethod
    def _refuse_long(self, prompts: Sequence[Prompt], noun: str = "prompt") -> None: ...

    @checks_arguments(RequestError)
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embeddings of prompts. An embedding model pools and normalizes as its files say; of a model that
        generates, it is the normalized hidden state of the last token after the final norm.

        `pooling` and `normalize` replace the model's own. `prompt_name`: one of the prompts that sentence-transformers
        puts before a text, such as 'query'.
        """
        params = _params(pooling_params, truncate_prompt_tokens, normalize)
        return self._pool(
            prompts,
            "embed",
            params,
            use_tqdm=use_tqdm,
            priority=priority,
            prompt_name=prompt_name,
            pooling=pooling,
        )

    @checks_arguments(RequestError)
    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probability of each label of a classifier."""
        params = PoolingParams.of(pooling_params)
        return self._pool(prompts, "classify", params, use_tqdm=use_tqdm, priority=priority)

    @checks_arguments(RequestError)
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return what the model pools: embeddings or the outputs of a classifier, by `pooling_task` or the model's."""
        params = _params(pooling_params, truncate_prompt_tokens, None)
        task = pooling_task or params.task or self._own_task
        check_task(self._engine.spec.pooler, task)
        known: PoolerTask = "classify" if task == "classify" else "embed"
        return self._pool(prompts, known, params, use_tqdm=use_tqdm, priority=priority, output=_pooled_output)

    @checks_arguments(RequestError)
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[ScoreRequestOutput] | list[ScoringRequestOutput]:
        """Score pairs of a first and a second text; one first text may have several second ones.

        A reranker or an embedding model returns how relevant the second text is for the first, as in vLLM. A model that
        generates returns the log-probability of the second text as a continuation of the first.
        """
        heads, tails = as_prompt_list(prompts), as_prompt_list(continuations)
        if len(heads) != len(tails) and len(heads) != 1:
            noun, other = (
                ("continuations", "prompts") if self._engine.spec.pooler is None else ("second", "first texts")
            )
            raise RequestError(
                f"{len(tails)} {noun} for {len(heads)} {other}; give one per prompt, or a single prompt for all",
                param="continuations",
            )
        if self._engine.spec.pooler is not None:
            params = _params(pooling_params, truncate_prompt_tokens, None)
            return self._score_pairs(heads, tails, params, use_tqdm=use_tqdm, priority=priority)
        if truncate_prompt_tokens is not None or pooling_params is not None:
            raise RequestError(
                "truncate_prompt_tokens and pooling_params are for pooling models", param="pooling_params"
            )
        return self._score_continuations(heads, tails, use_tqdm=use_tqdm, priority=priority)

    def _score_continuations(
        self, heads: list[Prompt], tails: list[Prompt], *, use_tqdm: bool, priority: Sequence[int] | None
    ) -> list[ScoreRequestOutput]:
        self._refuse_long(heads)
        self._refuse_long(tails, "continuation")
        heads = heads * len(tails) if len(heads) == 1 else heads
        priorities = per_prompt("priority", priority, 0, len(heads))

        def build(index: int, pair: TokenizedPair) -> Any:
            return score_request(str(next(self._ids)), pair, priority=priorities[index])

        pairs = self._reader.read_pairs(heads, tails)
        order = prefixes_first(heads)
        return self._collect(order, (pairs[i] for i in order), build, use_tqdm=use_tqdm)

    def _score_pairs(
        self,
        heads: list[Prompt],
        tails: list[Prompt],
        params: PoolingParams,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[ScoringRequestOutput]:
        check_scoring(self._engine.spec.pooler)
        if not tails:
            return []
        texts = [[_text("prompts", each) for each in heads], [_text("continuations", each) for each in tails]]
        pairs = self._pooling_reader.read_pairs(*texts, truncate=params.truncate_prompt_tokens)
        # Embeddings of both texts are normalized, so that their product is the cosine.
        wanted = params if pairs.num_first is None else replace(params, use_activation=True)
        each = per_prompt("priority", priority, 0, len(tails))
        priorities = [*[min(each)] * (pairs.num_first or 0), *each]
        order = list(range(len(priorities)))
        pooled: list[PoolingRequestOutput] = self._collect_pooled(
            order, pairs.prompts, self._own_task, wanted, priorities, use_tqdm=use_tqdm, output=_pooled_output
        )
        scores = pair_scores([one.outputs.data for one in pooled], pairs.num_first)
        return [
            ScoringRequestOutput(one.request_id, ScoringOutput(score), one.prompt_token_ids)
            for one, score in zip(pooled[-len(scores) :], scores, strict=True)
        ]

    @property
    def _own_task(self) -> PoolerTask:
        return "embed" if self._engine.spec.pooler is None else self._engine.spec.pooler.task

    @property
    def _pooling_reader(self) -> PoolingReader:
        return PoolingReader(self._reader, self._engine.spec.pooler)

    def _pool(
        self,
        prompts: Prompt | Sequence[Prompt],
        task: PoolerTask,
        params: PoolingParams,
        *,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        prompt_name: str | None = None,
        pooling: Pooling | None = None,
        output: Callable[[PendingPooling], Any] | None = None,
    ) -> list[Any]:
        items = as_prompt_list(prompts)
        check_task(self._engine.spec.pooler, task)
        if params.truncate_prompt_tokens is None:
            self._refuse_long(items)
        priorities = per_prompt("priority", priority, 0, len(items))
        order = longest_first(items) if self._engine.spec.is_encoder else prefixes_first(items)
        reader, limit = self._pooling_reader, params.truncate_prompt_tokens
        read = (
            prompt
            for start in range(0, len(order), READ_AT_ONCE)
            for prompt in reader.read(
                [items[i] for i in order[start : start + READ_AT_ONCE]], prompt_name=prompt_name, truncate=limit
            )
        )
        return self._collect_pooled(
            order, read, task, params, priorities, use_tqdm=use_tqdm, pooling=pooling, output=output
        )

    def _collect_pooled(
        self,
        order: list[int],
        prompts: Iterable[TokenizedPrompt],
        task: PoolerTask,
        params: PoolingParams,
        priorities: Sequence[int],
        *,
        use_tqdm: bool,
        pooling: Pooling | None = None,
        output: Callable[[PendingPooling], Any] | None = None,
    ) -> list[Any]:
        """`output` makes another output of a request than its own."""
        spec = self._engine.spec

        def build(index: int, prompt: TokenizedPrompt) -> Any:
            pending = pooling_request(
                str(next(self._ids)),
                prompt,
                spec,
                task=task,
                pooling=pooling,
                use_activation=params.use_activation,
                dimensions=params.dimensions,
                priority=priorities[index],
            )
            return pending if output is None else _WithOutput(pending, output)

        return self._collect(order, prompts, build, use_tqdm=use_tqdm)


@dataclass(frozen=True, slots=True)
class _WithOutput:
    """A request with another output than its own; see `llm.Pending`."""

    pending: PendingPooling
    make_output: Callable[[PendingPooling], Any]

    @property
    def request(self) -> Request:
        return self.pending.request

    @property
    def is_finished(self) -> bool:
        return self.pending.is_finished

    def take(self, event: SequenceEvent) -> Progress:
        return self.pending.take(event)

    def output(self) -> Any:
        return self.make_output(self.pending)


def _pooled_output(pending: PendingPooling) -> PoolingRequestOutput:
    return PoolingRequestOutput(
        pending.request.request_id,
        PoolingOutput(pending.pooled()),
        tuple(pending.request.prompt_token_ids.tolist()),
        num_cached_tokens=pending.num_cached_tokens,
    )


def _params(given: object, truncate: int | None, normalize: bool | None) -> PoolingParams:
    params = PoolingParams.of(given)
    check_truncation(truncate)
    if truncate is not None:
        params = replace(params, truncate_prompt_tokens=truncate)
    return params if normalize is None else replace(params, use_activation=normalize)


def _text(param: str, prompt: Prompt) -> str:
    text = text_of(prompt)
    if text is None:
        raise RequestError(f"{param} of a pooling model must be text: a pair is tokenized together", param=param)
    return text


def per_prompt(name: str, given: Any, default: Any, num_prompts: int) -> list[Any]:
    """Return one value per prompt, from a single value or a list."""
    if given is None:
        return [default] * num_prompts
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise RequestError(f"{name} has {len(given)} entries for {num_prompts} prompts", param=name)
    return list(given)
