"""Which prompts that go on have their contexts brought together, so that a kernel without blocks can read them."""

from __future__ import annotations

import numpy as np

from headrace.steps import IntArray

_STEPS = 8  # as many tokens as so many steps have: less memory than a step's largest activations take
_TILE_ROWS = 128  # queries of one program: of one head where blocks are read, of all heads of a kv head where not
# Measured on an H200, 2026-11-15; other Hoppers have the same proportions. For heads of up to 64, and larger ones:
_READING_BLOCKS = (285e12, 310e12)  # operations a second
_GATHERED = (360e12, 580e12)
_GATHERING = 4e12  # bytes a second
_CLEARLY = 0.95  # less of a gain is not worth a second kernel


def most_gathered(max_num_batched_tokens: int, max_model_len: int) -> int:
    """Tokens that are gathered at once; any context can be."""
    return max(_STEPS * max_num_batched_tokens, max_model_len)


def groups_of(context_lens: IntArray, most: int) -> list[slice]:
    """Consecutive sequences whose contexts have at most `most` tokens together, as many as there can be."""
    groups = []
    ends = np.cumsum(context_lens)
    first = before = 0
    while first < len(ends):
        end = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        groups.append(slice(first, end))
        first, before = end, int(ends[end - 1])
    return groups


def gathering_pays(
    num_tokens: IntArray, context_lens: IntArray, *, num_heads: int, num_kv_heads: int, head_dim: int, cache_bytes: int
) -> bool:
    """Whether prompts that go on with so many tokens after such contexts are computed faster once these are gathered.

    A few tokens waste most of a program that reads blocks, and large heads are slower there; but gathering moves every
    key and value once more, `cache_bytes` and two bytes each.
    """
    is_large = int(head_dim > 64)
    operations = 4 * num_heads * head_dim  # of a token and one of its context
    group = num_heads // num_kv_heads
    with_blocks = operations * (_padded(num_tokens) * context_lens).sum() / _READING_BLOCKS[is_large]
    gathered = operations * (_padded(num_tokens * group) / group * context_lens).sum() / _GATHERED[is_large]
    gathering = 2 * num_kv_heads * head_dim * (cache_bytes + 2) * context_lens.sum() / _GATHERING
    return bool(gathered + gathering < _CLEARLY * with_blocks)


def _padded(num_rows: IntArray) -> IntArray:
    return -(-num_rows // _TILE_ROWS) * _TILE_ROWS
