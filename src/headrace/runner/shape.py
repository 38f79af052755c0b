"""The sizes that a runner is built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerShape:
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int
    num_threads: int
    max_num_batched_tokens: int = 0
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: that of the activations
    uses_flash: bool = True  # FlashAttention-3 for prefills, on a GPU where it runs
    max_draft_seqs: int = 0  # of a step that verifies drafts; 0: none does
    max_draft_rows: int = 0  # the same in rows
    step_bytes: int = 0  # memory of a step beside weights and KV cache; reserved at start on a GPU
