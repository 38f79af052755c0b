"""POST /start_profile and /stop_profile. A body is optional: vLLM's clients send none."""

from __future__ import annotations

from msgspec import Struct


class StartProfileRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """How a window is recorded."""

    max_seconds: float | None = None
    max_steps: int | None = None
    tool: str | None = None  # torch or cuda
    name: str | None = None  # of the files
    engine: int | None = None  # its number on a server with several; default: 0


class StopProfileRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """What is returned beside the names of the files."""

    analyse: bool | None = None  # the report; default: yes
    picture: bool | None = None  # the page with the pictures; default: no
    keep: bool | None = None  # the files; default: yes
