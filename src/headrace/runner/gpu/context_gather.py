"""Which prefill continuations have their contexts gathered out of the blocks, for a kernel that reads no blocks."""

from __future__ import annotations

import numpy as np

from headrace.steps import IntArray

_MAX_STEPS = 8  # gathered tokens, in steps: takes less memory than a step's largest activations
_TILE_ROWS = 128  # queries of one program: of one head if it reads blocks, of all heads of a kv head if gathered
# Measured on an H200, 2026-11-15; other Hoppers have the same proportions. For head_dim <= 64, and larger ones:
_BLOCK_OPS_PER_S = (285e12, 310e12)
_GATHERED_OPS_PER_S = (360e12, 580e12)
_GATHER_BYTES_PER_S = 4e12
_MAX_TIME_SHARE = 0.95  # of the time without gathering; a smaller gain is not worth a second kernel


def max_gathered_tokens(max_num_batched_tokens: int, max_model_len: int) -> int:
    """The largest number of tokens gathered at once; enough for any one context."""
    return max(_MAX_STEPS * max_num_batched_tokens, max_model_len)


def groups_of(context_lens: IntArray, max_tokens: int) -> list[slice]:
    """Group consecutive sequences, each group as large as `max_tokens` of context allow."""
    groups = []
    ends = np.cumsum(context_lens)
    first = before = 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, before + max_tokens, side="right")))
        groups.append(slice(first, end))
        first, before = end, int(ends[end - 1])
    return groups


def is_gather_faster(
    num_tokens: IntArray, context_lens: IntArray, *, num_heads: int, num_kv_heads: int, head_dim: int, cache_bytes: int
) -> bool:
    """Whether prefill continuations of `num_tokens` over `context_lens` are faster with gathered contexts.

    A few tokens waste most of a program that reads blocks, and large heads are slower there. But gathering moves every
    key and value once more: `cache_bytes` read and two bytes written for each element.
    """
    is_large = int(head_dim > 64)
    operations = 4 * num_heads * head_dim  # for a token and one token of its context
    group = num_heads // num_kv_heads
    with_blocks = operations * (_padded(num_tokens) * context_lens).sum() / _BLOCK_OPS_PER_S[is_large]
    gathered = operations * (_padded(num_tokens * group) / group * context_lens).sum() / _GATHERED_OPS_PER_S[is_large]
    gathering = 2 * num_kv_heads * head_dim * (cache_bytes + 2) * context_lens.sum() / _GATHER_BYTES_PER_S
    return bool(gathered + gathering < _MAX_TIME_SHARE * with_blocks)


def _padded(num_rows: IntArray) -> IntArray:
    return -(-num_rows // _TILE_ROWS) * _TILE_ROWS
