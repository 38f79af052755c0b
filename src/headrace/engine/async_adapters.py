"""The LoRA adapters of `AsyncEngine`: loaded and unloaded while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.adapters import LoRARequest
from headrace.engine.client import Client
from headrace.errors import RequestError


class AsyncAdapters:
    """Owns which adapters are loaded. Called on the event loop."""

    def __init__(self, client: Client, given: Mapping[str, str]) -> None:
        self._client = client
        self._paths = dict(given)

    @property
    def paths(self) -> Mapping[str, str]:
        """The path of each by name."""
        return self._paths

    async def name_of(self, request: LoRARequest | None) -> str | None:
        """The name of the adapter that a call asks for, which is loaded first if it is not yet."""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, got {request!r}", param="lora_request")
        name, path = request.lora_name, str(request.lora_path)
        if self._paths.get(name, path) != path:
            raise RequestError(
                f"the adapter {name!r} is loaded from {self._paths[name]}, not from "
                f"{path}; unload it, or give this one another name",
                param="lora_request",
            )
        if name not in self._paths:
            await self.load(name, path)
        return name

    async def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        await asyncio.wrap_future(self._client.load_adapter(name, path, replaces=replaces))
        self._paths[name] = path

    async def unload(self, name: str) -> None:
        await asyncio.wrap_future(self._client.unload_adapter(name))
        self._paths.pop(name, None)
