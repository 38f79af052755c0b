"""HTTP transport: connection limits, authentication, request bodies, routing, server-sent events, errors, shutdown."""

from __future__ import annotations
