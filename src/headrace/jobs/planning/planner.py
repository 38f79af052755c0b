"""The order in which the lines of a job run: a window of the input at a time, by the tree of shared prefixes.

    add ──▶ arrived ──▶ planned ──▶ take ──▶ running ──▶ finished
     │ the same request is unfinished: a duplicate of it    │
     └ or its answer is kept: answered at once              └──▶ its duplicates

A plan is made of the lines that are there when an engine has room: it never waits for the window to fill. Once the
input has ended, an answer that would outlast all others starts at once, wherever it is in the tree. A job with several
workers has one plan; `WorkerOrder` divides it over them.
"""

from __future__ import annotations

import heapq
from itertools import accumulate

from headrace.jobs.input.line_output import LineOutput
from headrace.jobs.input.prepare import TOKEN_BYTES, Work
from headrace.jobs.planning.answer_lengths import MIN_FINISHED, AnswerLengths
from headrace.jobs.planning.duplicates import Duplicates, RequestKeys
from headrace.jobs.planning.pending import ExpectedLengths, Pending
from headrace.jobs.planning.prefix_tree import Leaf, PrefixOrder, order_by_prefix
from headrace.jobs.planning.probes import choose_probes
from headrace.jobs.planning.worker_order import WorkerOrder
from headrace.jobs.planning.workload import WINDOW, PlanTotals, Savings, Window, WorkLeft
from headrace.sched import SchedulerLimits

MARGIN = 1.25  # an answer must be longer than others, or closer to the end, by this factor to leave the tree's order
REPLAN_FACTOR = 8  # plan again once this many times as many answers have finished


