"""Chooses the kernels of attention, with the reason: FlashAttention-3 for prefills where it runs, else own kernels.

    FLASH_ATTN    prefills with FlashAttention-3 (the package fa3-fwd), decoding with own kernels
    TRITON_ATTN   own kernels for all
    CPU_ATTN      those of a CPU, which has no others

Under the names of vLLM's attention_backend.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.config import AttentionBackend
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts
from headrace.hardware.facts import dotted
from headrace.models.spec import ModelSpec

HOPPER = (9, 0)
FLASH_HEAD_DIMS = (64, 96, 128, 192, 256)  # as in `kernels/gpu/flash.py`


class ChosenAttention(NamedTuple):
    name: str
    reason: str


def choose_attention(given: AttentionBackend, spec: ModelSpec, dtype: str, gpu: GpuFacts | None) -> ChosenAttention:
    """`gpu`: None if the model runs on a CPU."""
    if gpu is None:
        if given != "auto":
            raise ConfigError(f"attention_backend={given!r} needs a GPU; a CPU has kernels of its own: leave it out")
        return ChosenAttention("CPU_ATTN", "what a CPU has")
    problem = why_not_flash(spec, dtype, gpu)
    if given == "FLASH_ATTN" and problem is not None:
        raise ConfigError(
            f"attention_backend='FLASH_ATTN' does not run here: {problem}; use 'TRITON_ATTN', or leave it out"
        )
    if given != "auto":
        return ChosenAttention(given, "as set")
    if problem is None:
        return ChosenAttention(
            "FLASH_ATTN", "FlashAttention-3 is fastest for prefills on this GPU; decoding: own kernels"
        )
    return ChosenAttention("TRITON_ATTN", f"own kernels for all: {problem}")


def why_not_flash(spec: ModelSpec, dtype: str, gpu: GpuFacts) -> str | None:
    """Why FlashAttention-3 would compute no prefill of this model on this GPU; None: it computes them."""
    if gpu.capability != HOPPER:
        return (
            f"FlashAttention-3 is built for compute capability {dotted(HOPPER)} (Hopper), and {gpu.name} has "
            f"{dotted(gpu.capability)}"
        )
    if not gpu.has_flash_attention:
        return "the package fa3-fwd is not installed, or cannot be loaded (pip install 'headrace[gpu]')"
    if dtype != "bfloat16":
        return f"its build computes bfloat16, and the model {dtype}"
    return _why_not_model(spec)


def _why_not_model(spec: ModelSpec) -> str | None:
    if spec.latent is not None:
        return "multi-head latent attention has kernels of its own"
    if not any(spec.has_attention(index) for index in range(spec.num_layers)):
        return "the model has no attention"
    if spec.has_sinks or spec.alibi_slopes:
        return "it has neither attention sinks nor ALiBi, which the model needs"
    if spec.head_dim not in FLASH_HEAD_DIMS:
        return f"heads of {spec.head_dim} dimensions are none of {', '.join(map(str, FLASH_HEAD_DIMS))}"
    return None
