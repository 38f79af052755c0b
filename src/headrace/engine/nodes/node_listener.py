"""The socket on which node 0 waits for the other nodes. It is closed when all have joined."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Mapping, Sequence

import msgspec

from headrace.config import EngineConfig
from headrace.dist.rendezvous import listen
from headrace.engine.nodes import wire
from headrace.engine.nodes.handshake import HANDSHAKE_S, prove_as_node_0
from headrace.engine.nodes.node_link import JoinedNode, NodeLink
from headrace.engine.process.channel import Channel
from headrace.errors import ConfigError
from headrace.version import __version__

MAX_HANDSHAKES = 32  # at a time; further connections are closed
CHECK_S = 0.2
# The engine may be about to end, and its successor takes the node.
TAKEN = "node {node} has joined before, or the engine has ended; give each node its own node_rank"

_log = logging.getLogger(__name__)


class NodeListener:
    """Owns the socket. A thread accepts; each connection is checked on a thread of its own."""

    def __init__(self, config: EngineConfig, secret: bytes, *, host: str, port: int) -> None:
        """`port`: 0 for any free one."""
        self._config = config
        self._secret = secret
        self._links: Sequence[NodeLink] = ()
        self._closing = threading.Event()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        self._told: set[str] = set()  # hosts whose connections were refused
        self._told_nodes: list[wire.Join] = []  # nodes that were refused
        try:
            self._socket = listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen on {host}:{port}: {error.strerror or error}; master_addr must be an address of "
                "the machine that runs node 0, and master_port must be free there"
            ) from error
        self.port: int = self._socket.getsockname()[1]

    def accept_for(self, links: Sequence[NodeLink]) -> None:
        """Take the nodes of these links, on a thread, until all have joined or `close`."""
        self._links = links
        threading.Thread(target=self._accept, name="headrace-nodes", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _accept(self) -> None:
        self._socket.settimeout(CHECK_S)
        with self._socket:
            while not self._closing.is_set() and not all(link.has_joined for link in self._links):
                try:
                    connection, peer = self._socket.accept()
                except TimeoutError:
                    continue
                if self._handshakes.acquire(blocking=False):
                    threading.Thread(target=self._check, args=(connection, peer[0]), daemon=True).start()
                else:
                    connection.close()

    def _check(self, connection: socket.socket, host: str) -> None:
        try:
            self._take(connection)
        except (OSError, msgspec.MsgspecError) as error:
            connection.close()
            if host not in self._told:
                self._told.add(host)
                _log.warning("a connection from %s was refused: %s", host, error)
        finally:
            self._handshakes.release()

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(HANDSHAKE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove_as_node_0(connection, self._secret)
        channel = Channel(connection)
        frames = channel.receive(HANDSHAKE_S)
        if not frames:
            raise ConnectionError("it did not say which node it is")
        join = wire.decode_join(frames[0])
        links = {link.node_rank: link for link in self._links}
        problem = problem_of(join, self._config, links)
        if problem is None and links[join.node_rank].attach(JoinedNode(channel, join)):
            return
        refused = wire.Refused(problem or TAKEN.format(node=join.node_rank), is_final=problem is not None)
        channel.send(wire.encode(refused))
        channel.drain(HANDSHAKE_S)
        channel.close()
        if join not in self._told_nodes:  # a node that was started twice tries again and again
            self._told_nodes.append(join)
            _log.warning("%s was refused as node %d: %s", join.hostname, join.node_rank, refused.text)


def problem_of(join: wire.Join, config: EngineConfig, links: Mapping[int, NodeLink]) -> str | None:
    """Why a node may never join."""
    if join.version != __version__:
        return f"it has Headrace {join.version}, and node 0 has {__version__}; install the same version"
    expected = wire.settings_to_agree(config)
    for name in wire.MUST_AGREE:
        if join.settings.get(name) != expected[name]:
            return f"{name} is {join.settings.get(name)!r} there, and {expected[name]!r} on node 0; set the same value"
    if join.node_rank not in links:
        return f"node_rank={join.node_rank} is not one of {', '.join(map(str, links))}"
    return None
