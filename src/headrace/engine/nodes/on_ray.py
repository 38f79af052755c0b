"""Starts the hosts of other nodes on a Ray cluster: a placement group with one bundle per node, one actor in each.

    node 0: this process, in bundle 0      node I: NodeActor ─▶ NodeHost ─▶ its ranks

Ray only reserves the GPUs and starts the hosts. They join by the same channel as nodes that a user starts, with a
secret of this engine that Ray carries. When this process ends, Ray ends the actors, and with them their ranks.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.nodes.node_host import Node0, NodeHost
from headrace.engine.nodes.ray_connection import connect, import_ray
from headrace.errors import ConfigError
from headrace.hardware import visible_gpus

FLAG = "distributed_executor_backend='ray'"
PLACE_S = 60.0  # for a place on the cluster: other programs may be about to end
OWN_NODE_SHARE = 0.001  # of the resource that every node has under its address, so that bundle 0 is on this node

OnEnd = Callable[[int, str], None]  # of a node: its number and why

_log = logging.getLogger(__name__)


class NodeActor:
    """Hosts the ranks of a node of the cluster, in a process of Ray."""

    def run(self, config: EngineConfig, host: str, port: int, secret: str) -> None:
        from headrace.models import open_checkpoint

        open_checkpoint(config.model, revision=config.revision, load_format=config.load_format)  # downloads it once
        num_gpus = 0 if config.device == "cpu" else len(visible_gpus())
        node_0 = Node0(host, port, secret.encode())
        # A restarted engine starts actors of its own.
        NodeHost(config, node_0, _log.warning, num_gpus=num_gpus, connect_s=0.0, rejoin_s=0.0).run()


class RayNodes:
    """Owns the placement group and the actors of one engine."""

    def __init__(self, nnodes: int, *, num_ranks: int, on_gpus: bool) -> None:
        """Reserve a place for `num_ranks` on each node. This node must belong to the cluster."""
        self._ray = import_ray(FLAG)
        self._is_ours = connect(self._ray, "auto")
        self.address: str = self._ray.util.get_node_ip_address()
        self._resources = {"num_cpus": 0, "num_gpus": num_ranks} if on_gpus else {"num_cpus": num_ranks}
        bundle = {"GPU": num_ranks} if on_gpus else {"CPU": num_ranks}
        own = bundle | {f"node:{self.address}": OWN_NODE_SHARE}
        self._group = self._ray.util.placement_group([own, *[bundle] * (nnodes - 1)], strategy="STRICT_SPREAD")
        self._actors: list[Any] = []
        if not self._group.wait(PLACE_S):
            self.close()
            kind = "GPUs" if on_gpus else "CPUs"
            raise ConfigError(
                f"the Ray cluster did not have {nnodes} nodes with {num_ranks} {kind} free on each in {PLACE_S:.0f} s, "
                "this node being one of them; lower the sizes, or add nodes"
            )

    def start(self, config: EngineConfig, secret: str, *, port: int, on_end: OnEnd) -> None:
        """Start a host on each other node, which joins at this node's address. `on_end` is called on a thread, when a
        host has ended."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor_class = self._ray.remote(NodeActor)
        for node in range(1, config.nnodes):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
            actor = actor_class.options(scheduling_strategy=place, max_restarts=0, **self._resources).remote()
            self._actors.append(actor)
            running = actor.run.remote(replace(config, node_rank=node), self.address, port, secret)
            threading.Thread(target=self._watch, args=(node, running, on_end), daemon=True).start()

    def close(self) -> None:
        """End the hosts and give their places back. May be called again."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._ignoring_errors(partial(self._ray.kill, actor))
        self._ignoring_errors(partial(self._ray.util.remove_placement_group, self._group))
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()

    def _ignoring_errors(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  of ray: it has gone, or the connection has
            _log.debug("a node of the cluster could not be ended: %s", error)

    def _watch(self, node: int, running: Any, on_end: OnEnd) -> None:
        try:
            self._ray.get(running)
        except Exception as error:  # noqa: BLE001  of ray, or of the host
            last = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
            on_end(node, f"its actor on the Ray cluster has ended: {last or type(error).__name__}")
