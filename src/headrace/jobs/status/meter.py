"""Makes a job's status from counters: rates, savings, time left and bottleneck."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, time

from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.jobs.planning.planner import Planner
from headrace.jobs.status.bottleneck import Bottleneck, Interval, Limit, find_bottleneck
from headrace.jobs.status.report import Tally
from headrace.jobs.status.time_left import TokenCosts, TokensLeft, seconds_left
from headrace.jobs.store.status_file import JobState, JobStatus, Saved, TokenRates

NOW_SECONDS = 10.0  # the interval of the rates "now" and of the bottleneck
TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Snapshot:
    at: float
    stats: EngineStats
    writing_seconds: float


@dataclass(frozen=True, kw_only=True)
class MeterFacts:
    output: str
    model: str
    settings: Settings
    start_seconds: float = 0.0  # in which the GPU was held too
    gpu_price: float | None = None  # per hour
    num_before: int = 0  # lines that earlier runs of the job had done
    num_workers: int = 1  # all with these settings
    num_gpus: int = 1  # that they hold, if they run on GPUs


class JobMeter:
    """Owned by the job's main loop, which measures about once a second."""

    def __init__(self, facts: MeterFacts, *, clock: Callable[[], float] = monotonic) -> None:
        self._facts = facts
        self._clock = clock
        self._started_at = clock()
        self._epoch = time()
        self._snapshots: deque[_Snapshot] = deque()
        self._costs = TokenCosts()
        self.seconds_by_limit: dict[Limit, float] = defaultdict(float)  # how long each bottleneck was the one

    @property
    def is_due(self) -> bool:
        return not self._snapshots or self._clock() - self._snapshots[-1].at >= TICK_SECONDS

    def measure(
        self,
        stats: EngineStats,
        tally: Tally,
        planner: Planner,
        *,
        num_total: int | None,
        num_in_flight: int,
        has_ended: bool,
        writing_seconds: float,
        state: JobState = "running",
    ) -> JobStatus:
        """`num_total` is of this run, like all other counts here."""
        now = _Snapshot(self._clock(), stats, writing_seconds)
        measured_at = self._snapshots[-1].at if self._snapshots else self._started_at
        self._take(now)
        first, scheduler, seconds = self._snapshots[0], stats.scheduler, now.at - self._started_at
        bottleneck = self._bottleneck(first, now, planner, has_ended)
        self.seconds_by_limit[bottleneck.limit] += now.at - measured_at
        left = self._tokens_left(stats, tally, planner, num_total) if state == "running" else None
        gpu_seconds, price = self._gpu_seconds(seconds), self._facts.gpu_price
        return JobStatus(
            state=state,
            output=self._facts.output,
            model=self._facts.model,
            pid=os.getpid(),
            started_at=self._epoch,
            updated_at=time(),
            seconds=seconds,
            lines_total=None if num_total is None else self._facts.num_before + num_total,
            lines_done=self._facts.num_before + tally.num_done,
            lines_before=self._facts.num_before,
            lines_answered=tally.num_answered,
            lines_failed=tally.num_failed,
            lines_in_flight=num_in_flight,
            lines_ready=planner.num_waiting,
            errors=dict(tally.errors),
            prompt_tokens=tally.num_prompt_tokens,
            completion_tokens=tally.num_generated_tokens,
            rates_now=_rates(first, now),
            rates_mean=_mean_rates(stats, seconds),
            prefix_hit_share=scheduler.prefix_hit_share,
            kv_use=scheduler.kv_use,
            sequences_running=scheduler.num_running,
            sequences_waiting=scheduler.num_waiting,
            saved=saved_by(stats, planner),
            tokens_left=None if left is None else round(left.num_prompt_tokens + left.num_decode_tokens),
            seconds_left=None
            if left is None
            else seconds_left(left, self._costs, step_seconds=_step(first, now) * self._facts.num_workers),
            limited_by=bottleneck.limit if state == "running" else None,
            limited_because=bottleneck.reason if state == "running" else None,
            gpu_seconds=gpu_seconds,
            cost=None if gpu_seconds is None or price is None else price * gpu_seconds / 3600,
        )

    def _take(self, now: _Snapshot) -> None:
        """Keeps the snapshots from which the rates of this moment are computed."""
        self._learn(now)
        self._snapshots.append(now)
        while len(self._snapshots) > 2 and now.at - self._snapshots[1].at >= NOW_SECONDS:
            self._snapshots.popleft()

    def _gpu_seconds(self, seconds: float) -> float | None:
        if self._facts.settings.device != "cuda":
            return None
        return self._facts.num_gpus * (seconds + self._facts.start_seconds)

    def _learn(self, now: _Snapshot) -> None:
        if not self._snapshots:
            return
        before = self._snapshots[-1]
        num_prompt, num_decode = (
            after - earlier
            for after, earlier in zip(scheduler_tokens(now.stats), scheduler_tokens(before.stats), strict=True)
        )
        if num_prompt + num_decode > 0:  # otherwise the interval says nothing about the cost of a token
            self._costs.add(num_prompt, num_decode, now.at - before.at)

    def _bottleneck(self, first: _Snapshot, now: _Snapshot, planner: Planner, has_ended: bool) -> Bottleneck:
        before, after = first.stats.scheduler, now.stats.scheduler
        settings = self._facts.settings
        return find_bottleneck(
            Interval(
                seconds=now.at - first.at,
                num_steps=after.num_steps - before.num_steps,
                num_batched_tokens=after.num_batched_tokens - before.num_batched_tokens,
                num_generated_tokens=after.num_generated_tokens - before.num_generated_tokens,
                num_preemptions=after.num_preemptions - before.num_preemptions,
                host_seconds=now.stats.host_seconds - first.stats.host_seconds,
                wait_seconds=now.stats.wait_seconds - first.stats.wait_seconds,
                writing_seconds=now.writing_seconds - first.writing_seconds,
                num_running=after.num_running,
                num_waiting=after.num_waiting,
                kv_use=after.kv_use,
                num_ready=planner.num_waiting,
                has_ended=has_ended,
                max_num_seqs=settings.max_num_seqs * self._facts.num_workers,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            )
        )

    def _tokens_left(
        self, stats: EngineStats, tally: Tally, planner: Planner, num_total: int | None
    ) -> TokensLeft | None:
        """Returns None while the number of lines is unknown, or nothing is known about the length of unread ones."""
        if num_total is None:
            return None
        num_executed = tally.num_answered - planner.savings.num_lines
        num_unread = max(0, num_total - tally.num_done - planner.num_held)
        if num_unread and not num_executed:
            return None
        num_prompt, num_decode = scheduler_tokens(stats)
        left, scheduler, saved = planner.left(), stats.scheduler, planner.savings
        # Tokens that the engine has counted and no finished line has belong to lines that are still running.
        num_started = scheduler.num_prompt_tokens - (tally.num_prompt_tokens - saved.num_prompt_tokens)
        num_sampled = num_decode - (tally.num_generated_tokens - saved.num_decode_tokens)
        num_queued = max(0, left.num_running_tokens - max(0, num_started)) * (1 - scheduler.prefix_hit_share)
        share_executed = num_executed / max(
            1, tally.num_answered
        )  # of unread lines, if as many of them are duplicates as so far
        mean_prompt, mean_decode = num_prompt / max(1, num_executed), num_decode / max(1, num_executed)
        return TokensLeft(
            num_prompt_tokens=left.num_prompt_tokens + num_queued + num_unread * share_executed * mean_prompt,
            num_decode_tokens=left.num_decode_tokens
            + max(0.0, left.num_running_decode_tokens - max(0, num_sampled))
            + num_unread * share_executed * mean_decode,
            longest=max(left.longest_waiting, left.longest_running / 2),  # a running one is halfway through, on average
        )


