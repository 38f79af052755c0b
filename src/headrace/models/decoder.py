"""The decoder, one for all families: what differs between them is in the spec and in the weights.

The residual stream is one tensor a step, updated in place; each addition is fused with the norm that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.models.embeddings import Embeddings
from headrace.models.layers import Layer
from headrace.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Decoder:
    spec: ModelSpec
    dtype: torch.dtype  # of the weights and the cache
    device: torch.device
    embeddings: Embeddings
    layers: tuple[Layer, ...]
    norm: Tensor  # [H]
    head: ops.PackedLinear  # [V, H]; of the embeddings themselves when they are tied
    max_len: int  # positions that the rotary tables hold
    num_bytes: int  # of the weights

    def hidden(self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache]) -> Tensor:
        """[T] -> [T, H]: the residual stream after the last layer, before the final norm. Writes keys and values."""
        eps = self.spec.norm_eps
        residual = self.embeddings(token_ids)
        x = ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if index > 0:
                x = ops.add_rms_norm(x, residual, layer.attention_norm, eps)
            x = layer.attention(x, layout, cache)
            if layer.attention_post_norm is not None:
                x = ops.rms_norm(x, layer.attention_post_norm, eps)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = layer.mlp(x)
            if layer.mlp_post_norm is not None:
                x = ops.rms_norm(x, layer.mlp_post_norm, eps)
        return residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, V]. Give it only the tokens that will be sampled from."""
        logits = self.head(ops.rms_norm(hidden, self.norm, self.spec.norm_eps))
        return logits if self.spec.logit_softcap is None else ops.soft_cap(logits, self.spec.logit_softcap)
