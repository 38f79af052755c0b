"""How a model is spread over several GPUs: replicas, tensor and pipeline parallelism, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.errors import ConfigError
from headrace.plan.gpus import Gpu
from headrace.plan.settings import PlanSettings
from headrace.plan.shape import ModelShape


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """`replicas` copies of the model, each on tensor x pipeline GPUs."""

    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    whole_experts: bool = False  # tensor ranks divide the experts, not the matrices of each

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tensor * self.pipeline

    @property
    def label(self) -> str:
        parts = []
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.tensor > 1:
            parts.append(f"tensor parallel {self.tensor}{' with whole experts' if self.whole_experts else ''}")
        if self.pipeline > 1:
            parts.append(f"pipeline parallel {self.pipeline}")
        return " x ".join(parts) or "one GPU"

    @property
    def short(self) -> str:
        """For narrow tables: "2 x TP4 PP2"."""
        sizes = [f"TP{self.tensor}"] * (self.tensor > 1) + ["EP"] * self.whole_experts
        sizes += [f"PP{self.pipeline}"] * (self.pipeline > 1)
        return f"{self.replicas} x {' '.join(sizes) or '1 GPU'}" if self.replicas > 1 else " ".join(sizes) or "1 GPU"


def layouts(shape: ModelShape, gpu: Gpu, settings: PlanSettings) -> list[Layout]:
    """The layouts of so many GPUs that are possible, those with the fewest GPUs per replica first."""
    found = sorted(_possible(shape, gpu, settings), key=lambda each: (each.tensor * each.pipeline, each.pipeline))
    if not found:
        raise ConfigError(_no_layout(shape, gpu, settings))
    return found


def _possible(shape: ModelShape, gpu: Gpu, settings: PlanSettings) -> Iterator[Layout]:
    total, whole_experts = settings.num_gpus, settings.enable_expert_parallel
    for tensor in _divisors(total):
        if whole_experts and not has_experts_for(shape, tensor):
            continue
        for pipeline in _divisors(total // tensor):
            is_wanted = settings.tensor_parallel_size in (None, tensor)
            is_wanted &= settings.pipeline_parallel_size in (None, pipeline)
            is_possible = divides(shape, tensor) and tensor <= gpu.gpus_per_node and pipeline <= shape.num_layers
            is_possible &= not shape.state_bytes or tensor * pipeline == 1  # recurrent states are not divided yet
            is_usual = settings.pipeline_parallel_size is not None or _has_use_for(pipeline, tensor, shape, gpu)
            if is_wanted and is_possible and is_usual:
                yield Layout(total // (tensor * pipeline), tensor, pipeline, whole_experts)


def _has_use_for(pipeline: int, tensor: int, shape: ModelShape, gpu: Gpu) -> bool:
    """Stages are for slow links, for several nodes, and for heads that do not divide; otherwise tensor parallelism
    alone is as fast and has no bubbles."""
    whole = tensor * pipeline
    return pipeline == 1 or gpu.link == "PCIe" or whole > gpu.gpus_per_node or not divides(shape, whole)


def divides(shape: ModelShape, tensor: int) -> bool:
    """Whether heads can be divided: query heads evenly, key-value heads evenly or each copied evenly."""
    kv = shape.num_kv_heads
    return shape.num_heads % tensor == 0 and (kv % tensor == 0 or tensor % kv == 0)


def has_experts_for(shape: ModelShape, tensor: int) -> bool:
    """Whether the experts of a layer can be divided over so many ranks, as a whole."""
    return shape.experts is not None and 1 < tensor <= shape.experts.num_experts


def reason(chosen: Layout, shape: ModelShape, gpu: Gpu, *, min_gpus: int, is_forced: bool) -> str:
    """Why this layout: what needs several GPUs, what divides, and over which links they talk."""
    if is_forced:
        return "as set"
    if chosen.num_gpus == 1:
        return "the model fits on one GPU"
    parts = []
    if min_gpus == 1:
        parts.append("the model fits on one GPU")
    else:
        parts.append(f"weights and cache need at least {min_gpus} GPUs")
    if chosen.replicas > 1:
        parts.append("replicas share nothing, so they lose nothing to communication")
    if chosen.tensor > 1:
        parts.append(f"{shape.num_heads} query and {shape.num_kv_heads} key-value heads divide by {chosen.tensor}")
        speed = f"{gpu.link_bandwidth / 1e9:,.0f} GB/s per direction"
        fast = "fast enough for two all-reduces per layer" if gpu.link != "PCIe" else "which the all-reduces wait for"
        parts.append(f"{gpu.link} of {speed} inside the node, {fast}")
    if chosen.pipeline > 1:
        across = "across nodes" if chosen.tensor * chosen.pipeline > gpu.gpus_per_node else "which sends little data"
        parts.append(f"{shape.num_layers} layers in {chosen.pipeline} stages, {across}")
    return "; ".join(parts)


def _no_layout(shape: ModelShape, gpu: Gpu, settings: PlanSettings) -> str:
    if shape.state_bytes:
        return (
            f"{shape.name} has layers with a recurrent state, which are not divided over ranks yet; leave "
            "tensor_parallel_size and pipeline_parallel_size at 1"
        )
    if settings.enable_expert_parallel:
        num_experts = 0 if shape.experts is None else shape.experts.num_experts
        return (
            f"no layout of {settings.num_gpus} GPUs with enable_expert_parallel: it divides the experts of a layer "
            f"({num_experts}) over 2 or more tensor-parallel GPUs of a node; leave it out, or raise the number of GPUs"
        )
    sizes = ", ".join(str(n) for n in range(1, gpu.gpus_per_node + 1) if divides(shape, n))
    return (
        f"no layout of {settings.num_gpus} GPUs: {shape.num_heads} query and {shape.num_kv_heads} key-value heads "
        f"allow tensor parallel sizes {sizes} within a node of {gpu.gpus_per_node}, and sizes that are set must "
        f"divide {settings.num_gpus}"
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
