"""Gemma 3n (the text model): a decoder whose residual stream has several versions of each token's state.

Layers are those of Gemma 3, but each reads only one of the streams, the active one, and then corrects all of them
(AltUp). Beside attention there is a low-rank path (LAuReL), and every layer gets an embedding of the token of its own.
The last layers have no keys and values: they attend to those of the last layer before them with the same window.

    streams [N, T, H] ─▶ predicted ─▶ active ─▶ attention + LAuReL ─▶ MLP ─▶ correct all streams
                                                                              └▶ gate the layer's input ─▶ add to others
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models.decoder import Decoder, Layer
from headrace.models.embeddings import Embeddings
from headrace.models.layers import Attention, Mlp, Norm

_MIN_SQUARE = 1e-5  # of a stream's mean square, before it is scaled to the size of another


@dataclass(frozen=True, slots=True)
class AltUp:
    """How a layer predicts all streams before it, and corrects them after it. Its matrices are small and in float32."""

    router_norm: Norm
    router: Tensor  # [N, H]
    predictions: Tensor  # [N * N, N]
    corrections: Tensor  # [N, N]

    def predict(self, streams: Tensor) -> Tensor:  # [N, T, H] -> [N, T, H]
        num_streams = len(streams)
        mixed = F.linear(self._modalities(streams[0]), self.predictions).unflatten(1, (num_streams, num_streams))
        predicted = torch.einsum("tji,ith->jth", mixed, streams.float()) + streams
        return predicted.to(streams.dtype)

    def correct(self, predicted: Tensor, computed: Tensor) -> Tensor:  # [N, T, H], [T, H] -> [N, T, H]
        """Adds what the layer computed beyond its prediction to every stream, each with its own weight."""
        weights = F.linear(self._modalities(computed), self.corrections) + 1.0  # [T, N]
        change = (computed - predicted[0]).float()
        return (change * weights.t()[:, :, None] + predicted).to(predicted.dtype)

    def _modalities(self, x: Tensor) -> Tensor:  # [T, H] -> [T, N] float32
        routed = F.linear(self.router_norm.plain(x).float() / x.shape[1], self.router)
        return torch.tanh(routed)


@dataclass(frozen=True, slots=True)
class LayerExtras:
    """What a layer of Gemma 3n has beside that of Gemma 3."""

    altup: AltUp
    corrected_scale: Tensor | None  # [H], of the active stream where it gates the layer's input
    low_rank_down: ops.PackedLinear  # [R, H]
    low_rank_up: ops.PackedLinear  # [H, R]
    low_rank_norm: Norm
    input_gate: ops.PackedLinear  # [P, H]
    input_up: ops.PackedLinear  # [H, P]
    input_norm: Norm
    sparsity: float | None  # in standard deviations: smaller gates of the MLP become zero
    kv_source: int | None  # the layer whose keys and values this one uses; None: its own

    def low_rank(self, x: Tensor) -> Tensor:
        return x + self.low_rank_norm.plain(self.low_rank_up(self.low_rank_down(x)))

    def add_input(self, streams: Tensor, inputs: Tensor) -> None:  # [N, T, H], [T, P]
        """Adds the layer's own embedding, gated by the active stream, to the other streams."""
        active = streams[0] if self.corrected_scale is None else streams[0] * self.corrected_scale
        gated = F.gelu(self.input_gate(active), approximate="tanh") * inputs
        streams[1:] += self.input_norm.plain(self.input_up(gated))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3nDecoder(Decoder):
    extras: tuple[LayerExtras, ...]
    input_embeddings: Embeddings  # [T] -> [T, layers * P]
    input_vocab_size: int
    input_projection: ops.PackedLinear  # [layers * P, H]
    input_norm: Norm  # over P
    widen: tuple[ops.PackedLinear, ...]  # [H, H], from the first stream to each of the others
    narrow: tuple[ops.PackedLinear, ...]  # [H, H], and back

    def hidden(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], kept: Tensor | None = None
    ) -> Tensor:
        """See `Decoder.hidden`."""
        embedded = self.embeddings(token_ids)
        inputs = self._layer_inputs(token_ids, embedded)  # [T, layers, P]
        streams = torch.stack([embedded, *(_scaled_like(embedded, widen(embedded)) for widen in self.widen)])
        unshared: dict[int, Tensor] = {}  # keys and values of the step before they are rotated, by layer
        for index, (layer, extras) in enumerate(zip(self.layers_in_order(), self.extras, strict=True)):
            predicted = extras.altup.predict(streams)
            computed = self._run(index, layer, extras, predicted[0], layout, caches, unshared)
            streams = extras.altup.correct(predicted, computed)
            extras.add_input(streams, inputs[:, index])
        streams = streams if kept is None else streams[:, kept]
        first, others = streams[0], streams[1:]
        narrowed = [_scaled_like(first, narrow(each)) for narrow, each in zip(self.narrow, others, strict=True)]
        return torch.stack([first, *narrowed]).float().mean(0).to(embedded.dtype)

    def step_logits(self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache]) -> Tensor:
        """See `Decoder.step_logits`. The streams are merged before the final norm, which so has nothing to add."""
        return self.logits(self.hidden(token_ids, layout, caches))

    def _layer_inputs(self, token_ids: Tensor, embedded: Tensor) -> Tensor:  # [T], [T, H] -> [T, layers, P]
        is_known = token_ids < self.input_vocab_size
        size = len(self.input_norm.weight)
        own = self.input_embeddings(torch.where(is_known, token_ids, 0)).unflatten(1, (-1, size))
        projected = (self.input_projection(embedded) * embedded.shape[1] ** -0.5).view(-1, size)
        both: Tensor = self.input_norm.plain(projected).view_as(own) + own
        return both * math.sqrt(0.5)

    def _run(
        self,
        index: int,
        layer: Layer,
        extras: LayerExtras,
        x: Tensor,  # [T, H], the active stream
        layout: StepLayout,
        caches: list[LayerCache],
        unshared: dict[int, Tensor],
    ) -> Tensor:
        """Returns the active stream after attention, the low-rank path and the MLP."""
        attention = layer.mixer
        assert isinstance(attention, Attention) and isinstance(layer.mlp, Mlp)
        assert layer.attention_norm and layer.attention_post_norm and layer.mlp_norm and layer.mlp_post_norm
        normed = layer.attention_norm.plain(x)
        qkv, source = attention.qkv(normed), extras.kv_source
        if source is None:
            source = index
            unshared[index] = _with_normed_values(qkv, attention)
        else:
            qkv = torch.cat((qkv, unshared[source]), dim=1)  # stored again, as they are
        attended = layer.attention_post_norm.plain(attention.attend(qkv, layout, caches[source]))
        both = (x + attended + extras.low_rank(normed)) * math.sqrt(0.5)
        return both + layer.mlp_post_norm.plain(_sparse_mlp(layer.mlp, layer.mlp_norm.plain(both), extras.sparsity))


