"""Starts the other ranks of an engine, from the process of rank 0.

RankStart ─▶ connect ─▶ [rank 0 loads its part] ─▶ narrowest ─▶ build ─▶ [rank 0 builds its runner] ─▶ runner_of
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.ranks import wire
from headrace.engine.ranks.processes import RankProcesses
from headrace.engine.ranks.ranks_runner import PipelineRunner, RanksRunner
from headrace.engine.settings import Settings
from headrace.errors import EngineDeadError
from headrace.hardware import MachineFacts
from headrace.steps import Runner

if TYPE_CHECKING:
    from headrace.dist.collectives import Backend, Groups


class RankStart:
    """Owns the other ranks until their runner does. They are started at once, and import torch."""

    def __init__(self, config: EngineConfig, settings: Settings, *, num_gpus: int) -> None:
        self._config, self._settings, self._num_gpus = config, settings, num_gpus
        self._groups: Groups | None = None
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        self.processes = RankProcesses(settings.num_ranks, self._abort)

    def connect(self) -> Groups:
        """Let the ranks load their parts; returns rank 0's connection to them."""
        from headrace.dist.collectives import connect
        from headrace.engine.runners import with_small_sums

        settings, backend = self._settings, self._backend
        path = self._directory / "store"
        self.processes.wait_for(wire.Started)
        self.processes.start(
            [
                wire.Start(self._config, settings, settings.mesh_of(rank), backend, str(path), self._device_index(rank))
                for rank in range(1, settings.num_ranks)
            ]
        )
        try:
            self._groups = self.processes.call(
                lambda: with_small_sums(connect(settings.mesh_of(0), path, backend), self._config, settings)
            )
        except RuntimeError as error:
            raise EngineDeadError(
                f"the {settings.num_ranks} ranks could not connect over {backend}: {error}; the file {path} must be "
                "writable"
            ) from error
        return self._groups

    def narrowest(self, facts: MachineFacts) -> MachineFacts:
        """The machine with the GPU of the rank that has the least memory, once all have loaded their parts."""
        loaded, gpu = self.processes.wait_for(wire.Loaded), facts.gpu
        assert gpu is not None and gpu.step_memory is not None
        gpu = replace(
            gpu,
            free_memory=min(gpu.free_memory, *(each.free_memory for each in loaded)),
            total_memory=min(gpu.total_memory, *(each.total_memory for each in loaded)),
            step_memory=max(gpu.step_memory, *(each.step_memory for each in loaded)),
        )
        return replace(facts, gpu=gpu)

    def build(self, settings: Settings) -> None:
        """Let the other ranks build their runners, at the same time as rank 0: they warm up together."""
        self.processes.send(wire.encode(wire.Build(settings)))

    def runner_of(self, own: Runner) -> RanksRunner | PipelineRunner:
        """The runner of the engine, once all ranks have theirs."""
        self.processes.wait_for(wire.Built)
        shutil.rmtree(self._directory, ignore_errors=True)  # all connections exist
        is_pipeline = self._settings.pipeline_parallel_size > 1
        return PipelineRunner(own, self.processes) if is_pipeline else RanksRunner(own, self.processes)

    def end(self) -> None:
        """End all ranks: the start has failed."""
        self.processes.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _backend(self) -> Backend:
        has_gpu_each = self._settings.num_ranks <= self._num_gpus
        return "nccl" if self._settings.device == "cuda" and has_gpu_each else "gloo"

    def _device_index(self, rank: int) -> int | None:
        return rank % self._num_gpus if self._settings.device == "cuda" else None

    def _abort(self) -> None:
        if self._groups is not None:
            self._groups.abort()
