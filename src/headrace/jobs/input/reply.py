"""Replies: each input format has one, which writes its output lines."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any, Protocol

import msgspec

from headrace.errors import RequestError
from headrace.jobs.input.line_output import LineOutput
from headrace.openai.choices import encode
from headrace.openai.errors import ENGINE_ERROR
from headrace.openai.usage import usage_json
from headrace.text import Tokenizer

__all__ = [
    "ENGINE_ERROR",
    "EXPIRED",
    "POISON",
    "JobFacts",
    "Reply",
    "UnknownReply",
    "encode",
    "error_body",
    "message_of",
    "usage",
]

EXPIRED = "batch_expired"  # code of a line that was not answered by the job's deadline
POISON = "poison_request"  # code of a line that makes the engine fail


@dataclass(frozen=True)
class JobFacts:
    """What output lines say about the job."""

    model_name: str
    tokenizer: Tokenizer | None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def id_of(self, kind: str, index: int) -> str:
        """Unique among all jobs, as clients expect of ids."""
        return f"{kind}{self.job_id}-{index}"

    @cached_property
    def job_id_text(self) -> bytes:
        """The job id as JSON, without quotes."""
        return encode(self.job_id)[1:-1]

    @cached_property
    def model_name_text(self) -> bytes:
        """The model name as JSON."""
        return encode(self.model_name)

    def now(self) -> int:
        return int(time())


class Reply(Protocol):
    """Made from an input line and kept until its answer is there. Writes the output line as JSON, without its end."""

    @property
    def index(self) -> int: ...

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes: ...

    def error(self, error: RequestError, facts: JobFacts) -> bytes: ...


class UnknownReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """The reply to a line of unknown format. It has the keys of both formats."""

    index: int

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes:
        raise AssertionError("a line without a format has no answer")

    def error(self, error: RequestError, facts: JobFacts) -> bytes:
        return encode(
            {
                "index": self.index,
                "line": self.index + 1,
                "id": facts.id_of("batch_req_", self.index),
                "custom_id": None,
                "response": None,
                "error": error_body(error, self.index),
            }
        )


def error_body(error: RequestError, index: int) -> dict[str, Any]:
    return {"code": error.code, "message": message_of(error, index), "param": error.param}


def message_of(error: RequestError, index: int) -> str:
    return f"line {index + 1}: {error}"


def usage(output: LineOutput, num_reasoning: int | None = None) -> bytes:
    return usage_json(output.num_prompt_tokens, output.num_generated_tokens, output.num_cached_tokens, num_reasoning)
