"""Nodes join node 0, which refuses those that do not belong to the engine. Without processes and torch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from threading import Event

import pytest

from headrace.config import EngineConfig
from headrace.engine.nodes import node_host, wire
from headrace.engine.nodes.node_host import Membership, Node0, NodeHost
from headrace.engine.nodes.node_link import NodeLink
from headrace.engine.nodes.node_listener import NodeListener
from headrace.errors import ConfigError, EngineDeadError

SECRET = b"a secret of the nodes"
CONFIG = EngineConfig(model="m", pipeline_parallel_size=2, nnodes=2)


@pytest.fixture
def link() -> NodeLink:
    return NodeLink(1, range(1, 2), "the command", size=2)


@pytest.fixture
def node_0(link: NodeLink) -> Iterator[Node0]:
    listener = NodeListener(CONFIG, SECRET, host="127.0.0.1", port=0)
    listener.accept_for([link])
    yield Node0("127.0.0.1", listener.port, SECRET)
    listener.close()


def host_of(node_0: Node0, said: list[str] | None = None, **changes: object) -> NodeHost:
    config = replace(CONFIG, **{"node_rank": 1} | changes)  # type: ignore[arg-type]
    return NodeHost(config, node_0, ([] if said is None else said).append, num_gpus=0, connect_s=0.0)


def test_a_node_joins_after_connections_that_were_refused(node_0: Node0, link: NodeLink) -> None:
    with socket.create_connection((node_0.host, node_0.port)) as foreign:
        foreign.sendall(b"GET / HTTP/1.1\r\nHost: a-name-that-is-long-enough\r\n\r\n")
        with suppress(ConnectionResetError):
            assert foreign.recv(1) == b""  # node 0 has closed it
    silent = socket.create_connection((node_0.host, node_0.port))  # holds no one up
    membership = host_of(node_0)._try_to_join()
    silent.close()
    assert membership.joined == wire.Joined(first_rank=1, num_ranks=1, size=2)
    assert link._has_joined_in(60) and link.node.address == "127.0.0.1"
    membership.channel.close()
    assert link._joined is not None
    link._joined.channel.close()  # as its thread does


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other"}, "model is 'other' there, and 'm' on node 0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2 there, and 1 on node 0"),
        ({"nnodes": 3, "node_rank": 2}, "nnodes is 3 there, and 2 on node 0"),
    ],
)
def test_a_node_with_other_settings_is_refused_with_the_values(
    node_0: Node0, link: NodeLink, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        host_of(node_0, **changes).run()
    assert not link.has_joined


def test_a_node_with_another_secret_is_refused(node_0: Node0, link: NodeLink) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_NODES_SECRET must be the same on all nodes"):
        host_of(replace(node_0, secret=b"another secret, as long")).run()
    assert not link.has_joined


def test_a_wrong_address_is_told_at_once(unused_tcp_port: int) -> None:
    said: list[str] = []
    host = host_of(Node0("127.0.0.1", unused_tcp_port, SECRET), said)
    host._connect_s = 0.6
    with pytest.raises(EngineDeadError, match=f"node 0 at 127.0.0.1:{unused_tcp_port} did not take this node"):
        host.run()
    assert len(said) == 1 and "does not take this node yet: Connection refused" in said[0]


def test_an_address_of_another_machine_is_refused_by_node_0() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:0: .*; master_addr must be an address of"):
        NodeListener(CONFIG, SECRET, host="192.0.2.1", port=0)


@pytest.fixture
def unused_tcp_port() -> Iterator[int]:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody else gets it, and nothing listens
        yield unused.getsockname()[1]


def test_a_node_that_joined_before_may_try_until_its_place_is_free(node_0: Node0, link: NodeLink) -> None:
    """As when the engine that it belonged to has not ended yet, and another follows on the same port."""
    link._is_closed = True
    said: list[str] = []
    host = host_of(node_0)

    def say(text: str) -> None:
        said.append(text)
        link._is_closed = False

    host._say = say
    membership = host._join(60.0)
    assert membership is not None and link._has_joined_in(60)
    assert len(said) == 1 and "node 1 has joined before, or the engine has ended" in said[0]
    membership.channel.close()
    assert link._joined is not None
    link._joined.channel.close()


class RanksThatEnd:
    def __init__(self, membership: Membership, node_rank: int) -> None:
        pass

    def serve(self, stopping: Event) -> str:
        return "node 0 has ended the connection"


def test_a_node_whose_engine_has_failed_tries_longer_than_at_first(
    node_0: Node0, link: NodeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    membership = host_of(node_0)._try_to_join()
    assert link._has_joined_in(60)
    host = host_of(node_0)
    host._connect_s, host._rejoin_s = 1.0, 7.0

    def join(timeout_s: float) -> Membership | None:
        asked.append(timeout_s)
        return None if len(asked) == 3 else membership

    monkeypatch.setattr(host, "_join", join)
    monkeypatch.setattr(node_host, "HostedRanks", RanksThatEnd)
    host.run()
    assert asked == [1.0, 7.0, 7.0]
    assert link._joined is not None
    for channel in (membership.channel, link._joined.channel):
        channel.close()
