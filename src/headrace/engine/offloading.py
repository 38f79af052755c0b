"""Decides which weights stay in host memory, and says what that costs: a part of `resolve`."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.engine.choices import Note
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.hardware.host_link import HostLink, pcie
from headrace.models.quantized import Kind
from headrace.models.shards import Shards
from headrace.models.streamed_layers import NONE_STREAMED, StreamedLayers, choose_streamed
from headrace.models.weight_sizes import WeightSizes, weight_sizes

GIB = 2**30
USUAL_LINK = pcie(4)  # of a GPU whose link is not known


def sizes_of(shards: Shards, *, element_bytes: int, kind: Kind | None) -> WeightSizes:
    """The weights of one rank. `kind`: how the layers' matrices are quantized in memory."""
    at_load = shards.whole.quantization is None
    return weight_sizes(shards, element_bytes=element_bytes, kind=kind, at_load=at_load)


def streamed_layers(sizes: WeightSizes, cpu_offload_gb: float) -> StreamedLayers:
    """The layers of one rank that stream."""
    return choose_streamed(sizes.layers, int(cpu_offload_gb * GIB)) if cpu_offload_gb else NONE_STREAMED


def gpu_bytes(sizes: WeightSizes, streamed: StreamedLayers) -> int:
    """Bytes of the weights on the GPU, buffers included."""
    return sizes.total - streamed.freed_bytes


def refuse_offload(config: EngineConfig, facts: MachineFacts, streamed: StreamedLayers, *, num_local: int) -> None:
    """Refuses what cannot run; `num_local`: ranks on this node, each with its own weights."""
    given, needed = config.cpu_offload_gb, streamed.num_bytes * num_local
    speculative = config.speculative
    if speculative is not None and speculative.num_layers is not None:
        raise ConfigError(
            f"cpu_offload_gb={given:g} and speculative decoding with the model's own first layers (early_exit) do not "
            "go together: each drafted token would copy these layers again; use method ngram or a draft model"
        )
    if needed > facts.free_memory:
        ranks = f" for {num_local} ranks" if num_local > 1 else ""
        raise ConfigError(
            f"cpu_offload_gb={given:g} needs {needed / GIB:.1f} GiB of host memory{ranks}, and "
            f"{facts.free_memory / GIB:.1f} GiB are free; lower it, free memory, or use --quantization fp8 or int4"
        )


def describe_offload(config: EngineConfig, streamed: StreamedLayers, *, num_layers: int, note: Note) -> None:
    number, less = len(streamed.indexes), streamed.freed_bytes / GIB
    stream = f"{number} of {num_layers} layers stream from {streamed.num_bytes / GIB:.2f} GiB of host memory"
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


def _link(facts: MachineFacts) -> tuple[HostLink, bool]:
    found = None if facts.gpu is None else facts.gpu.host_link
    return (USUAL_LINK, False) if found is None else (found, True)
