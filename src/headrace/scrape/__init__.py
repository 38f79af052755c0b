"""Reads a running server from outside: `client.py` asks over HTTP, `page.py` reads Prometheus' text format,
`names.py` knows the series of Headrace, vLLM and SGLang.

Imports nothing heavy, since `headrace top` must start at once.
"""

from __future__ import annotations
