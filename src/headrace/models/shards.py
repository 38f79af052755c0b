"""Divides a model over the ranks of a mesh: which rows or columns of each tensor a rank has. Imports no torch.

    rows of                columns of           whole on every rank
    q, k, v, sinks (heads) o (heads)            latents, norms (but those over all heads), router, position embeddings
    gate, up (width)       down (width)
    embeddings, head (vocabulary)               biases of o and down: on rank 0 only, since they are added once

Heads are divided in whole groups: a KV head with its query heads. With fewer KV heads than ranks, each KV head is on
several ranks, which divide its query heads. Parts may be uneven; the first ranks have the larger ones.

With whole experts, a rank has all of some experts instead of a part of each. A stage of a pipeline has consecutive
layers; the first one also has the embeddings, the last one the final norm and the head.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from headrace.dist.mesh import Mesh, Span, divided
from headrace.errors import ConfigError
from headrace.models.spec import LatentSpec, MixtureSpec, ModelSpec, Shape

if TYPE_CHECKING:
    pass

# Widths are divided in multiples of this where they can be: blocks of GGUF files have up to 256 weights, and FP8 GEMMs
# need multiples of 16.
_WIDTH_UNITS = (256, 128, 64, 32, 16)

_COLUMN_PARALLEL = re.compile(r".*\.(gate|up|gate_up)_proj\.(weight|bias)")
_EMBEDDINGS = "model.embed_tokens.weight"
_VOCABULARY = (_EMBEDDINGS, "lm_head.weight", "lm_head.bias")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?.*")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that a rank has. None: all rows, or all columns."""

    rows: Span | None = None
    columns: Span | None = None

    @property
    def is_whole(self) -> bool:
        return self.rows is None and self.columns is None

    def shape(self, whole: Shape) -> Shape:
        if self.is_whole:
            return whole
        rows = whole[0] if self.rows is None else self.rows.size
        if len(whole) == 1:
            return (rows,)
        return (rows, whole[1] if self.columns is None else self.columns.size)


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
        """The rank's own sizes: layers (counted from 0), heads, and widths of MLPs and experts. The vocabulary is
        whole: every rank of the last stage has all logits."""
        heads, layers = self.heads, self.layers
        return replace(
            self.whole,
            num_layers=layers.size,
            windows=self.whole.windows[layers.start : layers.end],
            ropeless_layers=_moved(self.whole.ropeless_layers, layers),
            num_heads=heads.queries.size,
            num_kv_heads=heads.kv.size,
            alibi_slopes=self.whole.alibi_slopes[heads.queries.start : heads.queries.end],
            intermediate_size=self._width(self.whole.intermediate_size).size,
            mixture=None if self.whole.mixture is None else self._mixture(self.whole.mixture),
        )

    def _mixture(self, mixture: MixtureSpec) -> MixtureSpec:
        return replace(
            mixture,
            layers=_moved(mixture.layers, self.layers),
            expert_size=mixture.expert_size if self.mesh.whole_experts else self._width(mixture.expert_size).size,
            shared_size=None if mixture.shared_size is None else self._width(mixture.shared_size).size,
        )

    @cached_property
    def layers(self) -> Span:
        """The layers of this rank's stage."""
        return divided(self.whole.num_layers, self.mesh.pipeline_size)[self.mesh.pipeline_rank]

    @cached_property
    def experts(self) -> Span:
        """The experts that this rank computes, of each mixture."""
        assert self.whole.mixture is not None
        num_experts = self.whole.mixture.num_experts
        if not self.mesh.whole_experts:
            return Span(0, num_experts)
        return divided(num_experts, self.mesh.tensor_size)[self.mesh.tensor_rank]

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

    def tensor_shapes(self) -> dict[str, Shape]:
        shapes = self.whole.tensor_shapes()
        return {name: self.part(name).shape(shape) for name, shape in shapes.items() if self.has(name)}

    def has(self, name: str) -> bool:
        """Whether this rank has the tensor, or a part of it."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return self._has_outer(name)
        return int(layer[1]) in self.layers and (layer[2] is None or int(layer[2]) in self.experts)

    def _has_outer(self, name: str) -> bool:
        is_tied = name == _EMBEDDINGS and self.whole.tie_embeddings
        is_first = name.startswith("model.embed_")
        return (is_first and self.mesh.is_first_stage) or ((is_tied or not is_first) and self.mesh.is_last_stage)

    @property
    def has_row_biases(self) -> bool:
        """Whether this rank adds the biases of layers whose outputs are added up over the ranks."""
        return self.mesh.tensor_rank == 0

    @property
    def has_expert_biases(self) -> bool:
        """Whether this rank adds the biases of its experts' outputs: each expert's are added once."""
        return self.mesh.whole_experts or self.has_row_biases

    def part(self, name: str) -> Part:
        """The part of a tensor, by its canonical name."""
        if self.mesh.tensor_size == 1 or (self.mesh.whole_experts and ".mlp.experts." in name):
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


def _moved(layers: tuple[int, ...], stage: Span) -> tuple[int, ...]:
    """Of these layers, those of a stage, counted from its first one."""
    return tuple(layer - stage.start for layer in layers if layer in stage)


def check_divisible(spec: ModelSpec, size: int, *, evenly: bool, whole_experts: bool = False) -> None:
    """Refuses a number of ranks that the model cannot be divided over; `evenly`: with equal parts. The number of whole
    experts may differ between ranks in any case."""
    if spec.gemma3n is not None and size > 1:
        raise ConfigError(f"tensor_parallel_size={size} is not supported for Gemma 3n; leave it at 1")
    if whole_experts:
        _check_experts(spec, size)
    if size == 1:
        return
    if spec.recurrent is not None:
        raise _refused_with_state(spec, "tensor_parallel_size", size)
    widths = _widths(spec, whole_experts=whole_experts)
    if not _can_divide_heads(spec, size, widths):
        raise _refused(spec, size, widths, "each rank needs a query head of its own, and one KV head at most is shared")
    if evenly and not _divides_evenly(spec, size, widths):
        reason = "ranks on GPUs need equal parts, since all of them replay the same CUDA graphs"
        raise _refused(spec, size, widths, reason)


def _refused_with_state(spec: ModelSpec, name: str, size: int) -> ConfigError:
    return ConfigError(
        f"{name}={size} is not supported for {spec.family}: layers with a recurrent state are not divided over ranks "
        "yet; leave it at 1, and use one engine per GPU for more throughput"
    )


def check_stages(spec: ModelSpec, num_stages: int) -> None:
    if num_stages > 1 and spec.recurrent is not None:
        raise _refused_with_state(spec, "pipeline_parallel_size", num_stages)
    if spec.gemma3n is not None and num_stages > 1:
        raise ConfigError(f"pipeline_parallel_size={num_stages} is not supported for Gemma 3n; leave it at 1")
    if num_stages > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the {spec.num_layers} layers of the model, and each "
            "stage needs one; lower it"
        )


def _check_experts(spec: ModelSpec, size: int) -> None:
    if spec.mixture is None:
        raise ConfigError(
            f"enable_expert_parallel needs a mixture of experts, and {spec.family} has none; leave it out"
        )
    if size == 1:
        raise ConfigError(
            "enable_expert_parallel divides the experts over the ranks of tensor_parallel_size, which is 1; raise it, "
            "or leave enable_expert_parallel out"
        )
    if spec.mixture.num_experts < size:
        raise ConfigError(
            f"enable_expert_parallel: the {spec.mixture.num_experts} experts of a layer are less than the "
            f"tensor_parallel_size={size} ranks; lower it, or leave enable_expert_parallel out"
        )


def _refused(spec: ModelSpec, size: int, widths: list[int], reason: str) -> ConfigError:
    possible = [
        str(n)
        for n in range(2, spec.num_heads + 1)
        if _can_divide_heads(spec, n, widths) and _divides_evenly(spec, n, widths)
    ]
    way_out = f"sizes that divide it evenly: {', '.join(possible[:8])}" if possible else "leave it at 1"
    return ConfigError(
        f"tensor_parallel_size={size} does not divide the model: {spec.num_heads} query heads, {spec.num_kv_heads} KV "
        f"heads, MLP width {' and '.join(f'{width:,}' for width in dict.fromkeys(widths))}; {reason}; {way_out}"
    )


def _widths(spec: ModelSpec, *, whole_experts: bool) -> list[int]:
    """The widths of MLPs that are divided over the ranks."""
    mixture = spec.mixture
    if mixture is None:
        return [spec.intermediate_size]
    dense = [spec.intermediate_size] if len(mixture.layers) < spec.num_layers else []
    experts = [] if whole_experts else [mixture.expert_size]
    return [*dense, *experts, *([] if mixture.shared_size is None else [mixture.shared_size])]


def _divides_evenly(spec: ModelSpec, size: int, widths: list[int]) -> bool:
    has_even_heads = spec.num_heads % size == 0 and (spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0)
    return has_even_heads and all(width % size == 0 for width in widths)


def _can_divide_heads(spec: ModelSpec, size: int, widths: list[int]) -> bool:
    """Whether every rank gets a query head, and something of every width and of the vocabulary."""
    max_copies = -(-size // spec.num_kv_heads)
    has_heads = spec.num_kv_heads >= size or spec.num_heads // spec.num_kv_heads >= max_copies
    return has_heads and min([*widths, spec.vocab_size]) >= size


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
