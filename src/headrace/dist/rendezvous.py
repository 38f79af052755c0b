"""Where the ranks of an engine find each other. Imports no torch until a store is opened.

    one node        a file in its temporary directory; connections over the loopback interface
    several nodes   a store on node 0, on a port that its messages name; connections over the addresses of the nodes

The store is not authenticated: whoever reaches its port can read and write it while the ranks run. So are the
connections of Gloo and NCCL. Nodes need a network that only they use (`engine/nodes` authenticates its own channel).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """The store of a group of ranks, and the address on which other ranks reach this one."""

    path: str | None = None  # of a file; None: `host` and `port` are those of a store
    host: str = LOOPBACK
    port: int = 0
    address: str = LOOPBACK

    @classmethod
    def in_file(cls, path: Path) -> Rendezvous:
        return cls(path=str(path))

    def open(self, timeout: timedelta) -> Any:
        """Opens the store."""
        from torch._C._distributed_c10d import FileStore, TCPStore

        if self.path is None:
            return TCPStore(self.host, self.port, is_master=False, timeout=timeout, wait_for_workers=False)
        store = FileStore(self.path)
        store.set_timeout(timeout)
        return store


class StoreServer:
    """The store of several nodes, on a free port of one address. It lives as long as this object."""

    def __init__(self, host: str) -> None:
        from torch._C._distributed_c10d import TCPStore

        listening = listen(host, 0)  # TCPStore alone listens on all addresses
        self.host, self.port = host, listening.getsockname()[1]
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )

    def rendezvous(self, address: str) -> Rendezvous:
        """For a rank on the node with this address."""
        return Rendezvous(host=self.host, port=self.port, address=address)


def listen(host: str, port: int) -> socket.socket:
    """Listens on one address; port 0 is any free one."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)
