"""FlashAttention-3 for prompts that begin in this step, whose keys and values need not be read back from the cache.

Used where the package `fa3-fwd` is installed and the GPU is a Hopper.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels.layout import StepLayout

_HEAD_DIMS = (64, 96, 128, 192, 256)


def takes(q: Tensor, window: int | None, max_query_len: int) -> bool:
    """A window that a prompt from its beginning on does not outgrow hides nothing."""
    sees_all = window is None or max_query_len <= window
    return sees_all and q.dtype == torch.bfloat16 and q.shape[2] in _HEAD_DIMS and is_available(q.device)


@functools.cache
def is_available(device: torch.device) -> bool:
    package = importlib.util.find_spec("fa3_fwd")
    if package is None or not package.submodule_search_locations:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    libraries = [path for place in package.submodule_search_locations for path in Path(place).glob("_C*.so")]
    if not libraries:
        return False
    try:
        torch.ops.load_library(str(libraries[0]))
    except OSError:  # built for another CUDA
        return False
    return True


def fresh_attention(
    q: Tensor, num_kv_heads: int, layout: StepLayout, out: Tensor, scale: float, softcap: float | None
) -> None:
    """The last `num_fresh` sequences, whose keys and values stand beside `q` in one tensor, as `rope_and_store` left
    them."""
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(0) == (num_heads + 2 * num_kv_heads) * head_dim, "the queries are no part of a step's QKV"
    heads = q.as_strided((num_tokens, num_heads + 2 * num_kv_heads, head_dim), q.stride())
    _, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    starts = layout.query_starts[layout.num_seqs - layout.num_fresh :]
    torch.ops.fa3_fwd.fwd(
        q,
        keys,
        values,
        out=out,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=layout.max_query_len,
        max_seqlen_k=layout.max_query_len,
        softmax_scale=scale,
        is_causal=True,
        softcap=0.0 if softcap is None else softcap,
        num_splits=1,
    )
