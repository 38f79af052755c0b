"""The nodes of an engine beside node 0: their links, and the listener by which they join."""

from __future__ import annotations

import secrets
import shlex
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.nodes.handshake import secret_of
from headrace.engine.nodes.node_link import NodeLink
from headrace.engine.nodes.node_listener import NodeListener
from headrace.engine.settings import Settings

if TYPE_CHECKING:
    from headrace.engine.nodes.on_ray import RayNodes


class OtherNodes:
    """Owns the listener, and the actors if Ray starts the nodes. The links belong to the ranks' owner."""

    def __init__(self, config: EngineConfig, settings: Settings) -> None:
        self.address = config.master_addr  # of node 0
        self._ray: RayNodes | None = None
        if config.distributed_executor_backend == "ray":
            self._listener = self._on_ray(config, settings)
        else:
            self._listener = NodeListener(config, secret_of(), host=self.address, port=config.master_port)
        self.links = [
            NodeLink(
                node,
                settings.ranks_of_node(node),
                command_of(config, node, self._listener.port),
                size=settings.num_ranks,
            )
            for node in range(1, settings.nnodes)
        ]
        self._listener.accept_for(self.links)
        if self._ray is not None:
            self._ray.start(config, self._secret, port=self._listener.port, on_end=self._on_end)

    def _on_ray(self, config: EngineConfig, settings: Settings) -> NodeListener:
        """Nodes that Ray starts get the address, a free port and a secret of this engine from Ray."""
        from headrace.engine.nodes.on_ray import RayNodes

        self._ray = RayNodes(settings.nnodes, num_ranks=settings.ranks_per_node, on_gpus=settings.device == "cuda")
        self.address, self._secret = self._ray.address, secrets.token_hex(32)
        return NodeListener(config, self._secret.encode(), host=self.address, port=0)

    def _on_end(self, node_rank: int, text: str) -> None:
        self.links[node_rank - 1].fail(text)

    def link_of(self, rank: int) -> NodeLink | None:
        """The node that has a rank; None: node 0."""
        return next((link for link in self.links if rank in link.ranks), None)

    def close(self) -> None:
        self._listener.close()
        if self._ray is not None:
            self._ray.close()


def command_of(config: EngineConfig, node_rank: int, port: int) -> str:
    """What a user runs on another node."""
    sizes = {"-tp": config.tensor_parallel_size, "-pp": config.pipeline_parallel_size}
    words = ["headrace", "serve", str(config.model), "--headless"]
    words += [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]
    words += ["--enable-expert-parallel"] if config.enable_expert_parallel else []
    words += ["--revision", config.revision] if config.revision is not None else []
    words += ["--load-format", config.load_format] if config.load_format != "auto" else []
    words += ["--nnodes", str(config.nnodes), "--node-rank", str(node_rank)]
    return shlex.join([*words, "--master-addr", config.master_addr, "--master-port", str(port)])
