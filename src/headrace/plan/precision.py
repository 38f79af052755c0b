"""Number formats of weights and cache: bytes, and which rate their GEMMs run at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace.config import KvCacheDType, Quantization
from headrace.engine.precision import BYTES_OF, cache_dtype_beside
from headrace.errors import ConfigError, nearest
from headrace.models.quantized import PackedBits
from headrace.plan.gpus import PACKED_RATIO, Gpu

WeightFormat = Literal["bfloat16", "float32", "fp8", "int8", "int4"]
CacheFormat = Literal["auto", "float32", "float16", "bfloat16", "fp8"]

_BITS = {"float32": 32.0, "bfloat16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4.25}  # int4: a scale per 128 weights
_NAMES = {"bf16": "bfloat16", "fp16": "bfloat16", "float16": "bfloat16", "half": "bfloat16", "auto": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Precision:
    """`weights` is the format of the layers' matrices; embeddings, head and norms stay in 16 bits (a CPU: 32)."""

    weights: WeightFormat = "bfloat16"
    cache: CacheFormat = "auto"
    is_wide: bool = False  # what is not quantized is float32, as on a CPU
    packed: PackedBits | None = None  # of a GGUF file's matrices on a CPU

    @property
    def label(self) -> str:
        short = {"bfloat16": "bf16", "float32": "fp32"}.get(self.weights, self.weights.upper())
        if self.packed is not None:
            short = f"{short}, weights of {self.packed.layers:.1f} bits"
        return f"{short}, cache FP8" if self.cache == "fp8" else short

    @property
    def plain_bytes(self) -> int:
        """Bytes of an element that is not quantized."""
        return 4 if self.is_wide or self.weights == "float32" else 2

    @property
    def linear_bytes(self) -> float:
        return (_BITS[self.weights] if self.packed is None else self.packed.layers) / 8

    @property
    def head_bytes(self) -> float:
        return self.plain_bytes if self.packed is None else self.packed.head / 8

    @property
    def cache_bytes(self) -> int:
        if self.cache == "fp8":
            return 1
        dtype = "float32" if self.plain_bytes == BYTES_OF["float32"] else "bfloat16"
        if self.cache == "auto":
            return BYTES_OF[cache_dtype_beside(dtype, is_packed=self.is_quantized or self.packed is not None)]
        return BYTES_OF[self.cache]

    def rate(self, gpu: Gpu) -> float:
        """Peak FLOP/s of the layers' GEMMs. A GPU widens INT4 weights, so they run at the 16-bit rate; a CPU multiplies
        packed weights by integers of 16 bits."""
        if self.is_wide and (self.packed is not None or self.weights == "int4"):
            return PACKED_RATIO * gpu.bf16_rate
        rates = {"fp8": gpu.fp8_rate, "int8": gpu.int8_rate}
        return rates.get(self.weights) or gpu.bf16_rate

    @property
    def quantization(self) -> Quantization | None:
        """The engine's setting for this format."""
        match self.weights:
            case "fp8" | "int8" | "int4":
                return self.weights
            case _:
                return None

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None

    def problem_on(self, gpu: Gpu) -> str | None:
        """Why this GPU cannot compute in this precision."""
        if gpu.is_cpu and self.weights == "fp8":
            return "a CPU computes in float32 or INT8, with weights in float32, INT8 or four bits"
        if gpu.is_cpu and self.cache == "bfloat16":
            return "a CPU has a cache in float32, float16 or FP8"
        if not gpu.is_cpu and self.cache == "float32":
            return "the cache of a GPU is in 16 bits or FP8"
        if not gpu.is_cpu and gpu.fp8_rate is None and (self.weights == "fp8" or self.cache == "fp8"):
            return f"{gpu.name} has no FP8 tensor cores (from compute capability 8.9 on)"
        return None


def read_precision(quantization: str | None, kv_cache_dtype: str, gpu: Gpu) -> Precision:
    """The precision that the user asks for, under vLLM's names, or the engine's default on this device."""
    given = _NAMES.get(quantization or "auto", quantization)
    if given not in _BITS:
        known = ["bfloat16", "fp8", "int8", "int4"]
        raise ConfigError(f"unknown quantization {quantization!r}{nearest(str(quantization), known)}")
    if kv_cache_dtype not in get_args(KvCacheDType):
        raise ConfigError(f"kv_cache_dtype must be one of {', '.join(get_args(KvCacheDType))}, got {kv_cache_dtype!r}")
    if gpu.is_cpu and given == "bfloat16":
        given = "float32"
    cache = "fp8" if kv_cache_dtype == "fp8_e4m3" else kv_cache_dtype
    precision = Precision(given, cache, is_wide=gpu.is_cpu)  # type: ignore[arg-type]
    problem = precision.problem_on(gpu)
    if problem is not None:
        raise ConfigError(f"{precision.label} cannot be planned: {problem}")
    return precision
