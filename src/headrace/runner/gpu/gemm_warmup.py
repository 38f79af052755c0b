"""A library's kernels for matrix products, loaded before they are needed.

It has a hundred of them, chooses by the size of the product, loads each when it is first used, and waits for the GPU
then: in a step that costs everybody what it runs ahead.
"""

from __future__ import annotations

import torch

from headrace.models.decoder import Decoder
from headrace.models.layers import Mlp

# Tokens. The largest first, so that the others fit into its memory; products that are larger still use its kernels.
_SIZES = (*range(8192, 1024, -32), *range(1024, 0, -8))
_FEW_SIZES = 512  # between two that are tried where the products are not the library's


@torch.inference_mode()
def load_products(decoder: Decoder, most_tokens: int) -> None:
    """Of each kind of layer the products of one, for steps of all sizes, or nearly."""
    spec, dtype, device = decoder.spec, decoder.dtype, decoder.device
    sizes = [size for size in _SIZES if size <= most_tokens]
    x = torch.zeros(max(sizes, default=1), spec.hidden_size, dtype=dtype, device=device)
    mixed = torch.zeros(x.shape[0], spec.q_size, dtype=dtype, device=device)
    for layer in {type(layer.mlp): layer for layer in decoder.layers}.values():
        for size in sizes:
            if isinstance(layer.mlp, Mlp) or size % _FEW_SIZES == 0:
                layer.mlp(x[:size])
            layer.attention.qkv(x[:size])
            layer.attention.output(mixed[:size])
    torch.cuda.synchronize(device)
