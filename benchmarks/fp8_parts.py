"""Which part of FP8 costs how much: perplexity of the default model with FP8 rounding of some parts, on a CPU.

    python benchmarks/fp8_parts.py --json benchmarks/results/fp8-parts-cpu.json

Sums are in float32 and everything else is unrounded, so a row has the cost of its own rounding alone. The text is that
of `accuracy.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.quantized import dequantize, quantize_fp8, quantize_int8
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.models.decoder import Layer
from headrace.models.weights import load as loading
from headrace.quantize.evaluate import embedded_text, score, windows_of
from headrace.text import load_tokenizer

PARTS = ("qkv", "output", "up", "down")
EVERY = frozenset(PARTS)
Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Variant:
    """What is rounded."""

    weights: frozenset[str] = frozenset()
    inputs: frozenset[str] = frozenset()
    plain_layers: frozenset[int] = frozenset()
    keys: bool = False
    values: bool = False
    is_int8: bool = False


def fp8_rows(x: Tensor) -> Tensor:
    return dequantize(quantize_fp8(x))


def int8_rows(x: Tensor) -> Tensor:
    return dequantize(quantize_int8(x))


@dataclass(frozen=True)
class Linear:
    """A linear layer that remembers its weight, and may round its input."""

    weight: Tensor
    packed: ops.PackedLinear
    round_input: Rounding | None = None
    takes_fp8 = False

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed(x if self.round_input is None else self.round_input(x))

    def rounded(self, rounding: Rounding, *, weight: bool, inputs: bool) -> Linear:
        packed = ops.pack_linear(rounding(self.weight)) if weight else self.packed
        return Linear(self.weight, packed, rounding if inputs else None)


def load(model: str) -> Decoder:
    """Loads the model with linear layers that can be rounded; it must have no biases."""

    def linear(self: Any, *names: str, has_bias: bool) -> Linear:
        assert not has_bias
        weight = self.tensor(*(f"{name}.weight" for name in names))
        return Linear(weight.clone(), ops.pack_linear(weight))

    loading._Reader.linear = linear
    return load_decoder(open_checkpoint(model), dtype=torch.float32, max_len=1024)


def applied(variant: Variant, decoder: Decoder) -> Decoder:
    layers = tuple(
        layer if index in variant.plain_layers else rounded_layer(variant, layer)
        for index, layer in enumerate(decoder.layers)
    )
    return replace(decoder, layers=layers)


def rounded_layer(variant: Variant, layer: Layer) -> Layer:
    rounding = int8_rows if variant.is_int8 else fp8_rows

    def rounded(owner: Any, part: str) -> Linear:
        linear: Linear = getattr(owner, part)
        return linear.rounded(rounding, weight=part in variant.weights, inputs=part in variant.inputs)

    attention, mlp = layer.attention, layer.mlp
    return replace(
        layer,
        attention=replace(attention, qkv=rounded(attention, "qkv"), output=rounded(attention, "output")),
        mlp=replace(mlp, up=rounded(mlp, "up"), down=rounded(mlp, "down")),
    )


def patched_store(variant: Variant, store: Any) -> Any:
    def rope_and_store(qkv: Tensor, layout: Any, cos_sin: Tensor, cache: Any, *arguments: Any) -> Tensor:
        q: Tensor = store(qkv, layout, cos_sin, cache, *arguments)
        for part, is_rounded in ((cache.keys, variant.keys), (cache.values, variant.values)):
            if is_rounded:
                part.copy_(part.to(torch.float8_e4m3fn).float())
        return q

    return rope_and_store


def perplexity(variant: Variant, decoder: Decoder, windows: Tensor) -> float:
    store = ops.rope_and_store
    ops.rope_and_store = patched_store(variant, store)
    try:
        return score(applied(variant, decoder), windows).perplexity
    finally:
        ops.rope_and_store = store


def variants(num_layers: int) -> dict[str, Variant]:
    found = {
        "nothing": Variant(),
        "weights and activations": Variant(EVERY, EVERY),
        "cache": Variant(keys=True, values=True),
        "weights": Variant(EVERY),
        "activations": Variant(inputs=EVERY),
        "keys": Variant(keys=True),
        "all but down": Variant(EVERY - {"down"}, EVERY - {"down"}),
        "all but up": Variant(EVERY - {"up"}, EVERY - {"up"}),
        "all but qkv": Variant(EVERY - {"qkv"}, EVERY - {"qkv"}),
        "all but output": Variant(EVERY - {"output"}, EVERY - {"output"}),
        "INT8 weights and activations": Variant(EVERY, EVERY, is_int8=True),
        "INT8 weights": Variant(EVERY, is_int8=True),
        "all but the first layer": Variant(EVERY, EVERY, frozenset({0})),
        "all but the last layer": Variant(EVERY, EVERY, frozenset({num_layers - 1})),
        "INT8 activations": Variant(inputs=EVERY, is_int8=True),
        "INT8, all but down": Variant(EVERY - {"down"}, EVERY - {"down"}, is_int8=True),
        "values": Variant(values=True),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window-len", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    decoder = load(given.model)
    ids = load_tokenizer(open_checkpoint(given.model).text).encode(embedded_text()[:80_000])
    windows = windows_of(ids, given.windows, given.window_len)
    found: dict[str, float] = {}
    for name, variant in variants(decoder.spec.num_layers).items():
        found[name] = perplexity(variant, decoder, windows)
        print(f"{name:36} {found[name]:8.4f} {found[name] / found['nothing'] - 1:+8.2%}", flush=True)
        if given.json:
            record = {"model": given.model, "num_tokens": windows.numel(), "perplexity": found}
            given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
