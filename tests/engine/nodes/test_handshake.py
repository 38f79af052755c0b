from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.engine.nodes.handshake import (
    SECRET_VARIABLE,
    HandshakeError,
    prove_as_node,
    prove_as_node_0,
    secret_of,
)
from headrace.errors import ConfigError

SECRET = b"a secret of the nodes"


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


def test_both_ends_with_the_secret_prove_it(ends: tuple[socket.socket, socket.socket]) -> None:
    with ThreadPoolExecutor(1) as executor:
        node = executor.submit(prove_as_node, ends[1], SECRET)
        prove_as_node_0(ends[0], SECRET)
        node.result()


def test_a_node_refuses_a_node_0_with_another_secret(ends: tuple[socket.socket, socket.socket]) -> None:
    with ThreadPoolExecutor(1) as executor:
        node_0 = executor.submit(prove_as_node_0, ends[0], b"another one, as long")
        with pytest.raises(HandshakeError, match="another secret"):
            prove_as_node(ends[1], SECRET)
        ends[1].close()
        with pytest.raises(ConnectionError, match="ended the connection"):
            node_0.result()


def test_node_0_refuses_an_answer_that_was_sent_back_to_it(ends: tuple[socket.socket, socket.socket]) -> None:
    """Without the secret, all that an intruder has is what node 0 has sent."""
    with ThreadPoolExecutor(1) as executor:
        node_0 = executor.submit(prove_as_node_0, ends[0], SECRET)
        ends[1].sendall(b"headrace nodes 1" + bytes(32))
        answer = ends[1].recv(64, socket.MSG_WAITALL)
        ends[1].sendall(answer[32:])
        with pytest.raises(HandshakeError, match="another secret"):
            node_0.result()


def test_node_0_refuses_whatever_else_connects(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[1].sendall(b"GET / HTTP/1.1\r\nHost: a-name-that-is-long-enough\r\n\r\n")
    with pytest.raises(HandshakeError, match="no node of Headrace"):
        prove_as_node_0(ends[0], SECRET)


def test_a_short_secret_is_refused() -> None:
    assert secret_of({SECRET_VARIABLE: SECRET.decode()}) == SECRET
    for environment in ({}, {SECRET_VARIABLE: "short"}):
        with pytest.raises(ConfigError, match=f"{SECRET_VARIABLE}, of at least 16 characters"):
            secret_of(environment)
