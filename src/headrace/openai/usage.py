"""The token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.types import RequestOutput

_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
_REASONING = b',"completion_tokens_details":{"reasoning_tokens":%d}}'


def usage_json(num_prompt: int, num_generated: int, num_cached: int, num_reasoning: int | None = None) -> bytes:
    """`num_reasoning`: None if the model has no reasoning that is told apart."""
    usage = _USAGE % (num_prompt, num_generated, num_prompt + num_generated, num_cached)
    return usage if num_reasoning is None else usage[:-1] + _REASONING % num_reasoning


@dataclass(slots=True)
class Usage:
    """The tokens of one request so far."""

    num_prompt: int
    num_generated: int = 0
    num_cached: int = 0
    num_reasoning: int | None = None  # None: not told apart

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Usage:
        return cls(
            sum(len(output.prompt_array) for output in outputs),
            sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
            sum(output.num_cached_tokens for output in outputs),
        )

    def to_json(self) -> bytes:
        return usage_json(self.num_prompt, self.num_generated, self.num_cached, self.num_reasoning)
