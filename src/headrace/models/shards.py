"""Divides a model over the ranks of a mesh: which rows or columns of each tensor a rank has. Imports no torch.

    rows of                columns of           whole on every rank
    q, k, v, sinks (heads) o (heads)            latents, norms (but those over all heads), router, position embeddings
    gate, up (width)       down (width)
    embeddings, head (vocabulary)               biases of o and down: on rank 0 only, since they are added once

Heads are divided in whole groups: a KV head with its query heads. With fewer KV heads than ranks, each KV head is on
several ranks, which divide its query heads. Parts may be uneven; the first ranks have the larger ones.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.dist.mesh import Mesh, Span, divided
from headrace.errors import ConfigError
from headrace.models.spec import LatentSpec, ModelSpec, Shape

if TYPE_CHECKING:
    from torch import Tensor

# Widths are divided in multiples of this where they can be: blocks of GGUF files have up to 256 weights, and FP8 GEMMs
# need multiples of 16.
_WIDTH_UNITS = (256, 128, 64, 32, 16)

_COLUMN_PARALLEL = re.compile(r".*\.(gate|up|gate_up)_proj\.(weight|bias)")
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank has. None: all rows, or all columns."""

    rows: Span | None = None
    columns: Span | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None

    def shape(self, whole: Shape) -> Shape:
        rows = whole[0] if self.rows is None else self.rows.size
        if len(whole) == 1:
            return (rows,)
        return (rows, whole[1] if self.columns is None else self.columns.size)

    def of(self, tensor: Tensor) -> Tensor:
        """The part as a view: of a tensor in a mapped file, only its pages are read."""
        if self.rows is not None:
            tensor = tensor[self.rows.start : self.rows.end]
        return tensor if self.columns is None else tensor[:, self.columns.start : self.columns.end]


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank."""

    queries: Span
    kv: Span
    num_kv_copies: int  # ranks that have the same KV heads, this one included


@dataclass(frozen=True)
class Shards:
    """The parts of one rank."""

    whole: ModelSpec
    mesh: Mesh

    @cached_property
    def spec(self) -> ModelSpec:
        """The rank's own sizes: heads, and widths of MLPs and experts. The vocabulary is whole: every rank has all
        logits."""
        heads, mixture = self.heads, self.whole.mixture
        if mixture is not None:
            mixture = replace(
                mixture,
                expert_size=self._width(mixture.expert_size).size,
                shared_size=None if mixture.shared_size is None else self._width(mixture.shared_size).size,
            )
        return replace(
            self.whole,
            num_heads=heads.queries.size,
            num_kv_heads=heads.kv.size,
            intermediate_size=self._width(self.whole.intermediate_size).size,
            mixture=mixture,
        )

    @cached_property
    def heads(self) -> Heads:
        return _heads(self.whole, self.mesh.tensor_size)[self.mesh.tensor_rank]

    @property
    def vocabulary(self) -> Span:
        """The tokens whose rows of the embeddings and of the head this rank has."""
        return self._vocabularies()[self.mesh.tensor_rank]

    @property
    def vocabulary_sizes(self) -> tuple[int, ...]:
        return tuple(part.size for part in self._vocabularies())

    @cached_property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @cached_property
    def num_linear_params(self) -> int:
        """Number of weights in the rank's matrices of layers."""
        return sum(math.prod(s) for name, s in self.tensor_shapes().items() if name.endswith("_proj.weight"))

    def tensor_shapes(self) -> dict[str, Shape]:
        return {name: self.part(name).shape(shape) for name, shape in self.whole.tensor_shapes().items()}

    @property
    def has_row_biases(self) -> bool:
        """Whether this rank adds the biases of layers whose outputs are added up over the ranks."""
        return self.mesh.tensor_rank == 0

    def part(self, name: str) -> Part:
        """The part of a tensor, by its canonical name."""
        if self.mesh.is_single:
            return WHOLE
        if name in _VOCABULARY:
            return Part(rows=self.vocabulary)
        if ".self_attn." in name:
            return self._part_of_attention(name)
        if _COLUMN_PARALLEL.fullmatch(name):
            span = self._width(self._width_of(name))
            return Part(rows=span.times(2) if ".gate_up_proj." in name else span)
        if name.endswith(".down_proj.weight"):
            return Part(columns=self._width(self._width_of(name)))
        return WHOLE

    def _part_of_attention(self, name: str) -> Part:
        heads, head_dim = self.heads, self.whole.head_dim
        stem = name.split(".self_attn.")[1].split(".", maxsplit=1)[0]
        if self.whole.latent is not None:
            return _part_of_latent(stem, heads.queries, self.whole.latent)
        if stem == "o_proj":
            return Part(columns=heads.queries.times(head_dim)) if name.endswith(".weight") else WHOLE
        if stem == "sinks":
            return Part(rows=heads.queries)
        if stem in ("q_norm", "k_norm") and self.whole.head_qk_norm:
            return Part(rows=heads.queries if stem == "q_norm" else heads.kv)
        if stem in ("q_norm", "k_norm") and not self.whole.wide_qk_norm:
            return WHOLE  # of one head, the same for all
        return Part(rows=(heads.queries if stem.startswith("q") else heads.kv).times(head_dim))

    def _width_of(self, name: str) -> int:
        mixture = self.whole.mixture
        if mixture is not None and ".experts." in name:
            return mixture.expert_size
        if mixture is not None and ".shared_expert." in name:
            assert mixture.shared_size is not None
            return mixture.shared_size
        return self.whole.intermediate_size

    def _width(self, width: int) -> Span:
        size = self.mesh.tensor_size
        unit = next((unit for unit in _WIDTH_UNITS if width % (unit * size) == 0), 1)
        return divided(width // unit, size)[self.mesh.tensor_rank].times(unit)

    def _vocabularies(self) -> list[Span]:
        return divided(self.whole.vocab_size, self.mesh.tensor_size)


def _part_of_latent(stem: str, heads: Span, latent: LatentSpec) -> Part:
    """Latents are whole on every rank; what is computed from them is divided by heads."""
    if stem in ("q_proj", "q_b_proj"):
        return Part(rows=heads.times(latent.still_dim + latent.rotary_dim))
    if stem == "kv_b_proj":
        return Part(rows=heads.times(latent.still_dim + latent.value_dim))
    return Part(columns=heads.times(latent.value_dim)) if stem == "o_proj" else WHOLE


def check_divisible(spec: ModelSpec, size: int, *, evenly: bool) -> None:
    """Refuses a number of ranks that the model cannot be divided over; `evenly`: with equal parts."""
    if size == 1:
        return
    if not _can_divide_heads(spec, size):
        raise _refused(spec, size, "each rank needs a query head of its own, and one KV head at most is shared")
    if evenly and not _divides_evenly(spec, size):
        raise _refused(spec, size, "ranks on GPUs need equal parts, since all of them replay the same CUDA graphs")


def _refused(spec: ModelSpec, size: int, reason: str) -> ConfigError:
    possible = [str(n) for n in range(2, spec.num_heads + 1) if _can_divide_heads(spec, n) and _divides_evenly(spec, n)]
    way_out = f"sizes that divide it evenly: {', '.join(possible[:8])}" if possible else "leave it at 1"
    return ConfigError(
        f"tensor_parallel_size={size} does not divide the model: {spec.num_heads} query heads, {spec.num_kv_heads} KV "
        f"heads, MLP width {_widths_text(spec)}; {reason}; {way_out}"
    )


def _widths(spec: ModelSpec) -> list[int]:
    mixture = spec.mixture
    if mixture is None:
        return [spec.intermediate_size]
    dense = [spec.intermediate_size] if len(mixture.layers) < spec.num_layers else []
    return [*dense, mixture.expert_size, *([] if mixture.shared_size is None else [mixture.shared_size])]


def _widths_text(spec: ModelSpec) -> str:
    return " and ".join(f"{width:,}" for width in dict.fromkeys(_widths(spec)))


def _divides_evenly(spec: ModelSpec, size: int) -> bool:
    has_even_heads = spec.num_heads % size == 0 and (spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0)
    return has_even_heads and all(width % size == 0 for width in _widths(spec))


def _can_divide_heads(spec: ModelSpec, size: int) -> bool:
    """Whether every rank gets a query head, and something of every width and of the vocabulary."""
    max_copies = -(-size // spec.num_kv_heads)
    has_heads = spec.num_kv_heads >= size or spec.num_heads // spec.num_kv_heads >= max_copies
    return has_heads and min(*_widths(spec), spec.vocab_size) >= size


def _heads(spec: ModelSpec, size: int) -> list[Heads]:
    """The heads of all ranks."""
    group = spec.num_heads // spec.num_kv_heads  # query heads of one KV head
    if spec.num_kv_heads >= size:
        return [Heads(kv.times(group), kv, 1) for kv in divided(spec.num_kv_heads, size)]
    found = []
    for kv_head, ranks in enumerate(divided(size, spec.num_kv_heads)):
        for part in divided(group, ranks.size):
            first = kv_head * group
            queries = Span(first + part.start, first + part.end)
            found.append(Heads(queries, Span(kv_head, kv_head + 1), ranks.size))
    return found
