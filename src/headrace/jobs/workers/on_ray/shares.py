"""How many actors a Ray cluster holds, and each one's part of its node.

GPUs in the cluster     a GPU per rank of an actor's engine; its threads: their part of the smallest such node
CPUs only               --num-threads cores per actor; without it, as many as let all workers find a place;
                        'auto': one actor per node
memory of a CPU         divided by the actors that fit on the largest node
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.config import EngineConfig
from headrace.engine.memory_budget import CPU_MEMORY_SHARE
from headrace.engine.shares import EngineShare


@dataclass(frozen=True, slots=True)
class Node:
    """What a node of the cluster offers to actors, used or not."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True)
class ActorPlan:
    """What each actor asks of Ray, and its share of the node that it gets."""

    num_workers: int
    num_cpus: int
    num_gpus: int
    share: EngineShare


def plan_actors(config: EngineConfig, nodes: Sequence[Node], num_workers: int | None) -> ActorPlan:
    """`num_workers`: those that the user wants; None: as many as the nodes hold now, at least one."""
    with_gpus = [node for node in nodes if node.num_gpus] if config.device != "cpu" else []
    if with_gpus:
        return _on_gpus(config, with_gpus, num_workers)
    return _on_cpus(config, [node for node in nodes if node.num_cpus], num_workers)


def _on_gpus(config: EngineConfig, nodes: Sequence[Node], num_workers: int | None) -> ActorPlan:
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    num_threads = max(1, min(size * node.num_cpus // node.num_gpus for node in nodes))
    share = EngineShare(
        config=config if config.num_threads is not None else replace(config, num_threads=num_threads),
        reasons={
            "device": f"{'one GPU' if size == 1 else f'{size} GPUs'} per actor, chosen by Ray",
            "num_threads": "cores per GPU of the smallest node with GPUs",
        },
    )
    # Without CPUs of its own: a node may offer GPUs and no CPUs to Ray.
    return ActorPlan(
        num_workers=num_workers or max(1, sum(node.num_gpus // size for node in nodes)),
        num_cpus=0,
        num_gpus=size,
        share=share,
    )


def _on_cpus(config: EngineConfig, nodes: Sequence[Node], num_workers: int | None) -> ActorPlan:
    num_cpus = config.num_threads or _cores_per_worker(nodes, num_workers)
    per_node = [node.num_cpus // num_cpus for node in nodes]
    num_sharing = max([1, *per_node])
    reasons, changes = {"num_threads": "the cores that its actor has asked Ray for"}, {}
    is_sized = config.kv_cache_memory_bytes is not None or config.num_gpu_blocks_override is not None
    if num_sharing > 1 and not is_sized:
        whole = config.gpu_memory_utilization or CPU_MEMORY_SHARE
        changes["gpu_memory_utilization"] = whole / num_sharing
        reasons["num_blocks"] = f"up to {num_sharing} actors on a node divide {whole:.0%} of its free memory"
    share = EngineShare(
        config=replace(config, num_threads=num_cpus, **changes),  # type: ignore[arg-type]
        num_sharing=num_sharing,
        reasons=reasons,
    )
    return ActorPlan(num_workers=num_workers or max(1, sum(per_node)), num_cpus=num_cpus, num_gpus=0, share=share)


def _cores_per_worker(nodes: Sequence[Node], num_workers: int | None) -> int:
    """The largest number with which all workers find a place, at least 1."""
    largest = max((node.num_cpus for node in nodes), default=1)
    if num_workers is None:
        return min((node.num_cpus for node in nodes), default=1)
    for num_cpus in range(largest, 1, -1):
        if sum(node.num_cpus // num_cpus for node in nodes) >= num_workers:
            return num_cpus
    return 1
