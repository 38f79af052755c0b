"""The settings that a plan takes, under vLLM's names, and how the engine would resolve the rest on a named device."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.adapters import DEFAULT_MAX_RANK, MAX_LORAS, MAX_RANK, AdapterLimits
from headrace.config import MAX_OFFLOAD_GB, EngineConfig
from headrace.engine.memory_budget import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from headrace.engine.resolve import resolve
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts, MachineFacts
from headrace.models.adapter_spec import adapter_bytes
from headrace.models.spec import ModelSpec, RopeSpec
from headrace.plan.gpus import Gpu
from headrace.plan.precision import Precision
from headrace.plan.shape import ModelShape
from headrace.plan.simulate import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """None: as the engine would choose. Parallel sizes of None are chosen by `layout`."""

    quantization: str | None = None  # "fp8", "int8", "int4"; None: the checkpoint's 16 bits
    kv_cache_dtype: str = "auto"
    num_gpus: int = 1
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    enable_expert_parallel: bool = False
    gpu_memory_utilization: float | None = None
    cpu_offload_gb: float = 0.0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    max_loras: int = 0  # LoRA adapters on the device at once
    max_lora_rank: int = DEFAULT_MAX_RANK

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"the number of GPUs must be at least 1, got {self.num_gpus}")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.cpu_offload_gb < MAX_OFFLOAD_GB:
            raise ConfigError(f"cpu_offload_gb must be a number of GiB of at least 0, got {self.cpu_offload_gb:g}")
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_RANK)):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be from 0 to {most}, got {getattr(self, name)}")

    def memory_share(self, gpu: Gpu) -> float:
        return self.gpu_memory_utilization or (CPU_MEMORY_SHARE if gpu.is_cpu else GPU_MEMORY_SHARE)

    def engine_config(self, gpu: Gpu, precision: Precision, num_blocks: int) -> EngineConfig:
        on_gpu = not gpu.is_cpu
        return EngineConfig(
            device="cuda" if on_gpu else "cpu",
            quantization=precision.quantization,
            kv_cache_dtype=precision.cache,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_gpu_blocks_override=num_blocks,
            gpu_memory_utilization=self.gpu_memory_utilization,
        )


def resolve_for(
    shape: ModelShape, gpu: Gpu, precision: Precision, settings: PlanSettings, *, num_blocks: int
) -> Settings:
    """What the engine decides on this device if its cache has this many blocks."""
    facts = MachineFacts(
        cpu_model=gpu.title,
        num_cores=1,
        total_memory=gpu.memory_bytes,
        free_memory=gpu.memory_bytes,
        gpu=None if gpu.is_cpu else GpuFacts(gpu.title, gpu.memory_bytes, gpu.memory_bytes, gpu.capability),
    )
    config = settings.engine_config(gpu, precision, max(1, num_blocks))
    return resolve(config, shape.spec or _stand_in(shape), facts)


def adapter_bytes_of(shape: ModelShape, precision: Precision, settings: PlanSettings) -> int:
    """Of the tables of LoRA adapters, which every GPU has whole."""
    limits = AdapterLimits(max_loras=settings.max_loras, max_rank=settings.max_lora_rank)
    return adapter_bytes(shape.spec or _stand_in(shape), limits, int(precision.plain_bytes))


def limits_of(settings: Settings) -> StepLimits:
    return StepLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        cache_tokens=settings.num_blocks * settings.block_size,
        block_size=settings.block_size,
        min_free_slots_to_start=settings.min_free_slots_to_start,
        full_step_tokens=settings.full_step_tokens,
        full_rate_seqs=settings.full_rate_seqs,
    )


def _stand_in(shape: ModelShape) -> ModelSpec:
    """A spec with the numbers that `resolve` reads, for models that the engine does not run."""
    head_dim = max(2, shape.q_size // shape.num_heads)
    return ModelSpec(
        family="planned",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.mlp_width,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=head_dim,
        max_model_len=shape.max_model_len,
        norm_eps=1e-5,
        rope=RopeSpec(),
        windows=(None,) * shape.num_layers,
        dtype=shape.dtype,
    )
