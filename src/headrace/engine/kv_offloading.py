"""Tiers of an engine below its KV cache: their sizes (`choose_offload`), and their start (`open_tiers`)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec

from headrace.config import EngineConfig
from headrace.engine.choices import Note
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.kv import Chain
from headrace.kv.chain import DIGEST_BYTES
from headrace.kv.disk_tier import DiskTier
from headrace.models.digests import digest_of_model
from headrace.models.spec import ModelSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GIB = 2**30
DEFAULT_HOST_GIB = 4.0  # with a disk tier alone: its blocks pass through the host
DEFAULT_DISK_GIB = 64.0
MIN_HOST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Offload:
    host_gib: float = 0.0
    disk_gib: float = 0.0
    num_host_blocks: int = 0
    host_block_bytes: int = 0  # over all ranks


def choose_offload(
    config: EngineConfig, *, block_bytes: int, num_ranks: int, num_local_ranks: int, why_not: str | None, note: Note
) -> Offload:
    """The sizes of the tiers. `block_bytes`: of one rank; `why_not`: why this model has no use for them."""
    path, host_gib = config.kv_offload_path, config.kv_offload_gib
    if not path and not host_gib:
        return Offload()
    if why_not is not None:
        name = "kv_offload_gib" if host_gib else "kv_offload_path"
        raise ConfigError(f"{name} keeps cached prefixes that are evicted, and {why_not}; leave it out")
    if config.uses_adapters:
        raise ConfigError(
            "kv_offload_gib and kv_offload_path are not supported with enable_lora: the name of an evicted block does "
            "not tell its adapter yet; leave one of them out"
        )
    if path and num_ranks > 1:
        raise ConfigError(
            "kv_offload_path is not supported with tensor_parallel_size or pipeline_parallel_size: a file would hold "
            "the part of one rank only, and ranks do not agree on which files they have; kv_offload_gib is"
        )
    host_gib = DEFAULT_HOST_GIB if host_gib is None else host_gib
    num_blocks = int(host_gib * GIB) // num_local_ranks // block_bytes
    if num_blocks < MIN_HOST_BLOCKS:
        raise ConfigError(
            f"kv_offload_gib={host_gib:g} holds {num_blocks} blocks of {block_bytes / GIB:.4f} GiB; "
            f"give {MIN_HOST_BLOCKS * block_bytes * num_local_ranks / GIB:.2f} GiB or more"
        )
    given = "as set" if config.kv_offload_gib else "blocks on their way from and to kv_offload_path"
    tokens = num_blocks * config.block_size
    note("kv_offload_gib", f"{host_gib:g}", f"{given}: {num_blocks:,} evicted blocks, {tokens:,} tokens")
    if not path:
        return Offload(host_gib, 0.0, num_blocks, block_bytes * num_ranks)
    disk_gib = config.kv_offload_disk_gib or DEFAULT_DISK_GIB
    num_on_disk = int(disk_gib * GIB) // block_bytes * config.block_size
    given = "as set" if config.kv_offload_disk_gib else "the default"
    note("kv_offload_disk_gib", f"{disk_gib:g}", f"{given}: {num_on_disk:,} tokens in files below {path}")
    return Offload(host_gib, disk_gib, num_blocks, block_bytes)


class HostMemory(Protocol):
    """The host tier's memory, as a runner has it."""

    @property
    def memory(self) -> npt.NDArray[np.uint8]: ...

    def wait(self, step: int, seconds: float) -> bool: ...


@runtime_checkable
class RunnerWithTiers(Protocol):
    @property
    def host_blocks(self) -> HostMemory | None: ...


class OpenedTiers(NamedTuple):
    chain: Chain | None = None
    store: DiskTier | None = None


def open_tiers(
    settings: Settings, config: EngineConfig, spec: ModelSpec, source: Path, host: HostMemory | None
) -> OpenedTiers:
    """The names of blocks, and the disk tier if one was asked for. `source`: the model's files."""
    if settings.kv_offload_path is None or host is None:
        return OpenedTiers()
    about = about_of(settings, config, spec, source, host.memory.shape[1])
    encoded = msgspec.json.encode(about)
    domain = blake2b(encoded, digest_size=DIGEST_BYTES).digest()
    store = DiskTier(
        Path(settings.kv_offload_path).expanduser(),
        domain,
        memory=host.memory,
        wait_for_step=host.wait,
        max_bytes=int(settings.kv_offload_disk_gib * GIB),
        about=msgspec.json.format(encoded),
    )
    return OpenedTiers(Chain(domain), store)


def about_of(
    settings: Settings, config: EngineConfig, spec: ModelSpec, source: Path, block_bytes: int
) -> dict[str, str | int | None]:
    """All that the content of a block depends on, beside its tokens."""
    is_random = config.load_format == "random"
    ropes = [rope for rope in (spec.rope, spec.local_rope) if rope is not None]
    grows = any(rope.kind in ("dynamic", "longrope") for rope in ropes)
    has_e3m4 = settings.kv_dtype == "float8_e4m3fn" and spec.latent is None
    keys = {"keys": "e3m4, mixed in halves"} if has_e3m4 else {}  # with units by the weights: `LayerCache.key_units`
    return {
        "format": 1,
        "model": digest_of_model(source / "config.json" if is_random and source.is_dir() else source),
        "random_seed": config.seed if is_random else None,
        "spec": blake2b(repr(spec).encode(), digest_size=16).hexdigest(),  # hf_overrides change it
        "rotary_len": settings.max_model_len if grows else None,  # frequencies depend on the longest context
        "device": settings.device,
        "dtype": settings.dtype,
        "quantization": settings.quantization,
        "kv_cache_dtype": settings.kv_dtype,
        "block_size": settings.block_size,
        "block_bytes": block_bytes,
        **keys,
    }
