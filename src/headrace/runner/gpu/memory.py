"""Measures the GPU memory of a step beside weights and KV cache, by running the largest one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headrace.kernels import ops
from headrace.kernels.layout import Gathering, StepLayout
from headrace.models.decoder import Decoder
from headrace.runner.gpu.context_gather import max_gathered_tokens
from headrace.runner.gpu.tiles import tiles_of
from headrace.startup import mark

_BLOCK_SIZE = 16


@torch.inference_mode()
def measure_step(
    decoder: Decoder, *, num_tokens: int, num_seqs: int, kv_dtype: torch.dtype, uses_flash: bool = True
) -> int:
    """Peak bytes of a step of `num_tokens` that samples for `num_seqs`, on top of what is allocated now. `uses_flash`:
    contexts are gathered for FlashAttention-3, where it runs."""
    device = decoder.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    layout, caches = one_prompt_step(decoder, num_tokens, kv_dtype)
    layout = layout if uses_flash else replace(layout, gatherings=())
    hidden = decoder.hidden(torch.zeros(num_tokens, dtype=torch.int32, device=device), layout, caches)
    del layout, caches
    mark("largest step launched")
    last = hidden  # of a stage without a head, or of a pooling model
    for _ in range(0 if decoder.head is None else 2):  # a graph keeps logits of its own
        last = decoder.logits(hidden[:1].expand(num_seqs, -1).contiguous())
    torch.cuda.synchronize(device)
    mark("largest step run")
    peak = torch.cuda.max_memory_allocated(device) - before + last.nbytes
    del hidden, last
    torch.cuda.empty_cache()
    return peak


def reserve(num_bytes: int, device: torch.device) -> None:
    """Let PyTorch's allocator take the memory of steps and keep it: no step waits for the driver, and no other process
    can take it."""
    torch.empty(num_bytes, dtype=torch.uint8, device=device)


def release(device: torch.device) -> None:
    """Return the memory of a closed runner to the driver. PyTorch also keeps a GEMM workspace for each stream; without
    it, the next step that is measured needs as much as the first."""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def one_prompt_step(
    decoder: Decoder, num_tokens: int, kv_dtype: torch.dtype
) -> tuple[StepLayout, list[ops.LayerCache]]:
    """A step of one prompt, whose layers share one small cache, with room to gather the longest contexts."""
    spec, device = decoder.spec, decoder.device
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    cache = decoder.allocate_cache(num_blocks, _BLOCK_SIZE, kv_dtype)
    places = torch.arange(num_tokens, device=device)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
    layout = StepLayout(
        positions=places % decoder.max_len,  # a step may have more tokens, of several prompts
        slot_mapping=places,
        query_starts=starts,
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        slots=torch.zeros(1, dtype=torch.int32, device=device),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
        max_query_len=num_tokens,
        max_context_len=num_tokens,
        tiles=torch.from_numpy(tiles_of(np.array([num_tokens]), 0)[0]).to(device, torch.int32),
        gatherings=(Gathering(0, starts, max_gathered_tokens(num_tokens, decoder.max_len), num_tokens),),
    )
    return layout, [decoder.with_state(cache, layer, 1) for layer in range(spec.num_cache_layers)]
