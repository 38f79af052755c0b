"""Connects this process to a Ray cluster. The library is imported here only, when it is needed."""

from __future__ import annotations

import importlib
import socket
from typing import Any

from headrace.errors import ConfigError

CONNECT_S = 5.0
INSTALL = "pip install 'headrace[ray]' on every machine of the cluster"


def import_ray(flag: str) -> Any:
    """`flag`: what the user has set to need it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(f"{flag} needs the library ray, which is not installed: {INSTALL}") from error


def connect(ray: Any, address: str) -> bool:
    """Connect to the cluster at `address` (HOST:PORT, or 'auto' for the one that this machine belongs to). False: this
    process was connected before."""
    if ray.is_initialized():
        return False
    if address != "auto":
        _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except Exception as error:  # noqa: BLE001  ray raises many kinds
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"no Ray cluster at {address}: {first}; run this command on a machine of the cluster ('ray start')"
        ) from None
    return True


def _check_address(address: str) -> None:
    """Ray itself waits for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ConfigError(f"--ray {address}: give HOST:PORT, as 'ray start --head' prints it, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None
