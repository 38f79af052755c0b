"""The channel of node 0 to the host of another node, whose ranks are part of the engine."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from time import monotonic

from headrace.engine.nodes import wire
from headrace.engine.process.channel import Channel
from headrace.engine.process.engine_process import ProcessHealth
from headrace.engine.process.health_check import HealthCheck
from headrace.engine.process.wire import Failed
from headrace.engine.ranks.rank_process import CHECK_S, HEARTBEAT_S, TIMEOUT_S, RankOwner
from headrace.engine.ranks.wire import decode_reply
from headrace.errors import EngineDeadError, MachineLostError

JOIN_S = 300.0  # for a node to join: its machine may have to start, and to download the model
TELL_AFTER_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedNode:
    channel: Channel
    join: wire.Join


class NodeLink:
    """Owns the channel to one node, and the thread that receives from it (`RanksElsewhere`)."""

    def __init__(self, node_rank: int, ranks: range, command: str, *, size: int) -> None:
        """`command`: what a user runs on that node. `size`: the number of ranks on all nodes."""
        self.node_rank = node_rank
        self.ranks = ranks
        self._size = size
        self._command = command
        self._joined: JoinedNode | None = None
        self._is_closed = False
        self._problem: str | None = None
        self._changed = threading.Condition()
        self._owner: RankOwner | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace-node-{node_rank}", daemon=True)

    @property
    def node(self) -> wire.Join:
        """What the node has told when it joined."""
        assert self._joined is not None
        return self._joined.join

    @property
    def has_joined(self) -> bool:
        return self._joined is not None

    def attach(self, node: JoinedNode) -> bool:
        """Let a node join. False: it had before, or the engine has ended."""
        with self._changed:
            if self._joined is not None or self._is_closed:
                return False
            node.channel.send(wire.encode(wire.Joined(self.ranks.start, len(self.ranks), self._size)))
            self._joined = node
            self._changed.notify_all()
        return True

    def fail(self, text: str) -> None:
        """What should host the node has ended. Of a node that has joined, the channel tells."""
        with self._changed:
            self._problem = text
            self._changed.notify_all()

    # ---- for the ranks' owner

    def start(self, owner: RankOwner) -> None:
        self._owner = owner
        self._thread.start()

    def send(self, frame: bytes) -> None:
        self._send(wire.ALL_RANKS, frame)

    def send_to(self, rank: int, frame: bytes) -> None:
        if rank in self.ranks:
            self._send(rank, frame)

    def join(self, timeout_s: float) -> None:
        if self._joined is not None:
            self._thread.join(timeout_s)

    def kill(self) -> None:
        """Hang up: the host ends its ranks then."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._joined is not None:
            self._joined.channel.hang_up()

    def _send(self, rank: int, frame: bytes) -> None:
        if self._joined is None:
            return
        try:
            self._joined.channel.send(wire.addressed(rank, frame))
        except OSError:
            pass  # its thread reports why it has gone

    # ---- on its thread

    def _run(self) -> None:
        assert self._owner is not None
        if not self._has_joined_in(TELL_AFTER_S) and not self._is_closed and self._problem is None:
            _log.warning("node %d has not joined yet; run on it: %s", self.node_rank, self._command)
        if self._has_joined_in(JOIN_S):
            self._receive(self._owner)
        elif not self._is_closed:
            text = self._problem or f"it did not join in {JOIN_S:.0f} s; run on it: {self._command}"
            self._owner.ended(MachineLostError(f"node {self.node_rank}: {text}"))

    def _has_joined_in(self, timeout_s: float) -> bool:
        """Wait until the node has joined, at most for `timeout_s`; not if it never will."""
        with self._changed:
            self._changed.wait_for(lambda: self._joined or self._is_closed or self._problem, timeout_s)
            return self._joined is not None

    def _receive(self, owner: RankOwner) -> None:
        assert self._joined is not None
        channel, name = self._joined.channel, f"node {self.node_rank} ({self.node.hostname}, {self.node.address})"
        check, health, heartbeat_at = HealthCheck(TIMEOUT_S, monotonic), ProcessHealth(), 0.0
        while (payloads := channel.receive(CHECK_S)) is not None:
            health = health._replace(num_frames=health.num_frames + len(payloads))
            for payload in payloads:
                self._take(owner, *wire.address_and_frame(payload))
            if (problem := check.problem(health)) is not None:
                owner.ended(MachineLostError(f"{name} cannot be reached: {problem}"))
                break
            if monotonic() >= heartbeat_at:
                heartbeat_at = monotonic() + HEARTBEAT_S
                self._send(wire.ALL_RANKS, wire.HEARTBEAT)
        else:
            owner.ended(MachineLostError(f"{name} has ended the connection: it was stopped, or the network failed"))
        channel.close()

    def _take(self, owner: RankOwner, rank: int, frame: bytes) -> None:
        if rank != wire.THE_HOST:
            owner.took(rank, frame)
        elif frame != wire.HEARTBEAT:
            reply = decode_reply(frame)
            assert isinstance(reply, Failed)
            owner.ended(EngineDeadError(reply.text))
