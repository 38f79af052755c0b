"""A fake engine: the test decides when tokens, ends and failures are delivered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace.engine.async_engine import AsyncEngine
from headrace.errors import EngineDeadError
from headrace.text import TextSource, load_tokenizer
from headrace.types import FinishReason, Request, SequenceEvent, SequenceTiming


class FakeClient:
    """Records submitted and aborted requests. `send` delivers tokens of a request."""

    def __init__(self, deliver: Callable[[list[SequenceEvent]], None]) -> None:
        self.deliver = deliver
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.failure: BaseException | None = None
        self.stats = None
        self._started: set[str] = set()

    def submit(self, request: Request) -> None:
        if self.failure is not None:
            raise EngineDeadError("the engine has stopped")
        self.requests.append(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append(request_id)

    def send(
        self, text: str, *, reason: FinishReason | None = None, error: str | None = None, number: int = -1
    ) -> None:
        self.send_tokens(self.tokenizer.encode(text, False), reason=reason, error=error, number=number)

    def send_tokens(
        self, tokens: list[int], *, reason: FinishReason | None = None, error: str | None = None, number: int = -1
    ) -> None:
        new = np.array(tokens, np.int32)
        request_id = self.requests[number].request_id
        is_timed = reason is not None or request_id not in self._started
        self._started.add(request_id)
        timing = SequenceTiming(0.0, 0.0) if is_timed else None
        self.deliver([SequenceEvent(request_id, 0, new, reason, error=error, timing=timing)])

    def fail(self) -> None:
        self.failure = RuntimeError("broken in /secret/path")
        self.deliver([])

    def close(self) -> None:
        pass

    tokenizer: Any = None


class FakeEngine:
    """Creates the engine for `serving(start=...)` and keeps its client."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = load_tokenizer(TextSource(directory=directory))
        self.client: FakeClient

    def __call__(self) -> AsyncEngine:
        return AsyncEngine.over(self._start)

    def _start(self, deliver: Callable[[list[SequenceEvent]], None]) -> Any:
        self.client = FakeClient(deliver)
        self.client.tokenizer = self._tokenizer
        return SimpleNamespace(
            client=self.client,
            adapters={},
            settings=SimpleNamespace(max_model_len=512, max_num_seqs=8, queue_policy="fcfs", adapters=None),
            spec=SimpleNamespace(vocab_size=self._tokenizer.vocab_size, pooler=None, is_encoder=False),
            tokenizer=self._tokenizer,
            eos_token_ids=(0,),
            stats=None,
            grammars=None,
            close=lambda: None,
        )
