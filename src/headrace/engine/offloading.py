"""Decides which weights stay in host memory, and says what that costs: a part of `resolve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.engine.choices import Note
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.hardware.host_link import HostLink, pcie
from headrace.models.quantized import Kind
from headrace.models.shards import Shards
from headrace.models.streamed_layers import NONE_STREAMED, StreamedLayers, choose_streamed, with_layers_on_disk
from headrace.models.weight_sizes import WeightSizes, weight_sizes

GIB = 2**30
USUAL_LINK = pcie(4)  # of a GPU whose link is not known
HOST_SHARE = 0.9  # of the free host memory, if what does not fit goes to a disk
DISK_BYTES_PER_S = 7e9  # a fast NVMe disk of PCIe 4.0: what is possible, not what this machine has


def sizes_of(shards: Shards, *, element_bytes: int, kind: Kind | None) -> WeightSizes:
    """The weights of one rank. `kind`: how the layers' matrices are quantized in memory."""
    at_load = shards.whole.quantization is None
    return weight_sizes(shards, element_bytes=element_bytes, kind=kind, at_load=at_load)


@dataclass(frozen=True, slots=True)
class WeightOffload:
    """Where the weights are that the GPU does not hold: see `Settings`."""

    cpu_offload_gb: float = 0.0
    path: str | None = None
    host_bytes: int = 0


def choose_weight_offload(
    config: EngineConfig, facts: MachineFacts, streamed: StreamedLayers, *, layers: Sequence[int], num_local: int
) -> tuple[WeightOffload, StreamedLayers]:
    """Returns where the streamed layers of a rank are; refuses what cannot run. `layers`: bytes of each layer of the
    rank; `num_local`: ranks on this node, each with its own weights."""
    host_bytes = int(facts.free_memory * HOST_SHARE) // num_local
    placed = None if config.cpu_offload_path is None else with_layers_on_disk(streamed, layers, host_bytes)
    _refuse_offload(config, facts, placed or streamed, num_local=num_local)
    if placed is None or not placed.disk_indexes:
        return WeightOffload(config.cpu_offload_gb), streamed
    return WeightOffload(config.cpu_offload_gb, config.cpu_offload_path, host_bytes), placed


def streamed_layers(sizes: WeightSizes, cpu_offload_gb: float) -> StreamedLayers:
    """The layers of one rank that stream."""
    return choose_streamed(sizes.layers, int(cpu_offload_gb * GIB)) if cpu_offload_gb else NONE_STREAMED


def gpu_bytes(sizes: WeightSizes, streamed: StreamedLayers) -> int:
    """Bytes of the weights on the GPU, buffers included."""
    return sizes.total - streamed.freed_bytes


def _refuse_offload(config: EngineConfig, facts: MachineFacts, streamed: StreamedLayers, *, num_local: int) -> None:
    given, needed = config.cpu_offload_gb, streamed.host_bytes * num_local
    speculative = config.speculative
    if speculative is not None and speculative.num_layers is not None:
        raise ConfigError(
            f"cpu_offload_gb={given:g} and speculative decoding with the model's own first layers (early_exit) do not "
            "go together: each drafted token would copy these layers again; use method ngram or a draft model"
        )
    if speculative is not None and streamed.disk_indexes:
        raise ConfigError(
            f"speculative decoding is not supported with layers in cpu_offload_path, and {len(streamed.disk_indexes)} "
            "do not fit in host memory; leave out one of them"
        )
    if needed > facts.free_memory:
        ranks = f" for {num_local} ranks" if num_local > 1 else ""
        raise ConfigError(
            f"cpu_offload_gb={given:g} needs {needed / GIB:.1f} GiB of host memory{ranks}, and "
            f"{facts.free_memory / GIB:.1f} GiB are free; lower it, free memory, or use --quantization fp8 or int4"
            + ("" if config.cpu_offload_path else "; or give the rest a place on a local disk with --cpu-offload-path")
        )


def describe_offload(config: EngineConfig, streamed: StreamedLayers, *, num_layers: int, note: Note) -> None:
    number, less = len(streamed.indexes), streamed.freed_bytes / GIB
    stream = f"{number} of {num_layers} layers stream from {streamed.host_bytes / GIB:.2f} GiB of host memory"
    if streamed.disk_indexes:
        on_disk = f"{streamed.disk_bytes / GIB:.2f} GiB on disk ({len(streamed.disk_indexes)} layers)"
        stream += f" and {on_disk}, without CUDA graphs"
    elif config.cpu_offload_path is not None:
        stream += "; cpu_offload_path is not needed"
    buffers = f"buffers of {streamed.buffer_bytes / GIB:.2f} GiB included"
    is_all = streamed.freed_bytes < int(config.cpu_offload_gb * GIB)
    most = f"; with all {num_layers} layers no more is possible" if is_all else ""
    note(
        "cpu_offload_gb", f"{config.cpu_offload_gb:g}", f"{stream}; the GPU holds {less:.2f} GiB less, {buffers}{most}"
    )


def offload_warning(facts: MachineFacts, streamed: StreamedLayers, *, max_num_seqs: int) -> str:
    """What the copies allow at most, whatever is computed."""
    link, is_known = _link(facts)
    rate, copied = link.copy_bytes_per_s, streamed.num_bytes
    seconds = copied / rate
    source = link.name if is_known else f"{link.name} is assumed"
    return (
        f"every step copies {copied / GIB:.1f} GiB of weights to the GPU: at {rate / 1e9:.0f} GB/s ({source}) it takes "
        f"at least {seconds * 1000:,.0f} ms, so one sequence gets up to {1 / seconds:,.1f} tokens/s, and "
        f"{max_num_seqs:,} together up to {max_num_seqs / seconds:,.0f}; a lower cpu_offload_gb, "
        "--quantization fp8 or int4, or more GPUs are faster"
    )


def disk_warning(streamed: StreamedLayers) -> str:
    """What a disk allows at most."""
    seconds = streamed.disk_bytes / DISK_BYTES_PER_S
    return (
        f"every step reads {streamed.disk_bytes / GIB:.1f} GiB of weights from a disk: it takes at least "
        f"{seconds:,.1f} s at {DISK_BYTES_PER_S / 1e9:.0f} GB/s, as fast as one NVMe disk gets; a server restarts an "
        "engine whose step takes longer than --step-timeout-s; more host memory or --quantization int4 is faster"
    )


def _link(facts: MachineFacts) -> tuple[HostLink, bool]:
    found = None if facts.gpu is None else facts.gpu.host_link
    return (USUAL_LINK, False) if found is None else (found, True)
