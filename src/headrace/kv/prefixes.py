"""Which block holds which tokens after which prefix.

A full block is keyed by (the entry before it, its own tokens), and the entry before it by a number that is
never used twice. The key is compared in full, so two prompts meet in one block only when every token from the
start of the prompt (and the salt) is equal: there is no collision to guard against.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.types import TokenIds

Parent = int | str  # the entry before this block; for the first block of a prompt, its salt


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached beginning of a prompt, in whole blocks."""

    blocks: tuple[int, ...]
    last_entry: Parent

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)


class PrefixIndex:
    """Owns the map from prefixes to blocks. A block is in it at most once."""

    def __init__(self, block_size: int) -> None:
        self._num_bytes = block_size * 4  # of one block's int32 tokens
        self._by_key: dict[tuple[Parent, bytes], tuple[int, int]] = {}  # -> (block, entry)
        self._key_of: dict[int, tuple[Parent, bytes]] = {}
        self._next_entry = 0

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def __len__(self) -> int:
        return len(self._key_of)

    def find(self, token_ids: TokenIds, salt: str | None) -> PrefixHit:
        data = token_ids.tobytes()
        entry: Parent = salt or ""
        blocks = []
        for start in range(0, len(data) - self._num_bytes + 1, self._num_bytes):
            found = self._by_key.get((entry, data[start : start + self._num_bytes]))
            if found is None:
                break
            block, entry = found
            blocks.append(block)
        return PrefixHit(tuple(blocks), entry)

    def register(self, parent: Parent, token_ids: TokenIds, block: int) -> int:
        """Make a full block findable, unless an equal one is already; the entry for the next block's key."""
        key = (parent, token_ids.tobytes())
        found = self._by_key.get(key)
        if found is not None:
            return found[1]
        assert block not in self._key_of, f"block {block} is findable under another prefix"
        entry = self._next_entry
        self._next_entry += 1
        self._by_key[key] = (block, entry)
        self._key_of[block] = key
        return entry

    def forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._by_key[key]