def saved_by(stats: EngineStats, planner: Planner) -> Saved:
    duplicates = planner.savings
    return Saved(
        prefix_tokens=stats.scheduler.num_prefix_hit_tokens,
        duplicate_lines=duplicates.num_lines,
        duplicate_prompt_tokens=duplicates.num_prompt_tokens,
        duplicate_completion_tokens=duplicates.num_decode_tokens,
    )


def scheduler_tokens(stats: EngineStats) -> tuple[int, int]:
    """Prompt tokens that were computed, and sampled ones. Every step counts its tokens as they are computed."""
    scheduler = stats.scheduler
    return max(0, scheduler.num_batched_tokens - scheduler.num_generated_tokens), scheduler.num_generated_tokens


def _rates(first: _Snapshot, now: _Snapshot) -> TokenRates:
    seconds = max(1e-9, now.at - first.at)
    before, after = first.stats.scheduler, now.stats.scheduler
    if now is first:
        return TokenRates()
    return TokenRates(
        prompt=(after.num_prompt_tokens - before.num_prompt_tokens) / seconds,
        completion=(after.num_generated_tokens - before.num_generated_tokens) / seconds,
    )


def _mean_rates(stats: EngineStats, seconds: float) -> TokenRates:
    scheduler, seconds = stats.scheduler, max(1e-9, seconds)
    return TokenRates(prompt=scheduler.num_prompt_tokens / seconds, completion=scheduler.num_generated_tokens / seconds)


def _step(first: _Snapshot, now: _Snapshot) -> float:
    """Seconds of a step, if one worker made all of them."""
    num_steps = now.stats.scheduler.num_steps - first.stats.scheduler.num_steps
    return (now.at - first.at) / num_steps if num_steps else 0.0