class Planner:
    """Used by one thread."""

    def __init__(self, limits: SchedulerLimits, *, window: Window = WINDOW, num_workers: int = 1) -> None:
        """`limits` are those of each of the workers, which are numbered from 0."""
        self._limits = limits
        self._num_workers = num_workers
        self._window = window
        self._keys = RequestKeys()
        self._duplicates = Duplicates()
        self._lengths = AnswerLengths()
        self._expected = ExpectedLengths(self._lengths)
        self._arrived: list[Pending] = []
        self._num_arrived_tokens = 0
        self._planned = WorkerOrder()
        self._by_length: list[tuple[float, int, Pending]] = []  # a heap, longest first; once the input has ended
        self._totals = PlanTotals()
        self._running: dict[int, Pending] = {}  # by index
        self._num_running_tokens = 0
        self._num_taken = 0
        self._chosen: dict[int, Pending] = {}  # by worker: the line that `peek` returned
        self._last: dict[int, Pending] = {}  # by worker: taken last
        self.has_ended = False
        self._num_learned_when_old = MIN_FINISHED
        self.savings = Savings()

    # Lines that come in.

    def add(self, line: Work) -> LineOutput | None:
        """Add a line. Returns its answer if the same request was answered before."""
        key = self._keys.key_of(line)
        if key is not None:
            kept = self._duplicates.kept_answer(key)
            if kept is not None:
                self.savings.add(kept)
                return kept
            if self._duplicates.add_duplicate(key, line):
                return None
            self._duplicates.add_original(key, line.reply.index)
        self._arrived.append(Pending.of(line, self._limits))
        self._num_arrived_tokens += len(line.tokens) // TOKEN_BYTES
        return None

    def end_input(self) -> None:
        """Note that no more lines will be added."""
        self.has_ended = True
        self._plan()

    @property
    def has_room(self) -> bool:
        """Whether more of the input may be read."""
        num_lines = self.num_waiting + self._duplicates.num_waiting
        num_tokens = self._totals.num_tokens + self._num_arrived_tokens
        return num_lines < self._window.num_lines and num_tokens < self._window.num_tokens

    @property
    def num_waiting(self) -> int:
        """Lines to run that were not taken."""
        return self._totals.num_lines + len(self._arrived)

    @property
    def num_held(self) -> int:
        """Lines that were added and are not answered, duplicates included."""
        return self.num_waiting + len(self._running) + self._duplicates.num_waiting

    # Lines that go out.

    def may_start(self, num_sequences: int, *, num_in_flight: int, max_in_flight: int) -> bool:
        """Whether this many more sequences should be submitted. At the start of a job few lines are known, so lines are
        held back (beyond the prompts of one step) until there are others to choose from."""
        if not num_in_flight:
            return True
        is_early = not self.has_ended and self._num_taken < max_in_flight and num_in_flight >= self.num_waiting
        if is_early and self._num_running_tokens >= self._limits.max_num_batched_tokens * self._num_workers:
            return False
        return num_in_flight + num_sequences <= max_in_flight

    def peek(self, worker: int = 0) -> Work | None:
        """The line that `take` would return."""
        chosen = self._chosen.get(worker)
        if chosen is None or chosen.is_taken:
            if not self._totals.num_lines and not self._arrived:
                return None
            if self._is_plan_old:
                self._plan()
            chosen = self._chosen[worker] = self._choose(worker)
        return chosen.line

    def take(self, worker: int = 0) -> Work:
        """The line that this worker should run next."""
        item = self._chosen.pop(worker, None)
        if item is None or item.is_taken:
            assert self.peek(worker) is not None, "nothing is waiting"
            item = self._chosen.pop(worker)
        item.is_taken = True
        num_tokens, totals = len(item.tokens) // TOKEN_BYTES, self._totals
        totals.num_lines -= 1
        totals.num_tokens -= num_tokens
        totals.num_decode_tokens = max(0.0, totals.num_decode_tokens - item.num_decode_tokens)
        self._num_taken += 1
        self._running[item.line.reply.index] = item
        self._num_running_tokens += num_tokens
        if not item.is_exact:
            self._lengths.start(prefix_group=item.prefix_group, max_tokens=item.line.params.max_tokens)
        self._last[worker] = item
        return item.line

    def release(self, worker: int) -> None:
        """The worker takes no lines for now: others may take those that were planned for it."""
        self._chosen.pop(worker, None)
        self._last.pop(worker, None)
        self._planned.release(worker)

    def finished(self, index: int, output: LineOutput | None) -> list[Work]:
        """The duplicates of this line, which get the same answer; with None it failed, and so do they."""
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
        """Drop lines that were not taken, and their duplicates: the job is being stopped."""
        for item in (*self._planned, *self._arrived):
            if not item.is_taken:
                self._duplicates.finished(item.line.reply.index, None)
        self._planned = WorkerOrder()
        self._arrived, self._by_length, self._chosen = [], [], {}
        self._num_arrived_tokens, self._totals = 0, PlanTotals()

    def left(self) -> WorkLeft:
        if self._is_plan_old:
            self._plan()
        self._expected.clear()
        totals, running, longest = self._totals, self._running.values(), self._longest()
        return WorkLeft(
            num_lines=self.num_waiting,
            num_prompt_tokens=(totals.num_tokens + self._num_arrived_tokens) * totals.new_share,
            num_decode_tokens=totals.num_decode_tokens + self._arrived_decode_tokens(),
            num_running_tokens=self._num_running_tokens,
            num_running_decode_tokens=sum(self._expected.decode_tokens(item) for item in running),
            longest_waiting=0.0 if longest is None else longest.expected_len,
            longest_running=max((item.expected_len for item in running), default=0.0),
        )

    def _arrived_decode_tokens(self) -> float:
        """Estimated from a sample, since there may be many."""
        some = self._arrived[:: max(1, len(self._arrived) // 64)]
        return sum(map(self._expected.decode_tokens, some)) * len(self._arrived) / max(1, len(some))

    # The plan.

    @property
    def _is_plan_old(self) -> bool:
        if self._arrived and len(self._arrived) >= self._totals.num_lines:
            return True
        return self._lengths.num_learned >= self._num_learned_when_old

    def _plan(self) -> None:
        items: list[Leaf] = [item for item in self._planned if not item.is_taken]
        items += self._arrived
        current = {worker: Leaf(last.tokens, last.salt, is_current=True) for worker, last in self._last.items()}
        items += current.values()
        self._expected.clear()
        order = order_by_prefix(items, block_size=self._limits.block_size, decode_tokens=self._expected.decode_tokens)
        planned = [leaf for leaf in order.leaves if isinstance(leaf, Pending)]
        probes = choose_probes(planned, self._expected.unstarted_kinds())
        self._planned = self._divided(planned, probes, order, current)
        self._arrived = []
        self._num_arrived_tokens = 0
        self._num_learned_when_old = max(MIN_FINISHED, REPLAN_FACTOR * self._lengths.num_learned)
        self._totals = PlanTotals(
            num_lines=len(planned),
            num_tokens=order.num_prompt_tokens,
            num_decode_tokens=sum([item.num_decode_tokens for item in planned]),
            new_share=order.num_new_tokens / max(1, order.num_prompt_tokens),
        )
        if self.has_ended:
            self._by_length = [(-item.expected_len, place, item) for place, item in enumerate(self._planned)]
            heapq.heapify(self._by_length)

    def _divided(
        self, planned: list[Pending], probes: list[Pending], order: PrefixOrder, current: dict[int, Leaf]
    ) -> WorkerOrder:
        """Each worker goes on where its last line was."""
        moved = {id(item) for item in probes}
        rest = [item for item in planned if id(item) not in moved] if moved else planned
        if self._num_workers == 1:
            return WorkerOrder(rest, first=probes, starts=((0, 0),))
        worker_of = {id(leaf): worker for worker, leaf in current.items()}
        num_moved = list(accumulate((id(item) in moved for item in planned), initial=0))
        starts = [(place - num_moved[place], worker_of[id(leaf)]) for place, leaf in order.current_at]
        return WorkerOrder(rest, first=probes, starts=starts, block_size=self._limits.block_size)

    def _choose(self, worker: int) -> Pending:
        planned = self._planned.next(worker)
        assert planned is not None, "nothing is waiting"
        return (self._by_length and self._overdue(planned)) or planned

    def _overdue(self, planned: Pending) -> Pending | None:
        """The longest answer, if all others would end before it and the planned one is shorter."""
        longest = self._longest()
        if longest is None or longest.expected_len < MARGIN * planned.expected_len:
            return None
        steps_left = self._totals.num_decode_tokens / self._num_at_once()
        return longest if MARGIN * longest.expected_len >= steps_left else None

    def _longest(self) -> Pending | None:
        while self._by_length and self._by_length[0][2].is_taken:
            heapq.heappop(self._by_length)
        return self._by_length[0][2] if self._by_length else None

    def _num_at_once(self) -> float:
        """Sequences that run at once: `max_num_seqs` per worker, or fewer if the KV cache cannot hold them."""
        totals, limits = self._totals, self._limits
        mean_len = (totals.num_tokens * totals.new_share + totals.num_decode_tokens) / max(1, totals.num_lines)
        in_cache = limits.num_blocks * limits.block_size / max(1.0, mean_len)
        return self._num_workers * max(1.0, min(limits.max_num_seqs, in_cache))
