"""The prefix index: which block holds which tokens after which prefix.

A full block is keyed by (entry of the block before it, its own tokens). An entry is a number that is never reused, and
the key is compared in full. Two prompts share a block only when every token from the start of the prompt, and the salt,
is equal: there are no hash collisions to guard against.

With tiers (`tiers.py`) an entry is the digest of the prefix instead (`chain.py`): a name for the block that later
processes find again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.kv.chain import Chain
from headrace.types import TokenIds

Salt = str | tuple[int, str]  # of a request; with the number of its adapter, if it has one
Parent = int | bytes | Salt  # the entry of the block before; for the first block of a prompt, its salt


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix of a prompt, in whole blocks."""

    blocks: tuple[int, ...]
    last_entry: Parent

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A prompt that was looked up, and the blocks that were found."""

    salt: Parent
    data: bytes
    blocks: list[int]
    entries: list[int | bytes]
    held: frozenset[int]  # the same blocks

    def num_common(self, salt: Parent, data: bytes, num_bytes: int) -> int:
        """How many of the found blocks are a prefix of another prompt."""
        if salt != self.salt:
            return 0
        length = min(len(self.blocks) * num_bytes, len(data))
        if data[:length] == self.data[:length]:
            return length // num_bytes
        differs = np.frombuffer(data, np.uint8, length) != np.frombuffer(self.data, np.uint8, length)
        return int(differs.argmax()) // num_bytes


_NOTHING = _Lookup("", b"", [], [], frozenset())


class PrefixIndex:
    """Owns the map from prefixes to blocks. A block is in it at most once."""

    def __init__(self, block_size: int, chain: Chain | None = None) -> None:
        self._num_bytes = block_size * 4  # of one block's int32 tokens
        self._chain = chain  # None: entries are numbers
        self._by_key: dict[tuple[Parent, bytes], tuple[int, int | bytes]] = {}  # -> (block, entry)
        self._key_of: dict[int, tuple[Parent, bytes]] = {}
        self._next_entry = 0
        self._last = _NOTHING  # prompts with the same prefix often come one after the other

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)

    def find(self, token_ids: TokenIds, salt: Salt | None) -> PrefixHit:
        data, first = token_ids.tobytes(), self._first(salt or "")
        num_bytes, by_key = self._num_bytes, self._by_key
        num_common = self._last.num_common(first, data, num_bytes)
        blocks, entries = self._last.blocks[:num_common], self._last.entries[:num_common]
        entry: Parent = entries[-1] if entries else first
        for start in range(num_common * num_bytes, len(data) - num_bytes + 1, num_bytes):
            found = by_key.get((entry, data[start : start + num_bytes]))
            if found is None:
                break
            block, entry = found
            blocks.append(block)
            entries.append(entry)
        self._last = _Lookup(first, data, blocks, entries, frozenset(blocks))
        return PrefixHit(tuple(blocks), entry)

    def register(self, parent: Parent, token_ids: TokenIds, blocks: Sequence[int]) -> Parent:
        """Make consecutive full blocks findable, except those whose key is already registered; returns the entry for
        the key of the next block."""
        data, num_bytes = token_ids.tobytes(), self._num_bytes
        assert len(data) == len(blocks) * num_bytes, f"{len(token_ids)} tokens are not {len(blocks)} blocks"
        parent = self._first(parent)
        for index, block in enumerate(blocks):
            key = (parent, data[index * num_bytes : (index + 1) * num_bytes])
            found = self._by_key.get(key)
            if found is None:
                assert block not in self._key_of, f"block {block} is findable under another prefix"
                found = (block, self._new_entry(*key))
                self._by_key[key] = found
                self._key_of[block] = key
            parent = found[1]
        return parent

    def digest_of(self, block: int) -> bytes:
        """The name of a findable block's prefix. Only with a chain of digests."""
        digest = self._by_key[self._key_of[block]][1]
        assert isinstance(digest, bytes), f"block {block} has no digest"
        return digest

    def _first(self, parent: Parent) -> Parent:
        return self._chain.root(parent) if self._chain is not None and isinstance(parent, str) else parent

    def _new_entry(self, parent: Parent, tokens: bytes) -> int | bytes:
        if self._chain is not None:
            assert isinstance(parent, bytes)
            return self._chain.digest(parent, tokens)
        self._next_entry += 1
        return self._next_entry - 1

    def forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._by_key[key]
            if block in self._last.held:
                self._last = _NOTHING
