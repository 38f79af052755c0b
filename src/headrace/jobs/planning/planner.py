"""In which order a job's lines are executed: a window of the input at a time, by the tree of their beginnings.

    add ──▶ arrived ──▶ planned ──▶ take ──▶ running ──▶ finished
     │ the same request is unfinished: follows it           │
     └ or its answer is kept: answered at once              └──▶ its followers

Plans are made of what is there when the engine has room: it never waits for the window to fill. Once the input has
ended, an answer that would outlast all the rest is started now, whatever the tree says.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass

from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.prepare import Work
from headrace.jobs.planning.answer_lengths import MIN_FINISHED, PROBE, AnswerLengths
from headrace.jobs.planning.duplicates import Duplicates, RequestKeys
from headrace.jobs.planning.prefix_tree import TOKEN_BYTES, Leaf, order_by_prefix
from headrace.sched import SchedulerLimits

MARGIN = 1.25  # by so much longer than others, or closer to the end, before the tree's order is left
PROBED = 4  # times as many as are started early, before that is worth it
LEARNED_ANEW = 8  # plan again when so many times as many answers have finished


@dataclass(frozen=True, slots=True)
class Window:
    """How much of the input is held, lines that wait for another's answer included."""

    num_lines: int = 65_536  # some 1 kB each where prompts are short
    num_tokens: int = 16_777_216


WINDOW = Window()


class Pending(Leaf, eq=False, gc=False, kw_only=True):
    """A line that waits to be executed. Owned by the planner."""

    line: Work
    limit: int  # tokens of an answer, at most
    is_exact: bool  # it cannot end before its limit
    expected_len: float = 0.0
    is_taken: bool = False


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """What was added and not taken, and what runs, as far as lengths are known."""

    num_lines: int = 0
    num_prompt_tokens: float = 0.0  # to compute: what is shared counts once
    num_decode_tokens: float = 0.0
    num_running_tokens: int = 0  # of the prompts that were taken and are not answered
    num_running_decode_tokens: float = 0.0  # of their answers, what they have so far included
    longest_waiting: float = 0.0  # answer; known once the input has ended
    longest_running: float = 0.0


@dataclass(slots=True)
class Savings:
    """By duplicates: lines that were answered without being computed, and their tokens."""

    num_lines: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0

    def add(self, output: LineOutput) -> None:
        self.num_lines += 1
        self.num_prompt_tokens += output.num_prompt_tokens
        self.num_decode_tokens += output.num_generated_tokens


@dataclass(slots=True)
class _Sums:
    """Of what is planned and not taken."""

    num_lines: int = 0
    num_tokens: int = 0
    decode: float = 0.0
    new_share: float = 1.0  # of prompt tokens, that no other prompt has computed


