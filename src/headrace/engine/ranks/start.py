"""Starts the other ranks of an engine, from the process of rank 0.

RankStart ─▶ connect ─▶ [rank 0 loads its part] ─▶ narrowest ─▶ build ─▶ [rank 0 builds its runner] ─▶ runner_of
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.dist.rendezvous import Rendezvous, StoreServer
from headrace.engine.nodes.node_link import NodeLink
from headrace.engine.nodes.other_nodes import OtherNodes
from headrace.engine.rank_layout import may_share_gpus
from headrace.engine.ranks import wire
from headrace.engine.ranks.processes import RankProcesses
from headrace.engine.ranks.ranks_runner import PipelineRunner, RanksRunner
from headrace.engine.settings import Settings
from headrace.engine.threads import NOT_PINNED
from headrace.errors import ConfigError, EngineDeadError
from headrace.hardware import MachineFacts
from headrace.steps import Runner

if TYPE_CHECKING:
    from headrace.dist.collectives import Backend, Groups

SLOW_START = "%d ranks start on %d cores: this may take minutes, since each imports torch and prepares its kernels"

_log = logging.getLogger(__name__)


class RankStart:
    """Owns the other ranks until their runner does. They are started at once, and import torch."""

    def __init__(self, config: EngineConfig, settings: Settings, facts: MachineFacts) -> None:
        self._config, self._settings, self._num_gpus = config, settings, facts.num_gpus
        if settings.device == "cpu" and settings.ranks_per_node > facts.num_cores:
            _log.warning(SLOW_START, settings.ranks_per_node, facts.num_cores)
        self._groups: Groups | None = None
        self._store: StoreServer | None = None  # for several nodes
        self._nodes = None if settings.nnodes == 1 else OtherNodes(config, settings)
        self._directory = Path(tempfile.mkdtemp(prefix="headrace-ranks-"))
        self.processes = RankProcesses(
            settings.num_ranks,
            self._abort,
            num_local=settings.ranks_per_node,
            nodes=() if self._nodes is None else self._nodes.links,
            on_closed=self._close_nodes,
        )

    def connect(self) -> Groups:
        """Let the ranks load their parts; returns rank 0's connection to them."""
        from headrace.dist.collectives import connect
        from headrace.engine.runners import with_small_sums

        settings = self._settings
        self.processes.wait_for(wire.Started)
        self._check_gpus()
        backend = self._backend
        self._store = None if self._nodes is None else StoreServer(self._nodes.address)
        self.processes.start([self._start_of(rank, backend) for rank in range(1, settings.num_ranks)])
        here = self._rendezvous_of(0)
        try:
            self._groups = self.processes.call(
                lambda: with_small_sums(connect(settings.mesh_of(0), here, backend), self._config, settings)
            )
        except RuntimeError as error:
            where = (
                f"the file {here.path} must be writable" if here.path else "all ports between the nodes must be open"
            )
            raise EngineDeadError(
                f"the {settings.num_ranks} ranks could not connect over {backend}: {error}; {where}"
            ) from error
        return self._groups

    def _start_of(self, rank: int, backend: Backend) -> wire.Start:
        settings = self._settings
        if self._link_of(rank) is not None:
            settings = replace(settings, cpu_affinity=NOT_PINNED)  # the list is of node 0's CPUs
        device = self._device_index(rank)
        return wire.Start(self._config, settings, settings.mesh_of(rank), backend, self._rendezvous_of(rank), device)

    def _rendezvous_of(self, rank: int) -> Rendezvous:
        if self._nodes is None or self._store is None:
            return Rendezvous.in_file(self._directory / "store")
        link = self._nodes.link_of(rank)
        return self._store.rendezvous(self._nodes.address if link is None else link.node.address)

    def _link_of(self, rank: int) -> NodeLink | None:
        return None if self._nodes is None else self._nodes.link_of(rank)

    def _check_gpus(self) -> None:
        """Node 0 was checked with its settings."""
        if self._settings.device != "cuda" or may_share_gpus():
            return
        for link in self._nodes.links if self._nodes is not None else ():
            if link.node.num_gpus < self._settings.ranks_per_node:
                raise ConfigError(
                    f"node {link.node_rank} ({link.node.hostname}) has {link.node.num_gpus} GPUs, and its "
                    f"{self._settings.ranks_per_node} ranks need one each"
                )

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
        self._close_nodes()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _backend(self) -> Backend:
        links = [] if self._nodes is None else self._nodes.links
        has_gpu_each = self._settings.ranks_per_node <= min([self._num_gpus, *(link.node.num_gpus for link in links)])
        return "nccl" if self._settings.device == "cuda" and has_gpu_each else "gloo"

    def _device_index(self, rank: int) -> int | None:
        if self._settings.device != "cuda":
            return None
        link = self._link_of(rank)
        num_gpus = self._num_gpus if link is None else link.node.num_gpus
        return rank % self._settings.ranks_per_node % num_gpus

    def _abort(self) -> None:
        if self._groups is not None:
            self._groups.abort()
        self._close_nodes()

    def _close_nodes(self) -> None:
        if self._nodes is not None:
            self._nodes.close()
