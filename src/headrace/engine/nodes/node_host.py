"""The process of a node above 0: it hosts the node's ranks for the engine on node 0.

    main thread       joins, then gives what node 0 sends to the ranks; sends heartbeats
    a thread per rank sends its replies to node 0, and reports its end (`engine/ranks/rank_process.py`)

It ends with node 0's engine. If that engine has failed, or cannot be reached any more, the ranks are killed at once and
the node tries to join again, for `REJOIN_S`: a server's supervisor, or the server's own, starts the engine anew.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from headrace.config import EngineConfig
from headrace.engine.nodes import wire
from headrace.engine.nodes.handshake import HANDSHAKE_S, SECRET_VARIABLE, HandshakeError, prove_as_node
from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import ProcessHealth
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.process.wire import Failed
from headrace.engine.ranks import wire as ranks_wire
from headrace.engine.ranks.rank_process import CHECK_S, HEARTBEAT_S, TIMEOUT_S, RankProcess
from headrace.errors import ConfigError, EngineDeadError
from headrace.version import __version__

CONNECT_S = 30.0  # for node 0 to listen: it opens the model first
# The same after a failure. Restarts are delayed, by 31 s in all for the five of a server, and each imports torch.
REJOIN_S = 300.0
RETRY_S = 0.5
CLOSE_S = 10.0  # for the ranks to end by themselves

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Node0:
    """Where node 0 listens, and the secret that it knows."""

    host: str
    port: int
    secret: bytes

    def __str__(self) -> str:
        return f"node 0 at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Membership:
    """This node's part of an engine."""

    channel: Channel
    joined: wire.Joined
    first_payloads: Sequence[bytes]  # that came with the answer


