"""Warnings about settings that an engine runs with and that are probably mistakes. A part of `resolve`."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.choices import Warn
from headrace.engine.memory_budget import CPU_MEMORY_SHARE, GIB, GPU_MEMORY_SHARE
from headrace.engine.precision import BYTES_OF
from headrace.hardware import MachineFacts
from headrace.models.spec import ModelSpec

# A sequence is hardly ever shorter. If the KV cache held fewer of these than there are slots, most would be preempted.
MIN_SEQ_TOKENS = 64
MAX_MEMORY_SHARE = 0.95  # above it, a warning: peaks that were not measured, and other processes, need memory too
MAX_SLOT_SHARE = 0.1  # of the memory that may be used, for logits and tables of all slots; above it, a warning
CPU_MIN_BLOCK_SIZE = 8  # tokens in a vector of a CPU without AVX-512; keys in smaller blocks are copied before use


def warn_about_block_size(config: EngineConfig, warn: Warn, *, on_gpu: bool) -> None:
    size = config.block_size
    if size < CPU_MIN_BLOCK_SIZE and not on_gpu:
        warn(
            f"block_size={size} is less than the {CPU_MIN_BLOCK_SIZE} keys that a CPU reads at once: attention "
            "copies them first; 16 is the default"
        )


def warn_about_memory_share(config: EngineConfig, facts: MachineFacts, warn: Warn, *, on_gpu: bool) -> None:
    share, gpu = config.gpu_memory_utilization, facts.gpu
    if share is None:
        return
    for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
        if getattr(config, name) is not None:
            warn(
                f"gpu_memory_utilization={share:g} has no effect: {name} sets the size of the KV cache; leave out "
                "one of them"
            )
            return
    if share <= MAX_MEMORY_SHARE:
        return
    if on_gpu and gpu is not None:
        left, default = (1 - share) * gpu.total_memory, GPU_MEMORY_SHARE
        needs = f"of {gpu.total_memory / GIB:.1f} GiB for the CUDA context, fragments and peaks that were not measured"
    else:
        left, default = (1 - share) * facts.free_memory, CPU_MEMORY_SHARE
        needs = f"of {facts.free_memory / GIB:.1f} GiB free memory for everything else on this machine"
    warn(
        f"gpu_memory_utilization={share:g} leaves {left / GIB:.1f} GiB {needs}; a step that needs more ends "
        f"all requests; lower it to {MAX_MEMORY_SHARE:g} or less (default: {default:g})"
    )


def warn_about_slots(
    spec: ModelSpec,
    warn: Warn,
    *,
    max_num_seqs: int,
    cache_tokens: int,
    max_model_len: int,
    block_size: int,
    dtype: str,
    allowed_bytes: int,
) -> None:
    """About slots that the KV cache cannot fill, or whose own memory is large."""
    in_cache = cache_tokens // MIN_SEQ_TOKENS
    if max_num_seqs > max(1, in_cache):
        warn(
            f"max_num_seqs={max_num_seqs:,} is more than the KV cache holds: {in_cache:,} sequences of "
            f"{MIN_SEQ_TOKENS} tokens; the others wait or are preempted; set {max(1, in_cache):,} or less, or a "
            "larger cache"
        )
    # Two sets of logits, one row of token ids, and block numbers.
    each = 2 * BYTES_OF[dtype] * spec.vocab_size + 4 * max_model_len + 4 * max_model_len // block_size
    if max_num_seqs * each > MAX_SLOT_SHARE * allowed_bytes:
        warn(
            f"max_num_seqs={max_num_seqs:,} takes {max_num_seqs * each / GIB:.1f} GiB for logits and tables of its "
            f"slots, {max_num_seqs * each / allowed_bytes:.0%} of the memory that may be used; lower it, or "
            "max_model_len"
        )
