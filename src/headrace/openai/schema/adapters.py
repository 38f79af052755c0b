"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, and SageMaker's POST /adapters."""

from __future__ import annotations

from msgspec import Struct


class LoadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load."""

    lora_name: str | None = None
    lora_path: str | None = None  # a directory on the server's machine
    load_inplace: bool | None = None  # replaces the adapter of the same name


class SageMakerAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to load, in SageMaker's words."""

    name: str | None = None
    src: str | None = None  # a directory on the server's machine


class UnloadAdapterRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter to unload."""

    lora_name: str | None = None
    lora_int_id: int | None = None  # of vLLM, not used: the name is enough
