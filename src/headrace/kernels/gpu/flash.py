"""FlashAttention-3 for prefills, where the package `fa3-fwd` is installed and the GPU is a Hopper.

Fresh prefills use the keys and values of the step itself. This build does not read paged caches: for prefill
continuations the contexts are first gathered from their blocks.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels.gpu.gather_kv import gather_contexts
from headrace.kernels.layout import Gathering, LayerCache, StepLayout

_HEAD_DIMS = (64, 96, 128, 192, 256)
_LONG_CONTEXT = 8192  # tokens; longer contexts may be split by the library, if there are few of them


def takes(q: Tensor, window: int | None, longest: int) -> bool:
    """Tells whether the library can compute this: a window must be at least as long as every context."""
    sees_all = window is None or longest <= window
    return sees_all and is_made_for(q.dtype, q.shape[2], q.device)


def is_made_for(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Tells whether the library supports this type, head size and device."""
    return dtype == torch.bfloat16 and head_dim in _HEAD_DIMS and is_available(device)


@functools.cache
def is_available(device: torch.device | None = None) -> bool:
    """Loads the library; False if it is not installed or does not fit the GPU: the current one, if none is given."""
    package = importlib.util.find_spec("fa3_fwd")
    if package is None or not package.submodule_search_locations:
        return False
    if (device is not None and device.type != "cuda") or torch.cuda.get_device_capability(device) != (9, 0):
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
    """Computes the last `num_fresh` sequences. Their keys and values are beside `q` in one tensor, where
    `rope_and_store` left them."""
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(0) == (num_heads + 2 * num_kv_heads) * head_dim, "the queries are not a view of the step's QKV"
    heads = q.as_strided((num_tokens, num_heads + 2 * num_kv_heads, head_dim), q.stride())
    _, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    starts = layout.query_starts[layout.num_seqs - layout.num_fresh :]
    longest = layout.max_query_len
    _attend(q, keys, values, out, starts, starts, longest, longest, scale, softcap, num_splits=1)


def gathered_attention(
    q: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    gathering: Gathering,
    out: Tensor,
    scale: float,
    softcap: float | None,
) -> None:
    """Computes the prefill continuations of one gathering."""
    keys, values = (x.transpose(0, 1) for x in gather_contexts(cache, layout, gathering, q.dtype))
    starts = layout.query_starts[gathering.first_seq : gathering.first_seq + gathering.starts.shape[0]]
    longest = gathering.longest
    num_splits = 1 if longest < _LONG_CONTEXT else 0
    _attend(
        q, keys, values, out, starts, gathering.starts, layout.max_query_len, longest, scale, softcap,
        num_splits=num_splits,
    )  # fmt: skip


def bidirectional(qkv: Tensor, starts: Tensor, longest: int, num_heads: int, scale: float) -> Tensor:
    """Computes the attention of an encoder: whole texts, `starts` [S + 1] of the packed tokens [T, 3 * H * D]."""
    q, keys, values = qkv.view(qkv.shape[0], 3, num_heads, -1).unbind(1)
    out = torch.empty(q.shape, dtype=qkv.dtype, device=qkv.device)
    _attend(q, keys, values, out, starts, starts, longest, longest, scale, None, num_splits=1, is_causal=False)
    return out.flatten(1)


def _attend(
    q: Tensor,  # [T, Hq, D]
    keys: Tensor,  # [K, Hkv, D]
    values: Tensor,
    out: Tensor,
    query_starts: Tensor,  # [S + 1] int32
    key_starts: Tensor,
    max_query_len: int,
    max_context_len: int,
    scale: float,
    softcap: float | None,
    *,
    num_splits: int,  # per context; 0: the library chooses
    is_causal: bool = True,
) -> None:
    torch.ops.fa3_fwd.fwd(
        q,
        keys,
        values,
        out=out,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_context_len,
        softmax_scale=scale,
        is_causal=is_causal,
        softcap=0.0 if softcap is None else softcap,
        num_splits=num_splits,
    )
