"""How the ranks of an engine find each other: by a file, or on several nodes by a store at an address. Imports no torch
until it is opened."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`address`: of this rank, at which others connect to it."""

    path: str | None = None  # of the file, or:
    host: str = LOOPBACK  # of the store
    port: int = 0
    address: str = LOOPBACK

    def open(self, timeout_s: float) -> Any:
        """The store that all ranks write their addresses to."""
        from torch._C import _distributed_c10d as dist

        timeout = timedelta(seconds=timeout_s)
        if self.path is None:
            return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)
        store = dist.FileStore(self.path)
        store.set_timeout(timeout)
        return store
