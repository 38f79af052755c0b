"""Recognizes requests of the server's own page, which browsers send with an Origin header as those of any other page.

Only the check of origins uses the Host header. Who may do what is decided by the gate, which does not read it.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

SCHEMES = (b"http", b"https")


def is_own_page(origin: bytes, headers: Iterable[tuple[bytes, bytes]], *, are_keys_required: bool) -> bool:
    """Whether the page comes from the address that it asks.

    The same holds for a page of another site whose name was pointed at this server after the page was loaded (DNS
    rebinding). So a name is accepted only if keys are required, which such a page does not have; an IP address and
    `localhost` cannot be pointed elsewhere.
    """
    scheme, _, authority = origin.lower().partition(b"://")
    asked = [value.lower() for name, value in headers if name == b"host"]
    if scheme not in SCHEMES or asked != [authority]:
        return False
    return are_keys_required or _is_fixed(authority.decode("latin-1"))


def _is_fixed(authority: str) -> bool:
    """Whether it is an IP address or `localhost`, with or without a port."""
    try:
        name = urlsplit(f"//{authority}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False
