"""The KV cache as the scheduler sees it: block numbers, owners and prefixes. No tensors here."""

from __future__ import annotations

from headrace.kv.blocks import BlockPool
from headrace.kv.prefixes import PrefixHit, PrefixIndex
from headrace.kv.tables import BlockCopy, BlockTable, BlockTables

__all__ = ["BlockCopy", "BlockPool", "BlockTable", "BlockTables", "PrefixHit", "PrefixIndex"]
