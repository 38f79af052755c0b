"""How many bytes the weights of a rank take on its device, by layer, before anything is loaded. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from headrace.models.quantized import BITS, Kind, PackedBits, kept_in_16_bits
from headrace.models.shards import Shards
from headrace.models.spec import Shape

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_SCALE_BYTES = 4  # float32, one for each row of a matrix in eight bits
_BYTES_ON_GPU, _BYTES_ON_CPU = 2, 4  # of a weight that is not quantized
COPY_ROWS = 16  # steps of up to so many tokens read copies (`kernels/gpu/few_rows.py`)
_COPY_TILE = (64, 128)  # the sides of a matrix with a copy are multiples of these
_MULTIPLE = 16  # a matrix with a side that is no multiple of this stays in 16 bits, if it is quantized to FP8 at load


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Bytes of each layer, and of everything else: embeddings, head, final norm."""

    layers: tuple[int, ...]
    others: int
    copies: int = 0  # of the layers' matrices: a step reads a matrix or its copy
    head_copy: int = 0  # of the head

    @property
    def total(self) -> int:
        return sum(self.layers) + self.others


def weight_sizes(shards: Shards, *, element_bytes: int, kind: Kind | None = None, at_load: bool = False) -> WeightSizes:
    """`kind`: the form of the layers' matrices in memory; None: they have `element_bytes` each. `at_load`: they are
    quantized while they are loaded, so that some of them stay as they are (`kept_in_16_bits`)."""
    is_kept = _keeps(shards, at_load=at_load)
    layers, others, copies, head_copy = [0] * shards.layers.size, 0, 0, 0
    has_copies = kind is not None and element_bytes == _BYTES_ON_GPU
    on_cpu = element_bytes == _BYTES_ON_CPU
    bits = shards.whole.packed_bits if on_cpu else None
    for name, shape in shards.tensor_shapes().items():
        is_packed = (
            kind is not None and not is_kept(name) and _is_packed(name, shape, kind, at_load=at_load, on_cpu=on_cpu)
        )
        num_bytes = math.prod(shape) * element_bytes
        if is_packed and kind is not None:
            num_bytes = _packed_bytes(shape, kind)
        elif bits is not None:
            num_bytes = int(math.prod(shape) * _bits_on_cpu(name, bits, shards, is_dense=kind is not None) / 8)
        layer = _LAYER.match(name)
        if has_copies and not is_packed and _has_copy(name, shape, shards):
            copy = _packed_bytes(shape, "int8")
            num_bytes += copy
            copies += 0 if layer is None else copy
            head_copy += copy if layer is None else 0
        if layer is None:
            others += num_bytes
        else:
            layers[int(layer[1]) - shards.layers.start] += num_bytes
    return WeightSizes(tuple(layers), others, copies, head_copy)


def _keeps(shards: Shards, *, at_load: bool) -> Callable[[str], bool]:
    """Which matrices of the layers are not quantized."""
    stored = shards.whole.quantization
    if at_load or stored is None:
        return kept_in_16_bits(shards.whole.num_layers).__contains__
    return stored.ignoring()


def _bits_on_cpu(name: str, bits: PackedBits, shards: Shards, *, is_dense: bool) -> float:
    """Bits of a weight of a GGUF file. `is_dense`: the layers' matrices are not packed as stored."""
    if name == "model.embed_tokens.weight":
        return bits.embeddings + (bits.head if shards.whole.tie_embeddings else 0.0)
    if name == "lm_head.weight":
        return bits.head
    is_matrix = name.endswith("_proj.weight") and not name.endswith(".kv_b_proj.weight")
    return bits.layers if is_matrix and not is_dense else 8.0 * _BYTES_ON_CPU


def _has_copy(name: str, shape: Shape, shards: Shards) -> bool:
    """Whether a matrix that keeps its 16 bits has a copy in INT8 (`kernels/gpu/linear.py`)."""
    spec = shards.whole
    head = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    has_head = shards.mesh.is_last_stage and spec.pooler is None
    if name not in kept_in_16_bits(spec.num_layers) and not (has_head and name == head):
        return False
    return len(shape) == 2 and all(size % tile == 0 for size, tile in zip(shape, _COPY_TILE, strict=True))


def _is_packed(name: str, shape: Shape, kind: Kind, *, at_load: bool, on_cpu: bool) -> bool:
    """Matrices that latent attention multiplies by head stay as they are."""
    if not name.endswith("_proj.weight") or name.endswith(".kv_b_proj.weight"):
        return False
    if ".experts." in name:
        # A GPU has no kernel for experts in INT8; a CPU packs none whose gate and up are interleaved.
        return not name.endswith(".gate_up_proj.weight") if on_cpu else kind != "int8"
    return kind != "fp8" or not at_load or all(size % _MULTIPLE == 0 for size in shape)


def _packed_bytes(shape: Shape, kind: Kind) -> int:
    scales = 0 if kind == "int4" else shape[0] * _SCALE_BYTES  # those of four bits are in BITS
    return int(math.prod(shape) * BITS[kind] / 8) + scales
