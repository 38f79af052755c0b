"""The engine that a job's run has now. A moment later it may be another one, so nobody else holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.engine.core import EngineStats
from headrace.engine.offline_order import target_concurrency_of
from headrace.engine.process.engine_process import EngineProcess
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.errors import EngineDeadError
from headrace.jobs.planning.workload import WorkLeft
from headrace.jobs.recovery.engine_keeper import EngineKeeper, GoneClient, joined

SPARE_SEQUENCES = 8  # in flight beyond twice what runs, so that the queue of a small engine is never empty


@dataclass(frozen=True, slots=True)
class LostEngine:
    failure: BaseException
    settings: Settings
    is_apart: bool  # it had a process of its own


class CurrentEngine:
    """Owned by the job's run; without a `keeper` there will be no other."""

    def __init__(self, engine: Engine, keeper: EngineKeeper | None) -> None:
        self._keeper = keeper
        self._stats_before: EngineStats | None = None  # of the engines that have died
        self._take(engine)

    def _take(self, engine: Engine) -> None:
        self.engine = engine
        self.max_sequences = 2 * engine.settings.max_num_seqs + SPARE_SEQUENCES

    @property
    def can_be_replaced(self) -> bool:
        return self._keeper is not None

    @property
    def stats(self) -> EngineStats:
        """Of all engines that the run has had."""
        return joined(self._stats_before, self.engine.stats)

    def abort(self, request_id: str, index: int | None = None) -> None:
        client = self.engine.client
        if client.failure is None:
            try:
                client.abort(request_id, index)
            except EngineDeadError:
                pass  # it ended with its engine, whose last word is on its way

    def set_target_concurrency(self, left: WorkLeft) -> None:
        """All that is left is known: run no more at once than keeps the device busy until the longest answer ends."""
        longest = max(left.longest_waiting, left.longest_running)
        num_tokens = left.num_decode_tokens + left.num_running_decode_tokens
        if (num_seqs := target_concurrency_of(round(num_tokens), round(longest), self.engine.settings)) is not None:
            self.engine.client.limit_running(num_seqs)

    def bury(self, death: EngineDeadError) -> LostEngine:
        """The engine has died: nothing of it is held any more, and its events come no more."""
        assert self._keeper is not None
        engine = self.engine
        failure = engine.client.failure or death
        lost = LostEngine(failure, engine.settings, isinstance(engine.client, EngineProcess))
        self._stats_before = self.stats
        self.engine = replace(engine, client=GoneClient(failure))
        del engine
        self._keeper.close()
        return lost

    def start(self, config: EngineConfig) -> None:
        """The next one."""
        assert self._keeper is not None
        self._take(self._keeper.start(config))