def _with_normed_values(qkv: Tensor, attention: Attention) -> Tensor:
    """Norms the values in place, without weights, and returns a copy of keys and values."""
    head_dim = attention.cos_sin.shape[1]
    values = qkv[:, -attention.num_kv_heads * head_dim :].unflatten(1, (-1, head_dim))
    values.copy_(F.rms_norm(values.float(), (head_dim,), eps=attention.eps))
    return qkv[:, attention.num_heads * head_dim :].clone()


def _sparse_mlp(mlp: Mlp, x: Tensor, sparsity: float | None) -> Tensor:
    both = mlp.up(x)  # [T, 2 * I], gates first
    if sparsity is not None:
        gates = both[:, : both.shape[1] // 2]
        wide = gates.float()
        threshold = wide.mean(1, keepdim=True) + sparsity * wide.std(1, keepdim=True, unbiased=False)
        gates.copy_((wide - threshold).relu())
    return mlp.down(ops.gelu_tanh_and_mul(both, as_fp8=mlp.down.prefers_fp8(len(x))))


def _scaled_like(target: Tensor, x: Tensor) -> Tensor:
    """Scales each row of x to the size of the target's."""
    size = target.float().square().mean(1, keepdim=True).sqrt()
    own = x.float().square().mean(1, keepdim=True).clamp_min(_MIN_SQUARE).sqrt()
    return (x.float() * size / own).to(x.dtype)
