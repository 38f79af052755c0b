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
from headrace.models.quantized import kept_in_16_bits
from headrace.models.weights.reader import WeightReader
from headrace.quantize.calibrate import record_inputs
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
    plain_downs: frozenset[int] = frozenset()  # layers whose down projection alone is left as it is
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

    WeightReader.linear = linear
    return load_decoder(open_checkpoint(model), dtype=torch.float32, max_len=1024)


def applied(variant: Variant, decoder: Decoder) -> Decoder:
    layers = tuple(
        layer if index in variant.plain_layers else rounded_layer(_of_layer(variant, index), layer)
        for index, layer in enumerate(decoder.layers)
    )
    return replace(decoder, layers=layers)


def _of_layer(variant: Variant, index: int) -> Variant:
    if index not in variant.plain_downs:
        return variant
    return replace(variant, weights=variant.weights - {"down"}, inputs=variant.inputs - {"down"})


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


def variants(decoder: Decoder, loudest: list[int]) -> dict[str, Variant]:
    """`loudest`: the layers in order of the largest input of their down projection."""
    last = decoder.spec.num_layers - 1
    found = {
        "nothing": Variant(),
        "weights and activations": Variant(EVERY, EVERY),
        "weights": Variant(EVERY),
        "activations": Variant(inputs=EVERY),
    }
    for part in PARTS:
        found[f"all but {part}"] = Variant(EVERY - {part}, EVERY - {part})
    for count in (1, 2, 3, 4):
        found[f"all but {count} down"] = Variant(EVERY, EVERY, plain_downs=frozenset(loudest[:count]))
    third = (last + 1) // 3
    for first in (0, third, 2 * third):
        downs = frozenset(range(first, first + third))
        found[f"all but down of layers {first} to {first + third - 1}"] = Variant(EVERY, EVERY, plain_downs=downs)
    for layers in ((last,), (0,), (0, 1, 2)):
        name = f"all but down of {', '.join(map(str, layers))}"
        found[name] = Variant(EVERY, EVERY, plain_downs=frozenset(layers))
    best = Variant(EVERY, EVERY, plain_downs=frozenset(loudest[:2]), keys=True, values=True)
    kept = frozenset(int(name.split(".")[2]) for name in kept_in_16_bits(last + 1))
    found["all but the kept down"] = Variant(EVERY, EVERY, plain_downs=kept)
    found["all but the kept down, and the cache"] = Variant(EVERY, EVERY, plain_downs=kept, keys=True, values=True)
    found |= {
        "keys": Variant(keys=True),
        "cache": Variant(keys=True, values=True),
        "all but 2 down, and the cache": best,
        "all but the first layer": Variant(EVERY, EVERY, frozenset({0})),
        "all but the last layer": Variant(EVERY, EVERY, frozenset({last})),
        "INT8 weights and activations": Variant(EVERY, EVERY, is_int8=True),
        "INT8, all but 2 down": Variant(EVERY, EVERY, plain_downs=frozenset(loudest[:2]), is_int8=True),
    }
    return found


def loudest_layers(decoder: Decoder, windows: Tensor) -> list[int]:
    """Prints and returns the layers in order of the largest input of their down projection."""
    inputs = record_inputs(decoder, windows[:1, :256])
    largest = [float(each.down.largest.max()) for each in inputs]
    typical = [float(each.down.sample().abs().median()) for each in inputs]
    order = sorted(range(len(largest)), key=lambda index: -largest[index] / typical[index])
    for index in order[:6]:
        print(f"layer {index}: largest input of down {largest[index]:.1f}, median {typical[index]:.4f}", flush=True)
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window-len", type=int, default=1024)
    parser.add_argument("--only", nargs="*", help="names of rows; default: all")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    decoder = load(given.model)
    ids = load_tokenizer(open_checkpoint(given.model).text).encode(embedded_text()[:80_000])
    windows = windows_of(ids, given.windows, given.window_len)
    chosen = variants(decoder, loudest_layers(decoder, windows))
    if given.only:
        chosen = {name: chosen[name] for name in ("nothing", *given.only)}
    found: dict[str, float] = {}
    for name, variant in chosen.items():
        found[name] = perplexity(variant, decoder, windows)
        print(f"{name:36} {found[name]:8.4f} {found[name] / found['nothing'] - 1:+8.2%}", flush=True)
        if given.json:
            record = {"model": given.model, "num_tokens": windows.numel(), "perplexity": found}
            given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
