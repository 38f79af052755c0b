"""The calls of `AsyncEngine` that return embeddings and scores."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.arguments import checks_arguments
from headrace.engine.pooling_prompts import PoolingReader
from headrace.engine.prompts import Prompt, PromptReader, TokenizedPrompt
from headrace.engine.readout_stream import ReadoutStream
from headrace.engine.readouts import PendingEmbedding, PendingPooling, PendingReadout, pooling_request, score_request
from headrace.errors import FailedRequestError, RequestError
from headrace.models.pooler import PoolerTask
from headrace.types import EmbeddingRequestOutput, Pooling, ScoreRequestOutput

if TYPE_CHECKING:
    from headrace.engine.start import Engine


class AsyncPoolingCalls(ABC):
    """What `AsyncEngine` has beside generation. Owns nothing: the fields are those of `AsyncEngine`."""

    _engine: Engine
    _reader: PromptReader
    pooling_reader: PoolingReader

    @abstractmethod
    def _new_id(self, request_id: str | None) -> str: ...

    @abstractmethod
    def open_readouts(self, pending: Sequence[PendingReadout]) -> ReadoutStream: ...

    def prepare_pooling(
        self,
        prompt: TokenizedPrompt,
        request_id: str | None = None,
        *,
        task: PoolerTask = "embed",
        pooling: Pooling | None = None,
        use_activation: bool | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> PendingPooling:
        """Build a request for an embedding or a classification without submitting it."""
        return pooling_request(
            self._new_id(request_id),
            prompt,
            self._engine.spec,
            task=task,
            pooling=pooling,
            use_activation=use_activation,
            dimensions=dimensions,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )

    @checks_arguments(RequestError)
    async def embed(
        self,
        prompt: Prompt,
        request_id: str | None = None,
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the prompt's embedding; see `LLM.embed`."""
        (tokenized,) = await asyncio.to_thread(self.pooling_reader.read, [prompt])
        pending = self.prepare_pooling(
            tokenized, request_id, pooling=pooling, use_activation=normalize, priority=priority, cache_salt=cache_salt
        )
        await self._read_out(pending)
        assert isinstance(pending, PendingEmbedding)
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
        """Return the log-probability of the continuation after the prompt."""
        (pair,) = await asyncio.to_thread(self._reader.read_pairs, [prompt], [continuation])
        pending = score_request(self._new_id(request_id), pair, priority=priority, cache_salt=cache_salt)
        await self._read_out(pending)
        return pending.output()

    async def _read_out(self, pending: PendingReadout) -> None:
        with self.open_readouts([pending]) as stream:
            try:
                await stream.wait()
            except FailedRequestError as error:
                raise RequestError(str(error)) from None
