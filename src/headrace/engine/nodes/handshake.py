"""Proves on a new connection that both ends know the secret of the nodes, which is never sent.

    node I ─▶ node 0   magic, nonce
    node 0 ─▶ node I   nonce, HMAC of both nonces
    node I ─▶ node 0   HMAC of both nonces, of the other direction

The connection is not encrypted afterwards: it keeps out whoever can reach the port, not whoever can read the network.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Mapping
from time import monotonic

from headrace.errors import ConfigError

SECRET_VARIABLE = "HEADRACE_NODES_SECRET"
MIN_SECRET_LEN = 16
HANDSHAKE_S = 5.0  # for all of it

_MAGIC = b"headrace nodes 1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32  # of SHA-256
_NODE_0, _NODE_I = b"node 0", b"node I"  # who proves: an answer cannot be sent back as one's own


class HandshakeError(ConnectionError):
    """The other end does not know the secret."""


def secret_of(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret that all nodes have in their environment."""
    text = environment.get(SECRET_VARIABLE, "")
    if len(text) < MIN_SECRET_LEN:
        raise ConfigError(
            f"several nodes need the same secret in {SECRET_VARIABLE}, of at least {MIN_SECRET_LEN} characters (here: "
            f"{len(text)}), so that nobody else can join; make one with: openssl rand -hex 32"
        )
    return text.encode()


def prove_as_node_0(connection: socket.socket, secret: bytes) -> None:
    """Raises an OSError if the other end is too slow or has gone; a HandshakeError if it does not know the secret."""
    deadline = monotonic() + HANDSHAKE_S
    greeting = _read(connection, len(_MAGIC) + _NONCE_BYTES, deadline)
    if not greeting.startswith(_MAGIC):
        raise HandshakeError("it is no node of Headrace, or of another version")
    theirs, ours = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(ours + _proof(secret, _NODE_0, theirs, ours))
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES, deadline), _proof(secret, _NODE_I, theirs, ours)):
        raise HandshakeError("it has another secret")


def prove_as_node(connection: socket.socket, secret: bytes) -> None:
    """The other end of `prove_as_node_0`, with the same errors."""
    deadline = monotonic() + HANDSHAKE_S
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_MAGIC + ours)
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, _NODE_0, ours, theirs)):
        raise HandshakeError("it has another secret, or is no node of Headrace")
    connection.sendall(_proof(secret, _NODE_I, ours, theirs))


def _proof(secret: bytes, who: bytes, nonce_i: bytes, nonce_0: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + who + nonce_i + nonce_0, "sha256")


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(0.001, deadline - monotonic()))
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("it ended the connection")
        data += received
    connection.settimeout(None)
    return data
