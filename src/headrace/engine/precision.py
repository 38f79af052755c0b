"""Chooses the number formats of an engine: what it computes in, and how weights and KV cache are stored. A part of
`resolve`."""

from __future__ import annotations

from headrace.config import EngineConfig, Quantization
from headrace.engine.choices import Note
from headrace.errors import ConfigError
from headrace.hardware import MachineFacts
from headrace.hardware.facts import dotted
from headrace.models.quantized import StoredQuantization
from headrace.models.spec import ModelSpec

BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
FP8_CAPABILITY = (8, 9)  # compute capability from which a GPU has FP8 tensor cores: Ada, Hopper
_QUANTIZED: dict[Quantization, str] = {
    "fp8": "weights and activations of the layers in eight bits",
    "int8": "weights and activations of the layers in eight bits",
    "int4": "weights of the layers in four bits",
}


def cache_dtype_beside(dtype: str, *, is_packed: bool) -> str:
    """The type of keys and values where none is set. A CPU with weights of fewer bits rounds activations to 16 bits or
    less for its GEMMs, so keys and values need not have more."""
    return "float16" if dtype == "float32" and is_packed else dtype


class Precision:
    """The formats that the config, the model and the device allow together."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, facts: MachineFacts, *, on_gpu: bool, note: Note) -> None:
        self._config, self._spec, self._facts = config, spec, facts
        self._on_gpu, self._note = on_gpu, note

    def choose_dtype(self) -> str:
        if self._on_gpu:
            return self._choose_gpu_dtype()
        if self._config.dtype not in ("auto", "float32"):
            raise ConfigError(f"dtype={self._config.dtype!r} is not supported on a CPU, which computes in float32")
        self._note("dtype", "float32", "what a CPU multiplies fastest, and exact for every checkpoint type")
        return "float32"

    def _choose_gpu_dtype(self) -> str:
        if self._config.dtype == "float32":
            raise ConfigError("dtype='float32' is not supported on a GPU; use 'bfloat16' or 'float16'")
        if self._config.dtype != "auto":
            self._note("dtype", self._config.dtype, "as set")
            return self._config.dtype
        value = "float16" if self._spec.dtype == "float16" else "bfloat16"
        self._note("dtype", value, f"the checkpoint has {self._spec.dtype}")
        return value

    def choose_quantization(self, dtype: str) -> Quantization | None:
        given, stored = self._config.quantization, self._spec.quantization
        if given is not None and stored is not None and given != stored.kind:
            raise ConfigError(
                f"quantization={given!r} does not fit the checkpoint, whose weights are {stored.kind} "
                f"({stored.method}); leave it out"
            )
        if stored is not None:
            return self._choose_stored(stored, dtype)
        if given is not None:
            self._check_quantization(given, dtype)
            self._note("quantization", given, f"as set: {_QUANTIZED[given]}")
        elif not self._on_gpu and self._spec.packed_bits is not None:
            bits = self._spec.packed_bits.layers
            self._note("quantization", None, f"weights keep the {bits:.1f} bits of the GGUF file; GEMMs are in float32")
        return given

    def _choose_stored(self, stored: StoredQuantization, dtype: str) -> Quantization | None:
        """The form in which a quantized checkpoint's matrices are kept in memory."""
        if not self._stays_packed(stored):
            reason = "its activations are not quantized" if not stored.stays_packed else self._why_cpu_widens
            self._note("quantization", None, f"{stored.kind} weights ({stored.method}) are dequantized: {reason}")
            return None
        self._check_quantization(stored.kind, dtype)
        self._note("quantization", stored.kind, f"as stored ({stored.method}): {_QUANTIZED[stored.kind]}")
        return stored.kind

    def choose_kv_dtype(self, dtype: str) -> str:
        given = self._config.kv_cache_dtype
        if given == "auto":
            return self._automatic_cache(dtype)
        if given in ("fp8", "fp8_e4m3"):
            return self._fp8_cache(f"kv_cache_dtype={given!r}")
        allowed = (dtype,) if self._on_gpu else ("float32", "float16")
        if given not in allowed:
            where = f"a GPU that computes in {dtype}" if self._on_gpu else "a CPU"
            known = " or ".join(repr(each) for each in (*allowed, "fp8"))
            raise ConfigError(f"kv_cache_dtype={given!r} is not supported on {where}; use {known}")
        self._check_narrow_cache(f"kv_cache_dtype={given!r}", is_narrow=given != dtype)
        self._note("kv_cache_dtype", given, "as set" if given == dtype else "as set: twice the tokens of float32")
        return given

    def _automatic_cache(self, dtype: str) -> str:
        packs = self._facts.multiplies_packed and (self._spec.packed_bits or self.kind_in_memory)
        value = cache_dtype_beside(dtype, is_packed=bool(packs))
        if value != dtype:
            reason = "half the bytes to read; the activations of packed weights are not in float32 either"
            self._note("kv_cache_dtype", value, reason)
        return value

    def _fp8_cache(self, what: str) -> str:
        if self._on_gpu:
            self._check_fp8(what)
        else:
            self._check_narrow_cache(what, is_narrow=True)
        reason = "twice the tokens, half the bytes to read" if self._on_gpu else "four times the tokens of float32"
        self._note("kv_cache_dtype", "float8_e4m3fn", f"as set: {reason}")
        return "float8_e4m3fn"

    def _check_narrow_cache(self, what: str, *, is_narrow: bool) -> None:
        if is_narrow and not self._on_gpu and not self._facts.multiplies_packed:
            raise ConfigError(f"{what} needs a GPU or x86 with AVX2; this CPU has a cache in float32")

    @property
    def kind_in_memory(self) -> Quantization | None:
        """How the layers' matrices are quantized in memory."""
        stored = self._spec.quantization
        if stored is None:
            return self._config.quantization
        return stored.kind if self._stays_packed(stored) else None

    def _stays_packed(self, stored: StoredQuantization) -> bool:
        return stored.stays_packed_on("cuda" if self._on_gpu else "cpu") and (
            self._on_gpu or self._facts.multiplies_packed
        )

    @property
    def _why_cpu_widens(self) -> str:
        if self._facts.multiplies_packed:
            return "a CPU computes in float32 or INT8, with weights in float32, INT8 or four bits"
        return "this CPU computes in float32 (INT8 and four bits need x86 with AVX2)"

    def _check_quantization(self, kind: Quantization, dtype: str) -> None:
        if kind == "fp8":
            self._check_fp8("quantization='fp8'")
            if dtype != "bfloat16":
                raise ConfigError("quantization='fp8' computes in bfloat16; set dtype='bfloat16'")
        elif not self._on_gpu and not self._facts.multiplies_packed:
            raise ConfigError(f"quantization={kind!r} needs a GPU: {self._why_cpu_widens}")

    def _check_fp8(self, what: str) -> None:
        gpu = self._facts.gpu
        if not self._on_gpu or gpu is None:
            raise ConfigError(f"{what} needs a GPU: {self._why_cpu_widens}")
        if gpu.capability < FP8_CAPABILITY:
            raise ConfigError(
                f"{what} needs a GPU of compute capability {dotted(FP8_CAPABILITY)} or more, and {gpu.name} has "
                f"{dotted(gpu.capability)}"
            )