class NodeHost:
    """Hosts the ranks of this node, for one engine after the other."""

    def __init__(
        self,
        config: EngineConfig,
        node_0: Node0,
        say: Say,
        *,
        num_gpus: int,
        connect_s: float = CONNECT_S,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self._config = config
        self._node_0 = node_0
        self._say = say
        self._num_gpus = num_gpus
        self._connect_s = connect_s
        self._rejoin_s = rejoin_s
        self._stopping = threading.Event()

    def run(self) -> None:
        """Host ranks until node 0 ends in order, or `stop`. Raises an EngineDeadError if it cannot be reached, and a
        ConfigError if it refuses this node."""
        timeout_s = self._connect_s
        while (membership := self._join(timeout_s)) is not None:
            ranks = HostedRanks(membership, self._config.node_rank)
            self._say(f"node {self._config.node_rank} has joined {self._node_0}: it runs {ranks}")
            problem = ranks.serve(self._stopping)
            if problem is None:
                return
            timeout_s = self._rejoin_s
            self._say(f"{problem}; the ranks of this node were ended; trying for {timeout_s:.0f} s to join again")

    def stop(self) -> None:
        """End the ranks and return from `run`. From any thread, or a handler of a signal."""
        self._stopping.set()

    def _join(self, timeout_s: float) -> Membership | None:
        """Try until node 0 takes this node. None: stopped."""
        deadline, has_told = monotonic() + timeout_s, False
        while not self._stopping.is_set():
            try:
                return self._try_to_join()
            except HandshakeError as error:
                raise ConfigError(
                    f"what answers as {self._node_0} does not prove to be it: {error}; {SECRET_VARIABLE} must be the "
                    "same on all nodes, and --master-addr and --master-port those of node 0"
                ) from error
            except OSError as error:
                reason = error.strerror or str(error)
                if monotonic() >= deadline:
                    raise EngineDeadError(
                        f"{self._node_0} did not take this node in {timeout_s:.0f} s: {reason}; start it, or correct "
                        "--master-addr and --master-port"
                    ) from error
                if not has_told:
                    self._say(f"{self._node_0} does not take this node yet: {reason}; trying for {timeout_s:.0f} s")
                    has_told = True
            self._stopping.wait(RETRY_S)
        return None

    def _try_to_join(self) -> Membership:
        connection = socket.create_connection((self._node_0.host, self._node_0.port), HANDSHAKE_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove_as_node(connection, self._node_0.secret)
            channel = Channel(connection)
            channel.send(wire.encode(self._introduction(connection.getsockname()[0])))
            payloads = channel.receive(HANDSHAKE_S)
            if not payloads:
                raise ConnectionError("it ended the connection")
            answer = wire.decode_answer(payloads[0])
            if isinstance(answer, wire.Refused) and answer.is_final:
                raise ConfigError(f"{self._node_0} refuses this node: {answer.text}")
            if isinstance(answer, wire.Refused):
                raise ConnectionError(answer.text)
            return Membership(channel, answer, payloads[1:])
        except BaseException:
            connection.close()
            raise

    def _introduction(self, address: str) -> wire.Join:
        settings = wire.settings_to_agree(self._config)
        return wire.Join(self._config.node_rank, __version__, settings, socket.gethostname(), address, self._num_gpus)


class HostedRanks:
    """Owns the channel to node 0 and the ranks of one engine on this node (`RankOwner`)."""

    def __init__(self, membership: Membership, node_rank: int) -> None:
        self._channel, joined = membership.channel, membership.joined
        self._first_payloads = membership.first_payloads
        numbers = range(joined.first_rank, joined.first_rank + joined.num_ranks)
        self._ranks = [RankProcess(self, rank, f"rank {rank} of {joined.size} on node {node_rank}") for rank in numbers]
        self._is_closing = False

    def __str__(self) -> str:
        first, last = self._ranks[0].rank, self._ranks[-1].rank
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    def serve(self, stopping: threading.Event) -> str | None:
        """Run the ranks until node 0 closes the engine. Returns why it ended otherwise."""
        for rank in self._ranks:
            rank.start()
        try:
            return self._serve(stopping)
        finally:
            for rank in self._ranks:
                rank.kill()
            for rank in self._ranks:
                rank.join(CLOSE_S)
            self._channel.close()

    def _serve(self, stopping: threading.Event) -> str | None:
        check, health, heartbeat_at = HealthCheck(TIMEOUT_S, monotonic), ProcessHealth(), 0.0
        payloads: Sequence[bytes] | None = self._first_payloads
        while payloads is not None and not stopping.is_set() and not self._has_closed:
            health = health._replace(num_frames=health.num_frames + len(payloads))
            for payload in payloads:
                self._give(*wire.address_and_frame(payload))
            if (problem := check.problem(health)) is not None:
                return f"node 0 cannot be reached: {problem}"
            if monotonic() >= heartbeat_at:
                heartbeat_at = monotonic() + HEARTBEAT_S
                self._send(wire.THE_HOST, wire.HEARTBEAT)
            payloads = self._channel.receive(CHECK_S)
        return None if self._is_closing or stopping.is_set() else "node 0 has ended the connection"

    @property
    def _has_closed(self) -> bool:
        return self._is_closing and all(rank.has_ended for rank in self._ranks)

    def _give(self, rank: int, frame: bytes) -> None:
        if frame == wire.HEARTBEAT:
            return
        self._is_closing |= frame == wire.CLOSE
        for each in self._ranks:
            if rank in (each.rank, wire.ALL_RANKS):
                each.send(frame)

    # ---- on the ranks' threads

    def took(self, rank: int, frame: bytes) -> None:
        if frame != wire.HEARTBEAT:
            self._send(rank, frame)

    def ended(self, error: EngineDeadError) -> None:
        self._send(wire.THE_HOST, ranks_wire.encode(Failed(EngineDeadError.__name__, str(error))))

    def _send(self, rank: int, frame: bytes) -> None:
        try:
            self._channel.send(wire.addressed(rank, frame))
        except OSError:
            pass  # node 0 has gone, which the main thread notices
