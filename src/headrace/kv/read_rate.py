"""How fast a disk reads blocks, by those that it has read."""

from __future__ import annotations

from collections import deque

MEMORY = 1 - 1 / 64  # weight of the blocks before the newest one
MAX_AGE_S = 30.0  # of the newest read: after it the disk may have become faster


class ReadRate:
    """Owned by `Tiers`. Reads are asked for in order, and about in this order they end; several run at once.

    asked  a b c d                    the time of a read: since it was asked for, or since the end of the one
    ended      a  b   c d             before it; so their sum is the time in which the disk had something to read
    time   └─a─┴b─┴─c─┴d┘
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_ended = 0
        self._asked_at: deque[float] = deque()  # of those that have not ended
        self._ended_at = float("-inf")
        self._seconds = 0.0  # of the last reads, and how many they are: both with weights
        self._num_blocks = 0.0

    @property
    def num_pending(self) -> int:
        return self.num_asked - self.num_ended

    def asked(self, now: float) -> int:
        """Returns the number of the read."""
        self.num_asked += 1
        self._asked_at.append(now)
        return self.num_asked

    def ended(self, at: float) -> None:
        if self.is_old(at):
            self._seconds = self._num_blocks = 0.0
        at = max(at, self._ended_at)
        self._seconds = MEMORY * self._seconds + max(0.0, at - max(self._asked_at.popleft(), self._ended_at))
        self._num_blocks = MEMORY * self._num_blocks + 1.0
        self.num_ended += 1
        self._ended_at = at

    def block_s(self, now: float) -> float | None:
        """Seconds for each block; None: unknown. A read that takes long counts before it has ended."""
        if not self._num_blocks:
            return None
        if not self._asked_at:
            return self._seconds / self._num_blocks
        running_s = max(0.0, now - max(self._asked_at[0], self._ended_at))
        return max(self._seconds / self._num_blocks, (self._seconds + running_s) / (self._num_blocks + 1.0))

    def is_old(self, now: float) -> bool:
        """Whether nothing was read for a while."""
        return now - self._ended_at > MAX_AGE_S
