"""The decoder, one for all families: differences between them are in the spec and in the weights.

The residual stream is one tensor per step, updated in place. Each addition to it is fused with the norm that follows,
and so is the sum over the routes of a mixture, where nothing else needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.dist.collectives import StageLink, TensorGroup
from headrace.kernels import ops
from headrace.kernels.layout import AdapterRows, LayerCache, StepLayout
from headrace.models.adapters import in_step
from headrace.models.embeddings import Embeddings
from headrace.models.head import PoolerHead
from headrace.models.layers import Mlp, Norm
from headrace.models.mixer import Mixer, key_units_of
from headrace.models.mixture import Mixture
from headrace.models.spec import ModelSpec
from headrace.models.streaming import LayerStream


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None  # before the mixer
    mixer: Mixer | None  # attention in most models; None: the layer is only an MLP
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Mixture | None  # None: the layer is only a mixer
    mlp_post_norm: Norm | None
    is_parallel: bool  # the MLP reads what the mixer reads


@dataclass(frozen=True, slots=True)
class Decoder:
    spec: ModelSpec  # with this rank's layers, heads and widths, if the model is divided
    dtype: torch.dtype  # of the weights and the cache
    device: torch.device
    embeddings: Embeddings
    positions: Tensor | None  # [P, H], learned; None: the model has none
    layers: tuple[Layer, ...]
    norm: Norm | None  # None: a later stage of a pipeline has it, and the head
    head_norm: Norm | None  # `norm` with the logit scale, where the model has one
    head: ops.PackedLinear | None  # [V, H]; the embedding table itself when they are tied; None: it does not sample
    max_len: int  # positions in the rotary tables
    num_bytes: int  # of the weights
    num_bytes_read: int = 0  # from files, to load them
    group: TensorGroup | None = None  # the ranks that the layers are divided over
    stages: StageLink | None = None  # the stages before and after this one
    pooler_head: PoolerHead | None = None  # of a pooling model, after pooling
    stream: LayerStream | None = None  # brings layers from host memory; None: all are on the device

    @property
    def is_last_stage(self) -> bool:
        return self.norm is not None

    def layers_in_order(self) -> Iterable[Layer]:
        """The layers, each when its weights may be read; it must be run before the next one is asked for."""
        return self.layers if self.stream is None else self.stream.through(self.layers)

    def allocate_caches(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None, *, num_slots: int
    ) -> list[LayerCache]:
        """Allocates the KV cache of all layers that have one, and their recurrent states for so many slots."""

        def of_layer(layer: int) -> LayerCache:
            own_blocks = num_blocks if self.spec.has_attention(layer) else 0
            cache = self._with_key_units(self.allocate_cache(own_blocks, block_size, dtype), layer)
            return self.with_state(cache, layer, num_slots)

        return [of_layer(layer) for layer in range(self.spec.num_cache_layers)]

    def _with_key_units(self, cache: LayerCache, layer: int) -> LayerCache:
        units = key_units_of(self.layers[layer].mixer)
        if cache.key_units is None or not units:
            return cache
        return replace(cache, key_units=torch.tensor(units, device=self.device))

    def with_state(self, cache: LayerCache, layer: int, num_slots: int) -> LayerCache:
        """Adds the recurrent state of the layer, if it has one."""
        recurrent = self.spec.recurrent
        if recurrent is None or not self.spec.has_state(layer):
            return cache
        shape, conv_shape = recurrent.matrix_shape, (num_slots, recurrent.kernel_size - 1, recurrent.conv_size)
        conv = torch.empty(conv_shape, dtype=self.dtype, device=self.device)
        if shape is None:
            return replace(cache, state=ops.LayerState(conv))
        matrices = torch.empty((num_slots, *shape), dtype=torch.float32, device=self.device)
        return replace(cache, state=ops.LayerState(conv, matrices))

    def allocate_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> LayerCache:
        """Allocates the KV cache of one layer, in the type of the weights if none is given."""
        spec, dtype = self.spec, dtype or self.dtype
        if spec.latent is None:
            shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            return ops.allocate_cache(*shape, dtype, self.device)
        shape = (num_blocks, block_size, spec.latent.kv_rank, spec.latent.rotary_dim)
        return ops.allocate_latent_cache(*shape, dtype, self.device)

    def hidden(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], kept: Tensor | None = None
    ) -> Tensor:
        """[T] -> [T, H]: returns the residual stream after the last layer, before the final norm. Writes keys and
        values.

        With `kept` (indexes of tokens), returns only these: for the others the last layer only stores keys and values.
        A stage before the last one takes no `kept`, and sends the residual stream to the next stage.
        """
        x, residual = self._run_layers(self.embedded(token_ids, layout), layout, caches, kept)
        residual = residual if x is None else ops.add_to(residual, x)
        if not self.is_last_stage:
            assert self.stages is not None
            self.stages.send(residual)
        return residual

    def embedded(self, token_ids: Tensor, layout: StepLayout) -> Tensor:
        """[T] -> [T, H]: returns what the first layer reads."""
        residual = self.embeddings(token_ids)
        return residual if self.positions is None else residual.add_(self.positions.index_select(0, layout.positions))

    def _run_layers(
        self, residual: Tensor, layout: StepLayout, caches: list[LayerCache], kept: Tensor | None
    ) -> tuple[ops.Addend | None, Tensor]:
        """Returns what the last half layer adds to the residual stream, and that stream."""
        assert kept is None or self.is_last_stage
        x: ops.Addend | None = None
        for layer, cache in zip(self.layers_in_order(), caches, strict=True):
            last = kept if layer is self.layers[-1] else None
            if layer.mixer is not None:
                normed, residual = _normed(x, residual, layer.attention_norm, layer.mixer.input_linear, layout.adapters)
                x = None  # routes of a mixture may take much memory
                x = layer.mixer(normed, layout, cache, last)
            elif last is not None:
                x = None if x is None else ops.sum_routes(x)[last]
            residual = residual if last is None else residual[last]
            if layer.mlp is not None:
                x, residual = _feed_after(layer, layer.mlp, x, residual, layout.adapters_of(last))
        return x, residual

    def normed(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, H]: applies the final norm, for embedding requests."""
        assert self.norm is not None
        return self.norm.plain(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V]: computes logits. Pass only the tokens that will be sampled from."""
        assert self.head_norm is not None and self.head is not None
        return self.capped(self.head(self.head_norm.plain(hidden)))

    def step_logits(self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache]) -> Tensor:
        """[T] -> [T, V]: computes `logits` of `hidden` with a kernel less."""
        return self.capped(self.uncapped_logits(self.embedded(token_ids, layout), layout, caches))

    def uncapped_logits(self, residual: Tensor, layout: StepLayout, caches: list[LayerCache]) -> Tensor:
        """[T, H] -> [T, V]: computes `step_logits`, but for the soft cap, from what `embedded` returned, which is
        changed. The final norm adds the output of the last layer to the residual stream."""
        assert self.head_norm is not None and self.head is not None
        x, residual = self._run_layers(residual, layout, caches, None)
        normed = self.head_norm(residual) if x is None else self.head_norm.of_sum(x, residual)
        assert isinstance(normed, Tensor)
        return self.head(normed)

    def capped(self, logits: Tensor) -> Tensor:
        """Applies the model's soft cap, if it has one."""
        return logits if self.spec.logit_softcap is None else ops.soft_cap(logits, self.spec.logit_softcap)


