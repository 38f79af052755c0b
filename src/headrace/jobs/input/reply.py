"""How a line is answered: each input format has a reply that writes its output lines."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any, Protocol

import msgspec

from headrace.errors import RequestError
from headrace.jobs.input.line_output import LineOutput
from headrace.text import Tokenizer

ENGINE_ERROR = "engine_error"  # the code of a failure that is not the request's fault
EXPIRED = "batch_expired"  # of a line that was not answered by the job's deadline
POISON = "poison_request"  # and of one with which the engine dies

_USAGE = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'


@dataclass(frozen=True)
class JobFacts:
    """What replies say of the job itself."""

    model_name: str
    tokenizer: Tokenizer | None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def id_of(self, kind: str, index: int) -> str:
        """Unique among all jobs, as clients expect of ids."""
        return f"{kind}{self.job_id}-{index}"

    @cached_property
    def job_id_text(self) -> bytes:
        """As it stands within a JSON text."""
        return encode(self.job_id)[1:-1]

    @cached_property
    def model_name_text(self) -> bytes:
        """As a JSON text."""
        return encode(self.model_name)

    def now(self) -> int:
        return int(time())


_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class Reply(Protocol):
    """Made from a line, kept until its answer comes; gives the output line as JSON, without its line break."""

    @property
    def index(self) -> int: ...

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes: ...

    def error(self, error: RequestError, facts: JobFacts) -> bytes: ...


class UnknownReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """For a line whose format cannot be told; readers of either format find their own keys."""

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


def usage(output: LineOutput) -> bytes:
    num_read, num_generated = output.num_prompt_tokens, output.num_generated_tokens
    return _USAGE % (num_read, num_generated, num_read + num_generated, output.num_cached_tokens)
