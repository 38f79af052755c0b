"""The limits of a scheduler, and which requests they refuse."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import CapacityPolicy, QueuePolicy
from headrace.errors import RequestError
from headrace.speculation import Speculation
from headrace.types import Request

CONTEXT_EXCEEDED = "context_length_exceeded"  # the code of an error


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    queue_policy: QueuePolicy = "fcfs"
    capacity_policy: CapacityPolicy = "max_utilization"
    full_step_tokens: int = 1 << 30  # a step of this size takes no chunk of a prompt that does not fit whole
    min_free_slots_to_start: int = (
        1  # start sequences only when this many slots are free: fewer steps then contain prefill
    )
    num_stages: int = 1  # of a pipeline: see `sched/microbatches.py`
    speculation: Speculation | None = None  # see `sched/drafting.py`
    num_host_blocks: int = 0  # places of the host tier (`kv/tiers.py`); 0: evicted blocks are lost
    host_block_bytes: int = 0  # of one place, over all ranks
    # Slots have a state that blocks do not contain: a sequence computes all of its tokens itself, in order.
    has_recurrent_state: bool = False

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs, "every running sequence must fit in one step"
        assert self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len

    @property
    def max_blocks_per_step(self) -> int:
        """New blocks that a step takes at most, roughly."""
        return self.max_num_batched_tokens // self.block_size + self.max_num_seqs

    def shares_prefix(self, request: Request) -> bool:
        """Whether the request reuses cached blocks and leaves its own to others."""
        return not self.has_recurrent_state and (self.enable_prefix_caching or request.shares_blocks)

    def end_len(self, request: Request) -> int:
        """Total length at which the request's sequences end at the latest."""
        if request.readout is not None:
            return len(request.prompt_token_ids) + 1  # as if one token were sampled: the whole prompt is computed
        max_tokens = request.params.max_tokens
        if max_tokens is None:
            return self.max_model_len
        return min(self.max_model_len, len(request.prompt_token_ids) + max_tokens)

    def check(self, request: Request) -> None:
        """Refuse what could never run, whatever else is running."""
        prompt_len = len(request.prompt_token_ids)
        check_prompt_len(prompt_len, self.max_model_len, num_sampled=int(request.readout is None))
        num_needed = -(-(self.end_len(request) - 1) // self.block_size)
        if num_needed > self.num_blocks:
            raise RequestError(
                f"prompt and answer of up to {self.end_len(request):,} tokens need {num_needed:,} cache blocks of "
                f"{self.block_size} tokens, but there are {self.num_blocks:,}; "
                "lower max_tokens or give the KV cache more memory",
                param="max_tokens" if request.readout is None else "prompt",
                code="cache_too_small",
            )


def check_prompt_len(prompt_len: int, max_model_len: int, *, num_sampled: int = 1, param: str = "prompt") -> None:
    """Refuse a prompt that is empty, or that leaves no room in the context for a token to sample."""
    if prompt_len == 0:
        raise RequestError("the prompt has no tokens", param=param, code="empty_prompt")
    if prompt_len + num_sampled > max_model_len:
        more = ", and at least one must follow" if num_sampled else ""
        raise context_error(
            f"your prompt has {prompt_len} tokens{more}. "
            "Please reduce the length of the prompt, or raise max_model_len.",
            max_model_len,
            param=param,
        )


def context_error(problem: str, max_model_len: int, *, param: str) -> RequestError:
    """Begins with OpenAI's and vLLM's words, with plain numbers: clients search for them, and then shorten a prompt."""
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, {problem}",
        param=param,
        code=CONTEXT_EXCEEDED,
    )
