"""Models: what they are (spec, families), where they come from (sources, cache, checkpoint), how they run (decoder).

Names are resolved on first use, so that a command that only prints never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.models.cache import CachedModel, cache_directory, cached_models, remove
    from headrace.models.checkpoint import Checkpoint, open_checkpoint
    from headrace.models.decoder import Decoder
    from headrace.models.sources import fetch, locate
    from headrace.models.spec import ModelSpec, RopeSpec
    from headrace.models.weights.load import load_decoder

__all__ = [
    "CachedModel",
    "Checkpoint",
    "Decoder",
    "ModelSpec",
    "RopeSpec",
    "cache_directory",
    "cached_models",
    "fetch",
    "load_decoder",
    "locate",
    "open_checkpoint",
    "remove",
]

_HOMES = {
    "CachedModel": "cache",
    "Checkpoint": "checkpoint",
    "Decoder": "decoder",
    "ModelSpec": "spec",
    "RopeSpec": "spec",
    "cache_directory": "cache",
    "cached_models": "cache",
    "fetch": "sources",
    "load_decoder": "weights.load",
    "locate": "sources",
    "open_checkpoint": "checkpoint",
    "remove": "cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
