"""Checks how a model is divided over ranks, devices and nodes, and says why: a part of `resolve`."""

from __future__ import annotations

import os

from headrace.config import EngineConfig
from headrace.dist.mesh import Mesh
from headrace.engine.choices import Note, Warn
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.models.shards import Shards, check_divisible, check_stages
from headrace.models.spec import ModelSpec

# What a decode step takes, for the warning about small models: reading the weights, and a sum over the ranks. For GPUs
# rough figures, not measured with this engine: of an H100 with NCCL in a CUDA graph over NVLink. A sum over ranks on a
# CPU was measured on two cores, with Gloo (docs/parallelism.md).
GPU_BYTES_PER_S = 3e12
GPU_ALL_REDUCE_S = 15e-6
CPU_ALL_REDUCE_S = 4.3e-4
MAX_WAIT_SHARE = 0.2  # of a step, for sums over the ranks; above it, a warning
SHARE_GPUS_VARIABLE = "HEADRACE_RANKS_SHARE_GPUS"  # "1": ranks may share a GPU, over Gloo; for tests


def may_share_gpus() -> bool:
    return os.environ.get(SHARE_GPUS_VARIABLE) == "1"


class RankLayout:
    """The ranks of an engine: how many there are, where, and which part of the model each has."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, facts: MachineFacts, *, on_gpu: bool) -> None:
        self._config, self._spec, self._facts, self._on_gpu = config, spec, facts, on_gpu
        self._size = config.tensor_parallel_size
        self._num_stages = config.pipeline_parallel_size
        self.num_ranks = self._size * self._num_stages
        self.num_local = max(1, self.num_ranks // config.nnodes)  # on each node

    @property
    def first_shards(self) -> Shards:
        """Those of the first stage's first rank, which has the most layers, heads and experts."""
        return self.shards_of(0)

    def shards_of(self, stage: int) -> Shards:
        mesh = Mesh(0, self._size, stage, self._num_stages, self._config.enable_expert_parallel)
        return Shards(self._spec, mesh)

    def shards_of_draft(self, draft: ModelSpec) -> Shards:
        """Those of the first rank. A draft model has one stage."""
        return Shards(draft, Mesh(0, self._size, whole_experts=self._config.enable_expert_parallel))

    @property
    def end_stages(self) -> set[int]:
        """The first and the last stage, which have more than layers."""
        return {0, self._num_stages - 1}

    @property
    def num_per_device(self) -> int:
        return -(-self.num_local // self._facts.num_gpus) if self._on_gpu else self.num_local

    def decide(self, note: Note, warn: Warn) -> None:
        """Refuse what cannot be; note each size with its reason; warn of what is probably a mistake."""
        size, whole_experts = self._size, self._config.enable_expert_parallel
        check_divisible(self._spec, size, evenly=self._on_gpu, whole_experts=whole_experts)
        check_stages(self._spec, self._num_stages)
        self._check_nodes(note, warn)
        self._check_devices(warn)
        if self._num_stages > 1:
            self._note_stages(note)
        if size > 1:
            self._note_tensor_ranks(note)
            self._warn_about_sums(warn)
        if whole_experts:
            assert self._spec.mixture is not None
            num_experts = self.first_shards.experts.size
            reason = f"as set: each rank has up to {num_experts} of {self._spec.mixture.num_experts} experts of a layer"
            note("enable_expert_parallel", True, reason)

    @property
    def _sizes_text(self) -> str:
        sizes = {"tensor_parallel_size": self._size, "pipeline_parallel_size": self._num_stages}
        return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)

    def _check_nodes(self, note: Note, warn: Warn) -> None:
        nnodes, node_rank = self._config.nnodes, self._config.node_rank
        if node_rank > 0:
            raise ConfigError(
                f"node_rank={node_rank} hosts ranks of an engine that runs on node 0, and has none of its own; run on "
                f"this node: headrace serve MODEL --headless --node-rank {node_rank} --nnodes {nnodes} ..."
            )
        if self.num_ranks % nnodes:
            sizes = self._sizes_text or "tensor_parallel_size=1"
            raise ConfigError(
                f"nnodes={nnodes} does not divide the {self.num_ranks} ranks of {sizes}: each node has as many; set "
                f"pipeline_parallel_size={nnodes}, with the GPUs of a node as tensor_parallel_size"
            )
        if nnodes == 1:
            return
        note("nnodes", nnodes, f"as set: each node has {self.num_local} of {self.num_ranks} ranks")
        if self.num_local % self._size:
            warn(
                f"tensor_parallel_size={self._size} is over several nodes, which have {self.num_local} ranks "
                f"each: {2 * self._spec.num_layers + 2} sums per step go over the network between them; set "
                f"tensor_parallel_size={self.num_local} and pipeline_parallel_size={nnodes} unless it is as "
                "fast as the links inside a node"
            )

    def _check_devices(self, warn: Warn) -> None:
        given, num_ranks = self._sizes_text, self.num_local
        where = f" of nnodes={self._config.nnodes}" if self._config.nnodes > 1 else ""
        if self._on_gpu and num_ranks > self._facts.num_gpus and num_ranks > 1 and not may_share_gpus():
            raise ConfigError(
                f"{given}{where} needs {num_ranks} GPUs, one per rank, and this process may use "
                f"{self._facts.num_gpus}; lower it, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
            )
        if not self._on_gpu and num_ranks > max(self._facts.num_cores, 1):
            warn(
                f"{given} is more than the {self._facts.num_cores} cores that this process may use: ranks wait for "
                "each other in every step; lower it"
            )

    def _note_stages(self, note: Note) -> None:
        spec, num_stages = self._spec, self._num_stages
        reason = f"as set: each stage has up to {self.first_shards.layers.size} of {spec.num_layers} layers"
        note("pipeline_parallel_size", num_stages, reason)

    def _note_tensor_ranks(self, note: Note) -> None:
        heads = self.first_shards.heads
        note(
            "tensor_parallel_size",
            self._size,
            f"as set: each rank has up to {heads.queries.size} of {self._spec.num_heads} query heads and "
            f"{heads.kv.size} of {self._spec.num_kv_heads} KV heads",
        )

    def _warn_about_sums(self, warn: Warn) -> None:
        """A small model gains less from several devices than it loses by waiting for them."""
        size, sums = self._size, 2 * self._spec.num_layers + 2
        waits_s = sums * (GPU_ALL_REDUCE_S if self._on_gpu else CPU_ALL_REDUCE_S)
        if not self._on_gpu:
            warn(
                f"tensor_parallel_size={size}: {sums} sums over the ranks are predicted to add {1e3 * waits_s:.1f} ms "
                "to each decode step, and nothing is gained where ranks share the cores and the memory; on one CPU it "
                "is for tests; leave it at 1"
            )
            return
        one_s = 2 * self._spec.num_params / GPU_BYTES_PER_S
        all_s = waits_s + one_s / size
        if waits_s < MAX_WAIT_SHARE * all_s:
            return
        gain = f"{one_s / all_s:.1f} times as fast" if all_s < one_s else f"slower by {all_s / one_s - 1:.0%}"
        warn(
            f"tensor_parallel_size={size}: a decode step of this model is predicted to take {1e3 * all_s:.1f} ms on "
            f"{size} GPUs and {1e3 * one_s:.1f} ms on one ({gain}), since {sums} sums over the ranks take "
            f"{1e3 * waits_s:.1f} ms; {size} engines with tensor_parallel_size=1 answer more requests"
        )
