"""Where replicas come from: addresses, a file of addresses that may change, and DNS names that have several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from headrace.errors import ConfigError, reason_of
from headrace.scrape.client import UnreachableError, base_address

DNS = "dns+"  # dns+http://name:8000: every address that the name has is a replica


class Sources:
    """The addresses that were given, and those in the file at this moment."""

    def __init__(self, given: Sequence[str], file: Path | None = None) -> None:
        self._given = [_checked(text) for text in given]
        self._file = file
        self._seen: tuple[int, int] | None = None  # time and size of the file that was read
        self._from_file: list[str] = []
        self._resolved: dict[str, list[str]] = {}
        if file is not None:
            self._from_file = self._read(file)
        if not (self._given or file):
            raise ConfigError("no replica is given: name their addresses, or a file of them with --replicas-file")

    def reload(self) -> str | None:
        """Read the file again if it has changed. Returns what is wrong with it; the old addresses stay then."""
        if self._file is None:
            return None
        try:
            stat = self._file.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._seen:
                self._from_file = self._read(self._file)
        except OSError as error:
            return f"{self._file} cannot be read: {error.strerror or error}"
        except ConfigError as error:
            return str(error)
        return None

    def _read(self, file: Path) -> list[str]:
        try:
            stat = file.stat()
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of replicas {file} cannot be read: {reason_of(error)}") from error
        self._seen = (stat.st_mtime_ns, stat.st_size)
        return [_checked(line.strip()) for line in lines if line.strip() and not line.lstrip().startswith("#")]

    async def addresses(self) -> list[str]:
        """All replicas, each once. A name that cannot be resolved keeps its last addresses."""
        found: list[str] = []
        for address in (*self._given, *self._from_file):
            found += await self._resolve(address) if address.startswith(DNS) else [address]
        return list(dict.fromkeys(found))

    async def _resolve(self, address: str) -> list[str]:
        parts = urlsplit(address.removeprefix(DNS))
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except socket.gaierror:
            return self._resolved.get(address, [])
        hosts: Iterable[str] = sorted({str(each[4][0]) for each in found})
        shown = (f"[{host}]" if ":" in host else host for host in hosts)
        self._resolved[address] = [f"{parts.scheme}://{host}:{port}" for host in shown]
        return self._resolved[address]


def _checked(text: str) -> str:
    prefix = DNS if text.startswith(DNS) else ""
    try:
        address = base_address(text.removeprefix(DNS))
    except UnreachableError as error:
        raise ConfigError(str(error)) from None
    if urlsplit(address).username is not None:
        raise ConfigError("the address of a replica must not have a user or password: clients send their own keys")
    return prefix + address
