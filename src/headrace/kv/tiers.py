"""Tiers below the KV cache: evicted blocks in host memory and on disk, from where later prompts get them back.

    pool ──store──▶ host tier ──write──▶ disk          blocks that are about to be evicted
    pool ◀──load─── host tier ◀──fetch── disk          blocks of a prompt that starts

Copies between pool and host belong to the plan of a step (`steps.BlockTransfers`), so their order is that of the plans:
the scheduler knows what is where without asking the device. Copies between host and disk run on threads of the
`BlockStore`; a place stays pinned meanwhile.

Invariants:
- A block is copied out before the step that overwrites it, and its content was computed by earlier steps.
- Within a step a place of the host is read or written, not both, and written once.
- What the host holds need not be copied again when it is evicted again: the tier keeps what it gave back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

import numpy as np

from headrace.kv.chain import Chain
from headrace.kv.host_tier import HostTier
from headrace.steps import BlockTransfers

MAX_PINNED_SHARE = 0.5  # of the host tier: that the disk reads and writes at the same time

Side = Literal["read", "written"]


class Finished(NamedTuple):
    """A file was read into, or written from, a place of the host."""

    side: Side
    digest: bytes
    is_good: bool


class BlockStore(Protocol):
    """Blocks outside of this process, by digest. `write` and `read` return at once; both wait for the copies of `step`
    before they touch the place."""

    def __contains__(self, digest: bytes) -> bool: ...

    def write(self, digest: bytes, place: int, step: int) -> bool:
        """Returns False if the queue is full: the block is not written."""
        ...

    def read(self, digest: bytes, place: int, step: int) -> None: ...

    def finished(self) -> Sequence[Finished]:
        """What has ended since the last call."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something has ended."""
        ...

    def clear(self) -> None: ...


