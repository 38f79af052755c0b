"""Which matrices of a model LoRA adapters can change, and how much memory their tables take. Imports no torch."""

from __future__ import annotations

import re

from headrace.adapters import AdapterLimits
from headrace.models.spec import ModelSpec

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ADAPTED = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)(\.weight)?")


def is_adapted(name: str) -> bool:
    """Whether adapters can change this matrix: of attention, or of an MLP that is not an expert's."""
    return _ADAPTED.fullmatch(name) is not None


def why_not_adapted(spec: ModelSpec) -> str | None:
    """Why this model takes no adapters; None: it does."""
    if spec.is_encoder:
        return f"{spec.family} is an encoder, whose layers have no adapters here"
    if spec.latent is not None:
        return f"{spec.family} has multi-head latent attention, whose matrices have no adapters here"
    if spec.gemma3n is not None:
        return f"{spec.family} has several residual streams, whose layers have no adapters here"
    return None


def adapter_bytes(spec: ModelSpec, limits: AdapterLimits, itemsize: int) -> int:
    """Bytes of the tables of all adapters, whose elements have `itemsize` bytes."""
    sides = [sum(shape) for name, shape in spec.tensor_shapes().items() if is_adapted(name) and name.endswith("weight")]
    return limits.max_loras * limits.max_rank * sum(sides) * itemsize
