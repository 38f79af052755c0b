"""The LoRA adapters of `LLM`: loaded when a call first asks for them. Those that a call does not need are unloaded, the
least recently used ones first, if more than `max_loras` are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.adapters import AdapterLimits, LoRARequest
from headrace.engine.client import Client
from headrace.errors import RequestError

Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class OfflineAdapters:
    """Owns which adapters are loaded, the least recently used one first. Calls come one at a time."""

    def __init__(self, client: Client, limits: AdapterLimits | None, given: Mapping[str, str]) -> None:
        self._client = client
        self._limits = limits
        self._paths = dict(given)

    def load(self, requested: Sequence[LoRARequest | None]) -> None:
        """Load those that a call needs and that are not loaded."""
        needed = {each.lora_name: str(each.lora_path) for each in requested if each is not None}
        if not needed:
            return
        if self._limits is None:
            raise RequestError("lora_request needs an engine with enable_lora=True", param="lora_request")
        for name, path in needed.items():
            self._load(name, path, needed)

    def _load(self, name: str, path: str, needed: Mapping[str, str]) -> None:
        assert self._limits is not None
        if self._paths.get(name) != path:
            if name not in self._paths:
                self._make_room(needed, num_excess=len(self._paths) + 1 - self._limits.max_loras)
            self._client.load_adapter(name, path, replaces=True).result()
        self._paths.pop(name, None)
        self._paths[name] = path  # the most recently used one is the last

    def _make_room(self, needed: Mapping[str, str], *, num_excess: int) -> None:
        unneeded = [name for name in self._paths if name not in needed]
        for name in unneeded[: max(0, num_excess)]:
            self._client.unload_adapter(name).result()
            del self._paths[name]


def adapters_of(given: Adapters, num_prompts: int) -> list[LoRARequest | None]:
    """One for each prompt."""
    each = [given] * num_prompts if given is None or isinstance(given, LoRARequest) else list(given)
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts but {len(each)} lora_request values", param="lora_request")
    for one in each:
        if not isinstance(one, LoRARequest | None):
            raise RequestError(f"lora_request must be a LoRARequest, got {one!r}", param="lora_request")
    return each
