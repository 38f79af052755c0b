"""How a line is answered: each input format has a reply that writes its output lines."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from time import time
from typing import Any, Protocol

import msgspec

from headrace.errors import RequestError
from headrace.text import Tokenizer
from headrace.types import RequestOutput

ENGINE_ERROR = "engine_error"  # the code of a failure that is not the request's fault
EXPIRED = "batch_expired"  # of a line that was not answered by the job's deadline
POISON = "poison_request"  # and of one with which the engine dies


@dataclass(frozen=True)
class JobFacts:
    """What replies say of the job itself."""

    model_name: str
    tokenizer: Tokenizer | None
    job_id: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def id_of(self, kind: str, index: int) -> str:
        """Unique among all jobs, as clients expect of ids."""
        return f"{kind}{self.job_id}-{index}"

    def now(self) -> int:
        return int(time())


class Reply(Protocol):
    """Made from a line, kept until its answer comes; gives the object that becomes the output line."""

    @property
    def index(self) -> int: ...

    def answer(self, output: RequestOutput, facts: JobFacts) -> dict[str, Any]: ...

    def error(self, error: RequestError, facts: JobFacts) -> dict[str, Any]: ...


class UnknownReply(msgspec.Struct, frozen=True, gc=False):
    """For a line whose format cannot be told; readers of either format find their own keys."""

    index: int

    def answer(self, output: RequestOutput, facts: JobFacts) -> dict[str, Any]:
        raise AssertionError("a line without a format has no answer")

    def error(self, error: RequestError, facts: JobFacts) -> dict[str, Any]:
        return {
            "index": self.index,
            "line": self.index + 1,
            "id": facts.id_of("batch_req_", self.index),
            "custom_id": None,
            "response": None,
            "error": error_body(error, self.index),
        }


def error_body(error: RequestError, index: int) -> dict[str, Any]:
    return {"code": error.code, "message": message_of(error, index), "param": error.param}


def message_of(error: RequestError, index: int) -> str:
    return f"line {index + 1}: {error}"


def usage(output: RequestOutput) -> dict[str, Any]:
    num_read, num_generated = len(output.prompt_token_ids), 0
    for answer in output.outputs:
        num_generated += len(answer.token_ids)
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_generated,
        "total_tokens": num_read + num_generated,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