@dataclass(slots=True)
class TierStats:
    """Counters since the start, in blocks. Owned by `Tiers`; others take a copy."""

    num_stored: int = 0  # copied to the host
    num_loaded: int = 0  # copied back
    num_disk_hits: int = 0  # of the loaded ones, those that came from the disk
    num_written: int = 0  # to the disk
    num_read: int = 0  # from the disk
    num_dropped: int = 0  # evicted and not stored: all places were in use
    num_unwritten: int = 0  # stored and not written to the disk: its queue was full, or the disk
    num_unreadable: int = 0  # expected on the disk, and missing or damaged

    def __add__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one prompt that come from the disk."""

    deadline: float  # the prompt does not wait longer
    pending: set[bytes] = field(default_factory=set)

    def is_over(self, now: float) -> bool:
        return not self.pending or now >= self.deadline


@dataclass(slots=True)
class _Planned:
    """Copies of the step in planning."""

    out_blocks: list[int] = field(default_factory=list)
    out_places: list[int] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    in_places: list[int] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    is_urgent: bool = False


class Tiers:
    """Owns the host tier and the copies of the step in planning. One thread."""

    def __init__(self, num_places: int, chain: Chain, store: BlockStore | None = None) -> None:
        self.chain = chain
        self.store_below = store
        self._host = HostTier(num_places)
        self._planned = _Planned()
        self._stats = TierStats()
        self._fetches: dict[bytes, list[Fetch]] = {}  # that wait for a block, by its digest
        self._from_disk: set[bytes] = set()  # stored on the host by a fetch, and not used yet
        self._forgotten: set[bytes] = set()  # while the disk reads or writes them
        self._max_pinned = max(1, int(num_places * MAX_PINNED_SHARE))

    @property
    def stats(self) -> TierStats:
        return replace(self._stats)

    @property
    def num_places_used(self) -> int:
        return self._host.num_stored

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    # ---- copies out

    def store(self, block: int, digest: bytes, *, is_urgent: bool = False) -> None:
        """Copy a block to the host, unless it is there. `is_urgent`: the step in planning may overwrite it."""
        if self._host.use(digest) is not None:
            return
        place = self._host.take(digest)
        if place is None:
            self._stats.num_dropped += 1
            return
        self._host.occupy(place)
        self._stats.num_stored += 1
        planned = self._planned
        planned.out_blocks.append(block)
        planned.out_places.append(place)
        planned.stored.append(digest)
        planned.is_urgent |= is_urgent

    @property
    def num_to_save(self) -> int:
        """Blocks that can be stored at once and all go to the disk."""
        return self._max_pinned - self._host.num_pinned

    # ---- copies in

    def find(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of these blocks, from the first on, that are on the host and complete."""
        return list(takewhile(lambda digest: digest in self._host and digest not in self._fetches, digests))

    def reserve(self, digests: Sequence[bytes]) -> list[int]:
        """The places of blocks that `find` has found: the step in planning reads them, and reuses none of them."""
        places = [self._place_of(digest) for digest in digests]
        for place in places:
            self._host.occupy(place)
        return places

    def _place_of(self, digest: bytes) -> int:
        place = self._host.use(digest)
        assert place is not None, "reserved without being found"
        return place

    def load(self, digests: Sequence[bytes], places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy reserved blocks into blocks of the pool."""
        self._planned.in_places += places
        self._planned.in_blocks += blocks
        for digest in digests:
            self._stats.num_disk_hits += digest in self._from_disk
            self._from_disk.discard(digest)
        self._stats.num_loaded += len(blocks)

    def needs_now(self) -> None:
        """The step in planning computes with blocks that it copies in."""
        self._planned.is_urgent = True

    def take_transfers(self, step: int) -> BlockTransfers | None:
        """The copies of the step that was planned. The next one begins."""
        planned = self._planned
        if not planned.out_blocks and not planned.in_blocks:
            return None
        self._planned = _Planned()
        self._host.end_step(step)
        if self.store_below is not None:
            self._write_below(planned, step)
        return BlockTransfers(
            out_blocks=np.array(planned.out_blocks, np.int64),
            out_places=np.array(planned.out_places, np.int64),
            in_places=np.array(planned.in_places, np.int64),
            in_blocks=np.array(planned.in_blocks, np.int64),
            is_urgent=planned.is_urgent,
        )

    # ---- the disk

    def fetch(self, digests: Iterable[bytes], *, deadline: float) -> Fetch:
        """Read those of these blocks that only the disk has, up to the first that nobody has."""
        fetch, store = Fetch(deadline), self.store_below
        for digest in digests:
            if digest in self._fetches:
                self._fetches[digest].append(fetch)
            elif digest in self._host:
                self._host.use(digest)
                continue
            elif store is None or digest not in store or not self._read(store, digest, fetch):
                break
            fetch.pending.add(digest)
        return fetch

    def _read(self, store: BlockStore, digest: bytes, fetch: Fetch) -> bool:
        if self._host.num_pinned >= self._max_pinned:
            return False
        place = self._host.take(digest)
        if place is None:
            return False
        self._host.pin(digest)
        self._fetches[digest] = [fetch]
        store.read(digest, place, int(self._host.last_step[place]))
        return True

    def _write_below(self, planned: _Planned, step: int) -> None:
        assert self.store_below is not None
        for digest, place in zip(planned.stored, planned.out_places, strict=True):
            if digest in self.store_below:
                continue
            has_room = self._host.num_pinned < self._max_pinned
            if has_room and self.store_below.write(digest, place, step):
                self._host.pin(digest)
            else:
                self._stats.num_unwritten += 1

    def poll(self) -> None:
        """Take in what the disk has done."""
        for side, digest, is_good in self.store_below.finished() if self.store_below is not None else ():
            is_kept = digest not in self._forgotten and (is_good or side == "written")
            self._forgotten.discard(digest)
            (self._host.unpin if is_kept else self._host.drop)(digest)
            if side == "written":
                self._stats.num_written += is_good
                self._stats.num_unwritten += not is_good
            else:
                self._take_read(digest, is_good=is_good, is_kept=is_kept)

    def _take_read(self, digest: bytes, *, is_good: bool, is_kept: bool) -> None:
        self._stats.num_read += is_good
        self._stats.num_unreadable += not is_good
        for fetch in self._fetches.pop(digest):
            fetch.pending.discard(digest)
        if is_kept:
            self._from_disk.add(digest)

    def wait(self, seconds: float) -> None:
        """Wait until a fetch may have gone on."""
        if self.store_below is not None:
            self.store_below.wait(seconds)

    def clear(self) -> None:
        """Forget what is stored. What the disk reads or writes right now is forgotten when that has ended."""
        self._forgotten |= self._host.clear()
        self._from_disk.clear()
        if self.store_below is not None:
            self.store_below.clear()
