"""What a job does after an out-of-memory error: a ladder of new engines, each of which needs less memory.

A step is never retried in place: with CUDA graphs and steps submitted ahead, the state of the slots is unknown. The KV
cache is one allocation, so only a new engine can have a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec

from headrace.config import EngineConfig
from headrace.engine.memory_budget import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from headrace.engine.settings import Settings
from headrace.jobs.store.failure_log import Event, MemoryStep

SHARE_STEP = 0.1
MIN_SHARE = 0.2

_MARKS = ("OutOfMemoryError:", "CUDA out of memory", "DefaultCPUAllocator: can't allocate", "MemoryError:")

Change = dict[str, Any]
Rung = Callable[[EngineConfig, Settings, int], Change | None]  # the last: workers that share the device's memory


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether memory ran out, here or in another process, of whose error only the text is known."""
    kinds = {kind.__name__ for kind in type(failure).__mro__}
    return bool(kinds & {"OutOfMemoryError", "MemoryError"}) or any(mark in str(failure) for mark in _MARKS)


def _same(config: EngineConfig, settings: Settings, num_sharing: int) -> Change | None:
    """Changes no setting: a new engine has empty caches and unfragmented memory."""
    return {}


def _fewer_tokens(config: EngineConfig, settings: Settings, num_sharing: int) -> Change | None:
    """The memory that a step needs grows with its tokens."""
    min_tokens = settings.max_num_seqs if settings.enable_chunked_prefill else settings.max_model_len
    num_tokens = max(min_tokens, settings.max_num_batched_tokens // 2)
    return {"max_num_batched_tokens": num_tokens} if num_tokens < settings.max_num_batched_tokens else None


def _smaller_share(config: EngineConfig, settings: Settings, num_sharing: int) -> Change | None:
    default = GPU_MEMORY_SHARE if settings.device == "cuda" else CPU_MEMORY_SHARE
    share = round((config.gpu_memory_utilization or default / num_sharing) - SHARE_STEP / num_sharing, 3)
    is_fixed = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
    if is_fixed or share < MIN_SHARE / num_sharing:
        return None
    return {
        "gpu_memory_utilization": share,
        "max_model_len": settings.max_model_len,
    }  # keep it: lines that fit before must still fit


RUNGS: dict[str, Rung] = {
    "started again": _same,
    "half the tokens a step": _fewer_tokens,
    "a tenth less memory": _smaller_share,
    "another tenth less memory": _smaller_share,
}
_CHANGED = ("max_num_batched_tokens", "gpu_memory_utilization")


class MemoryLadder:
    """Keeps a worker's rung. A later run starts on it, unless the user changed the settings that rungs change."""

    def __init__(
        self, config: EngineConfig, events: Iterable[Event] = (), *, worker: int = 0, num_sharing: int = 1
    ) -> None:
        """`num_sharing` workers divide the memory of the device; `config` has this one's part."""
        self._given = {name: getattr(config, name) for name in _CHANGED}
        self._worker = worker
        self._num_sharing = num_sharing
        self.config = config
        self._last: MemoryStep | None = None
        for event in (event for event in events if isinstance(event, MemoryStep)):
            if event.worker == worker and event.given == self._given and event.rung in RUNGS:
                self._take(event)

    def climb(self, settings: Settings, *, num_done: int) -> MemoryStep | None:
        """The next rung. At the top, the last one again if lines were done since. None: nothing is left to try."""
        names = list(RUNGS)
        start = 0 if self._last is None else names.index(self._last.rung) + 1
        for name in names[start:]:
            change = RUNGS[name](self.config, settings, self._num_sharing)
            if change is not None:
                kept = {} if self._last is None else self._last.settings
                return self._take(
                    MemoryStep(name, self._given, {**kept, **change}, num_done, self._worker or msgspec.UNSET)
                )
        if self._last is not None and num_done > self._last.num_done:
            return self._take(msgspec.structs.replace(self._last, num_done=num_done))
        return None

    def _take(self, event: MemoryStep) -> MemoryStep:
        self._last = event
        self.config = replace(self.config, **event.settings)
        return event
