"""Models cached on this machine: our own cache directory, and the hub's. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config import EMBEDDED_MODEL
from headrace.errors import ModelError, nearest
from headrace.models.quantized import PackedBits

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_BITS = PackedBits(layers=5.0, head=8.5, embeddings=8.5)  # of its weights in the memory of a CPU


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str  # what --model takes
    path: Path
    num_bytes: int


def cache_directory() -> Path:
    """HEADRACE_CACHE, or else `headrace` in the user's cache directory."""
    if chosen := os.environ.get("HEADRACE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"


def models_directory() -> Path:
    return cache_directory() / "models"


def embedded_path() -> Path:
    return models_directory() / EMBEDDED_FILE


def cached_models() -> list[CachedModel]:
    """Lists our own models first, then those of the hub's cache."""
    return _own_models() + _hub_models()


def remove(name: str) -> CachedModel:
    """Deletes a cached model and returns it."""
    models = {model.name: model for model in cached_models()}
    if name not in models:
        known = ", ".join(models) or "none"
        raise ModelError(f"no model {name!r} is cached{nearest(name, models)} (cached: {known})")
    model = models[name]
    if models_directory() in model.path.parents:
        model.path.unlink()
    else:
        _remove_from_hub(name)
    return model


def _own_models() -> list[CachedModel]:
    directory = models_directory()
    paths = sorted(directory.glob("*.gguf")) if directory.is_dir() else []
    return [CachedModel(_own_name(path), path, path.stat().st_size) for path in paths]


def _own_name(path: Path) -> str:
    return EMBEDDED_MODEL if path.name == EMBEDDED_FILE else str(path)


def _hub_models() -> list[CachedModel]:
    info = scan_hub()
    repos = [] if info is None else sorted(_model_repos(info), key=lambda repo: repo.repo_id)
    return [CachedModel(repo.repo_id, repo.repo_path, repo.size_on_disk) for repo in repos]


def _model_repos(info: HFCacheInfo) -> list[CachedRepoInfo]:
    return [repo for repo in info.repos if repo.repo_type == "model"]


def scan_hub() -> HFCacheInfo | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _remove_from_hub(name: str) -> None:
    info = scan_hub()
    repos = [] if info is None else [repo for repo in _model_repos(info) if repo.repo_id == name]
    for repo in repos:
        assert info is not None
        info.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