def _feed_after(
    layer: Layer, mlp: Mlp | Mixture, x: ops.Addend | None, residual: Tensor, adapters: AdapterRows | None
) -> tuple[ops.Addend, Tensor]:
    """Runs the MLP after a mixer with the output x. Returns what is still to be added to the residual stream, and that
    stream."""
    if layer.is_parallel:
        assert x is not None
        fed = _feed(mlp, layer.mlp_norm, None, residual, adapters)[0]
        return ops.add_to(ops.sum_routes(x), fed), residual
    x = None if x is None else _post_normed(x, layer.attention_post_norm)
    x, residual = _feed(mlp, layer.mlp_norm, x, residual, adapters)
    return _post_normed(x, layer.mlp_post_norm), residual


def _feed(
    mlp: Mlp | Mixture, norm: Norm | None, x: ops.Addend | None, residual: Tensor, adapters: AdapterRows | None
) -> tuple[ops.Addend, Tensor]:
    """Runs the MLP on the residual stream with x added. Returns its output and the residual stream."""
    if isinstance(mlp, Mlp):
        normed, residual = _normed(x, residual, norm, mlp.up, adapters)
        return mlp(normed, adapters), residual
    if norm is not None and norm.bias is None and ops.takes_unnormed(mlp.router, residual):
        unnormed, residual = norm.left_to_linear(x, residual, keeps_normed=True)
        return mlp.unsummed(unnormed), residual
    normed, residual = _normed(x, residual, norm, None, adapters)
    assert isinstance(normed, Tensor)
    return mlp.unsummed(normed), residual


def _normed(
    x: ops.Addend | None,
    residual: Tensor,
    norm: Norm | None,
    linear: ops.PackedLinear | None,
    adapters: AdapterRows | None,
) -> tuple[ops.Rows, Tensor]:
    """Adds x to the residual stream and norms it, in the form that the next linear layer takes, if there is only one.
    Returns the rows and the residual stream."""
    if norm is None:
        residual = residual if x is None else ops.add_to(residual, x)
        return residual, residual
    linear = None if linear is None else in_step(linear, adapters)
    if linear is not None and norm.bias is None and ops.takes_unnormed(linear, residual):
        return norm.left_to_linear(x, residual)
    as_fp8 = linear is not None and linear.prefers_fp8(len(residual))
    if x is None:
        return norm(residual, as_fp8=as_fp8), residual
    return norm.of_sum(x, residual, as_fp8=as_fp8), residual


def _post_normed(x: ops.Addend, norm: Norm | None) -> ops.Addend:
    return x if norm is None else norm.plain(ops.sum_routes(x))