class Planner:
    """Used by one thread."""

    def __init__(self, limits: SchedulerLimits, *, window: Window = WINDOW) -> None:
        self._limits = limits
        self._window = window
        self._keys = RequestKeys()
        self._duplicates = Duplicates()
        self._lengths = AnswerLengths()
        self._expected: dict[tuple[int, int | None, int], float] = {}  # lengths of answers; since the last plan
        self._arrived: list[Pending] = []
        self._num_arrived_tokens = 0
        self._planned: deque[Pending] = deque()
        self._by_length: list[tuple[float, int, Pending]] = []  # a heap, the longest first; once the input has ended
        self._sums = _Sums()
        self._running: dict[int, Pending] = {}  # by index
        self._num_running_tokens = 0
        self._num_taken = 0
        self._chosen: Pending | None = None  # that `peek` has shown
        self._last: Pending | None = None
        self.has_ended = False
        self._num_learned_when_old = MIN_FINISHED
        self.savings = Savings()

    # What comes in.

    def add(self, line: Work) -> LineOutput | None:
        """Take a line in. What is returned is its answer, if the same request was answered before."""
        key = self._keys.key_of(line)
        if key is not None:
            kept = self._duplicates.kept_answer(key)
            if kept is not None:
                self.savings.add(kept)
                return kept
            if self._duplicates.add_duplicate(key, line):
                return None
            self._duplicates.add_original(key, line.reply.index)
        self._arrived.append(self._pending(line))
        self._num_arrived_tokens += len(line.tokens) // TOKEN_BYTES
        return None

    def end_input(self) -> None:
        """Nothing comes any more."""
        self.has_ended = True
        self._plan()

    @property
    def has_room(self) -> bool:
        """Whether more of the input may be read."""
        num_lines = self.num_waiting + self._duplicates.num_waiting
        num_tokens = self._sums.num_tokens + self._num_arrived_tokens
        return num_lines < self._window.num_lines and num_tokens < self._window.num_tokens

    @property
    def num_waiting(self) -> int:
        """Lines to execute that were not taken."""
        return self._sums.num_lines + len(self._arrived)

    @property
    def num_held(self) -> int:
        """Lines that were added and are not answered."""
        return self.num_waiting + len(self._running) + self._duplicates.num_waiting

    # What goes out.

    def may_start(self, num_sequences: int, *, num_in_flight: int, max_in_flight: int) -> bool:
        """Whether so many more sequences should go to the engine. The first lines of a job go no faster than there are
        others to choose from, but for a step's worth of prompts: what is submitted early is submitted blindly."""
        if not num_in_flight:
            return True
        is_blind = not self.has_ended and self._num_taken < max_in_flight and num_in_flight >= self.num_waiting
        if is_blind and self._num_running_tokens >= self._limits.max_num_batched_tokens:
            return False
        return num_in_flight + num_sequences <= max_in_flight

    def peek(self) -> Work | None:
        """The line that `take` would give."""
        chosen = self._chosen
        if chosen is None:
            if not self._sums.num_lines and not self._arrived:
                return None
            if self._is_plan_old:
                self._plan()
            chosen = self._chosen = self._choose()
        return chosen.line

    def take(self) -> Work:
        """The line to execute next."""
        if self._chosen is None:
            self.peek()
        item, self._chosen = self._chosen, None
        assert item is not None, "nothing is waiting"
        item.is_taken = True
        num_tokens, sums = len(item.tokens) // TOKEN_BYTES, self._sums
        sums.num_lines -= 1
        sums.num_tokens -= num_tokens
        sums.decode = max(0.0, sums.decode - item.num_decode_tokens)
        self._num_taken += 1
        self._running[item.line.reply.index] = item
        self._num_running_tokens += num_tokens
        if not item.is_exact:
            self._lengths.start(prefix_group=item.prefix_group, max_tokens=item.line.params.max_tokens)
        self._last = item
        return item.line

    def finished(self, index: int, output: LineOutput | None) -> list[Work]:
        """The lines that are to be answered like this one; None: it failed, and so do they."""
        item = self._running.pop(index, None)
        self._num_running_tokens -= len(item.tokens) // TOKEN_BYTES if item is not None else 0
        if item is not None and output is not None and not item.is_exact:
            for answer in output.answers:
                self._lengths.learn(
                    answer.num_tokens,
                    prefix_group=item.prefix_group,
                    max_tokens=item.line.params.max_tokens,
                    limit=item.limit,
                )
        duplicates = self._duplicates.finished(index, output)
        if output is not None:
            for _ in duplicates:
                self.savings.add(output)
        return duplicates

    def drop_waiting(self) -> None:
        """Forget what was not taken, and what follows it: the job is being stopped."""
        for item in (*self._planned, *self._arrived):
            if not item.is_taken:
                self._duplicates.finished(item.line.reply.index, None)
        self._planned.clear()
        self._arrived, self._by_length, self._chosen = [], [], None
        self._num_arrived_tokens, self._sums = 0, _Sums()

    def left(self) -> WorkLeft:
        if self._is_plan_old:
            self._plan()
        self._expected.clear()  # more is known by now
        sums, running, longest = self._sums, self._running.values(), self._longest()
        return WorkLeft(
            num_lines=self.num_waiting,
            num_prompt_tokens=(sums.num_tokens + self._num_arrived_tokens) * sums.new_share,
            num_decode_tokens=sums.decode + self._arrived_decode_tokens(),
            num_running_tokens=self._num_running_tokens,
            num_running_decode_tokens=sum(self._decode_tokens(item) for item in running),  # by what is known now
            longest_waiting=0.0 if longest is None else longest.expected_len,
            longest_running=max((item.expected_len for item in running), default=0.0),
        )

    def _arrived_decode_tokens(self) -> float:
        """By some of them: there may be many."""
        some = self._arrived[:: max(1, len(self._arrived) // 64)]
        return sum(map(self._decode_tokens, some)) * len(self._arrived) / max(1, len(some))

    # The plan.

    @property
    def _is_plan_old(self) -> bool:
        if self._arrived and len(self._arrived) >= self._sums.num_lines:
            return True
        return self._lengths.num_learned >= self._num_learned_when_old

    def _plan(self) -> None:
        items: list[Leaf] = [item for item in self._planned if not item.is_taken]
        items += self._arrived
        if self._last is not None:
            items.append(Leaf(self._last.tokens, self._last.salt, is_current=True))
        self._expected.clear()
        order = order_by_prefix(items, block_size=self._limits.block_size, decode_tokens=self._decode_tokens)
        self._planned = deque(self._probes_first([leaf for leaf in order.leaves if isinstance(leaf, Pending)]))
        self._arrived = []
        self._num_arrived_tokens = 0
        self._num_learned_when_old = max(MIN_FINISHED, LEARNED_ANEW * self._lengths.num_learned)
        self._sums = _Sums(
            num_lines=len(self._planned),
            num_tokens=order.num_prompt_tokens,
            decode=sum([item.num_decode_tokens for item in self._planned]),
            new_share=order.num_new_tokens / max(1, order.num_prompt_tokens),
        )
        if self.has_ended:
            self._by_length = [(-item.expected_len, place, item) for place, item in enumerate(self._planned)]
            heapq.heapify(self._by_length)

    def _probes_first(self, items: list[Pending]) -> list[Pending]:
        """A few of each large family of which none has started: a family of long answers must not be found out last."""
        new_kinds = {
            (prefix_group, max_tokens)
            for prefix_group, max_tokens, _ in self._expected
            if prefix_group and not self._lengths.has_started(prefix_group=prefix_group, max_tokens=max_tokens)
        }
        if not new_kinds:
            return items
        sizes = Counter(kind for item in items if (kind := _kind(item)) in new_kinds and not item.is_exact)
        wanted = {kind: PROBE for kind, size in sizes.items() if size >= PROBED * PROBE}
        if not wanted:
            return items
        probes: list[Pending] = []
        rest: list[Pending] = []
        for item in items:
            kind = _kind(item)
            is_probe = not item.is_exact and wanted.get(kind, 0) > 0
            if is_probe:
                wanted[kind] -= 1
            (probes if is_probe else rest).append(item)
        return probes + rest

    def _choose(self) -> Pending:
        planned = self._planned
        while planned[0].is_taken:
            planned.popleft()
        return (self._by_length and self._overdue(planned[0])) or planned[0]

    def _overdue(self, planned: Pending) -> Pending | None:
        """The longest answer, if the rest will not last as long as it does and the planned one is shorter."""
        longest = self._longest()
        if longest is None or longest.expected_len < MARGIN * planned.expected_len:
            return None
        steps_left = self._sums.decode / self._num_at_once()
        return longest if MARGIN * longest.expected_len >= steps_left else None

    def _longest(self) -> Pending | None:
        while self._by_length and self._by_length[0][2].is_taken:
            heapq.heappop(self._by_length)
        return self._by_length[0][2] if self._by_length else None

    def _num_at_once(self) -> float:
        """Sequences that run at once: as many as there are rows, or fewer if the cache cannot hold them."""
        sums, limits = self._sums, self._limits
        mean_len = (sums.num_tokens * sums.new_share + sums.decode) / max(1, sums.num_lines)
        return max(1.0, min(limits.max_num_seqs, limits.num_blocks * limits.block_size / max(1.0, mean_len)))

    def _pending(self, line: Work) -> Pending:
        params = line.params
        room = max(1, self._limits.max_model_len - len(line.tokens) // TOKEN_BYTES)
        return Pending(
            tokens=line.tokens,
            salt=line.cache_salt,
            line=line,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            is_exact=params.ignore_eos and not params.stop and not params.stop_token_ids,
        )

    def _decode_tokens(self, item: Leaf) -> float:
        """Of all its answers. The length of one is noted with the item."""
        assert isinstance(item, Pending)
        params = item.line.params
        if item.is_exact:
            item.expected_len = float(item.limit)
        else:
            kind = (item.prefix_group, params.max_tokens, item.limit)
            expected = self._expected.get(kind)
            if expected is None:
                prefix_group, max_tokens, limit = kind
                expected = self._lengths.expected(prefix_group=prefix_group, max_tokens=max_tokens, limit=limit)
                self._expected[kind] = expected
            item.expected_len = expected
        return item.expected_len * params.num_sequences


def _kind(item: Pending) -> tuple[int, int | None]:
    """Answers of one kind are taken to become equally long."""
    return item.prefix_group, item.line.params.max_tokens
