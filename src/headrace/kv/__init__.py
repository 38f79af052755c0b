"""The KV cache as the scheduler sees it: block numbers, their owners and prefixes. No tensors here.

    blocks      BlockPool: reference counts; free, idle and held blocks; eviction (least recently used first)
    prefixes    PrefixIndex: which block holds which tokens after which prefix
    tables      BlockTables: each sequence's blocks; sharing, growing, copy on write, publishing for reuse
    tiers       Tiers: evicted blocks in host memory (host_tier) and on disk (disk_tier, disk_files), by digest (chain);
                read_rate measures the disk

Automatic prefix caching:
- A full block is keyed by (entry of the block before it, its own tokens). Entries are numbers that are never reused,
  and keys are compared in full: two prompts share a block only if they are equal from the first token on, salt
  included. No hash has to be trusted.
- A block without owners stays findable (idle) until it is needed; a sequence's tail is evicted before its head.
- A prompt that is cached completely recomputes one token, in a copy of the last block if another sequence holds it.

Invariant: free + idle + held = num_blocks.
"""

from __future__ import annotations

from headrace.kv.blocks import BlockPool
from headrace.kv.chain import Chain
from headrace.kv.prefixes import PrefixHit, PrefixIndex, Salt
from headrace.kv.tables import BlockCopy, BlockTable, BlockTables
from headrace.kv.tiers import BlockStore, Fetch, Tiers, TierStats

__all__ = [
    "BlockCopy",
    "BlockPool",
    "BlockStore",
    "BlockTable",
    "BlockTables",
    "Chain",
    "Fetch",
    "PrefixHit",
    "PrefixIndex",
    "Salt",
    "TierStats",
    "Tiers",
]
