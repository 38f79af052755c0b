"""Loads the library's GEMM kernels at start.

It has about a hundred of them, chooses by the size of the GEMM, and loads each at its first use. Loading waits for the
GPU: within a step, the GPU would run out of queued work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch
import torch.nn.functional as F

from headrace.kernels.gpu.few_rows import Linear
from headrace.kernels.gpu.linear import LinearWithCopy
from headrace.models.decoder import Decoder, Layer
from headrace.models.layers import Mlp
from headrace.runner.gpu.memory import release

# Tokens. The largest first, so that the others fit into its memory; larger GEMMs use the kernels of the largest.
_SIZES = (*range(8192, 1024, -32), *range(1024, 0, -8))
_FEW_SIZES = 512  # distance of the sizes that are run where the GEMMs are not the library's


@torch.inference_mode()
def load_gemm_kernels(decoder: Decoder, max_tokens: int) -> None:
    """Run the GEMMs of one layer of each kind for nearly all step sizes up to `max_tokens`."""
    spec, dtype, device = decoder.spec, decoder.dtype, decoder.device
    sizes = [size for size in _SIZES if size <= max_tokens]
    x = torch.zeros(max(sizes, default=1), spec.hidden_size, dtype=dtype, device=device)
    kinds: set[tuple[type, type]] = set()
    for layer in decoder.layers_in_order():
        kind = (type(layer.mixer), type(layer.mlp))
        for size in () if kind in kinds else sizes:
            if layer.mlp is not None and (isinstance(layer.mlp, Mlp) or size % _FEW_SIZES == 0):
                layer.mlp(x[:size])
            if layer.mixer is not None:
                layer.mixer.run_gemms(x[:size])
        kinds.add(kind)
    torch.cuda.synchronize(device)


@torch.inference_mode()
def load_library_kernels(decoder: Decoder, max_tokens: int) -> None:
    """The same for weights that are not quantized, without launching a kernel of ours: while those are still being
    compiled. Leaves no memory allocated, so that the largest step is measured as without it."""
    if decoder.stream is not None:
        return
    linears = {(each.weight.shape, each.bias is None): each for layer in decoder.layers for each in _linears(layer)}
    sizes = [size for size in _SIZES if size <= max_tokens]
    for linear in linears.values():
        width = linear.weight.shape[1]
        x = torch.zeros(max(sizes, default=1), width, dtype=linear.weight.dtype, device=linear.weight.device)
        for size in sizes:
            F.linear(x[:size], linear.weight, linear.bias)
        del x
    release(decoder.device)


def _linears(layer: Layer) -> Iterator[Linear]:
    for part in (layer.mixer, layer.mlp):
        if is_dataclass(part):
            values = (getattr(part, field.name) for field in fields(part))
            plain = (value.plain if isinstance(value, LinearWithCopy) else value for value in values)
            yield from (value for value in plain if isinstance(value, Linear))
