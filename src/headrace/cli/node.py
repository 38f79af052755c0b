"""Hosts the ranks of a node above 0: `headrace serve --headless`, and `run` and `serve` with --node-rank above 0."""

from __future__ import annotations

import signal
from types import FrameType

from headrace.cli.fetching import fetch_if_missing
from headrace.cli.messages import print_line
from headrace.config import EngineConfig


def host_node(config: EngineConfig) -> int:
    """Host this node's ranks until node 0 ends, or a signal. Returns the exit code."""
    from headrace.engine.nodes.handshake import secret_of
    from headrace.engine.nodes.node_host import Node0, NodeHost
    from headrace.hardware import visible_gpus
    from headrace.models import open_checkpoint

    node_0 = Node0(config.master_addr, config.master_port, secret_of())
    fetch_if_missing(config.model)
    open_checkpoint(config.model, revision=config.revision, load_format=config.load_format)  # downloads it once
    num_gpus = 0 if config.device == "cpu" else len(visible_gpus())
    host = NodeHost(config, node_0, print_line, num_gpus=num_gpus)

    def stop(number: int, frame: FrameType | None) -> None:
        host.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    host.run()
    return 0
