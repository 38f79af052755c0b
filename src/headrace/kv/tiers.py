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
from headrace.kv.read_rate import ReadRate
from headrace.steps import BlockTransfers

MAX_PINNED_SHARE = 0.5  # of the host tier: that the disk reads and writes at the same time

Side = Literal["read", "written"]


class Finished(NamedTuple):
    """A file was read into, or written from, a place of the host."""

    side: Side
    digest: bytes
    is_good: bool
    ended_at: float  # by the clock of the scheduler


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
    num_unwritten: int = 0  # not written to the disk: evicted from the host before its turn, or the disk was full
    num_unreadable: int = 0  # expected on the disk, and missing or damaged

    def __add__(self, other: TierStats) -> TierStats:
        return TierStats(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks of one prompt that come from the disk."""

    pending: set[bytes] = field(default_factory=set)
    num_found: int = 0  # leading blocks of the prompt that need not be computed, pending ones included
    last_read: int = 0  # number of the last pending read

    @property
    def is_over(self) -> bool:
        return not self.pending


@dataclass(frozen=True, slots=True)
class _Read:
    """A block that the disk reads."""

    number: int
    fetches: list[Fetch]  # that wait for it


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
        self.reads = ReadRate()
        self._host = HostTier(num_places, self._evicted)
        self._planned = _Planned()
        self._stats = TierStats()
        self._fetches: dict[bytes, _Read] = {}
        self._unwritten: dict[bytes, None] = {}  # on the host, and neither on the disk nor in its queue; oldest first
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
        return max(0, self._max_pinned - self._host.num_pinned - len(self._unwritten))

    @property
    def is_writing(self) -> bool:
        return self._host.num_pinned > len(self._fetches)

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
            self._unwritten |= dict.fromkeys(planned.stored)
            self._write_below()
        return BlockTransfers(
            out_blocks=np.array(planned.out_blocks, np.int64),
            out_places=np.array(planned.out_places, np.int64),
            in_places=np.array(planned.in_places, np.int64),
            in_blocks=np.array(planned.in_blocks, np.int64),
            is_urgent=planned.is_urgent,
        )

    # ---- the disk

    @property
    def num_to_read(self) -> int:
        """Blocks that can be read at once."""
        return self._max_pinned - self._host.num_pinned - len(self._from_disk)

    def num_on_disk(self, digests: Iterable[bytes]) -> int:
        """How many of these blocks would have to be read, up to the first that nobody has."""
        store = self.store_below
        if store is None:
            return 0
        found = takewhile(lambda digest: digest in self._host or digest in store, digests)
        return sum(digest not in self._host for digest in found)

    def fetch(self, digests: Iterable[bytes], *, now: float, max_reads: int) -> Fetch:
        """Read those of these blocks that only the disk has, up to the first that nobody has, or for which there is no
        room."""
        fetch, last_read = Fetch(), self.reads.num_asked + max_reads
        for digest in digests:
            if digest in self._fetches:
                self._fetches[digest].fetches.append(fetch)
            elif digest in self._host:
                self._host.use(digest)
                fetch.num_found += 1
                continue
            elif self.reads.num_asked == last_read or not self._read(digest, fetch, now):
                break
            fetch.pending.add(digest)
            fetch.num_found += 1
            fetch.last_read = max(fetch.last_read, self._fetches[digest].number)
        return fetch

    def num_reads_before(self, fetch: Fetch) -> int:
        """Reads that have to end until those of the fetch have, its own included."""
        return max(len(fetch.pending), fetch.last_read - self.reads.num_ended)

    def _read(self, digest: bytes, fetch: Fetch, now: float) -> bool:
        store = self.store_below
        if store is None or digest not in store or self._host.num_pinned >= self._max_pinned:
            return False
        place = self._host.take(digest)
        if place is None:
            return False
        self._host.pin(digest)
        self._fetches[digest] = _Read(self.reads.asked(now), [fetch])
        store.read(digest, place, int(self._host.last_step[place]))
        return True

    def _write_below(self) -> None:
        """Queue blocks that the disk lacks, as many as it takes: the newest first. So the first blocks of a prompt come
        before its last ones, which are evicted earlier and are of no use alone."""
        store = self.store_below
        while store is not None and self._unwritten and self._host.num_pinned < self._max_pinned:
            digest = next(reversed(self._unwritten))
            place = self._host.place_of(digest)
            if digest not in store:
                if not store.write(digest, place, int(self._host.last_step[place])):
                    return
                self._host.pin(digest)
            del self._unwritten[digest]

    def _evicted(self, digest: bytes) -> None:
        self._from_disk.discard(digest)
        if digest in self._unwritten:
            del self._unwritten[digest]
            self._stats.num_unwritten += 1

    def poll(self) -> None:
        """Take in what the disk has done."""
        for side, digest, is_good, ended_at in self.store_below.finished() if self.store_below is not None else ():
            is_kept = digest not in self._forgotten and (is_good or side == "written")
            self._forgotten.discard(digest)
            (self._host.unpin if is_kept else self._host.drop)(digest)
            if side == "written":
                self._stats.num_written += is_good
                self._stats.num_unwritten += not is_good
            else:
                self.reads.ended(ended_at)
                self._take_read(digest, is_good=is_good, is_kept=is_kept)
        self._write_below()

    def _take_read(self, digest: bytes, *, is_good: bool, is_kept: bool) -> None:
        self._stats.num_read += is_good
        self._stats.num_unreadable += not is_good
        for fetch in self._fetches.pop(digest).fetches:
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
        self._unwritten.clear()
        if self.store_below is not None:
            self.store_below.clear()
