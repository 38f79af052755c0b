"""Which part of FP8 costs how much: perplexity of the default model with FP8 rounding of some parts, on a CPU.

    python benchmarks/fp8_parts.py --json benchmarks/results/fp8-parts-cpu.json
    python benchmarks/fp8_parts.py --keys --windows 8 --data docs --json benchmarks/results/fp8-keys-cpu.json
    python benchmarks/fp8_parts.py --inputs --windows 4 --data docs --json benchmarks/results/fp8-inputs-cpu.json
    python benchmarks/fp8_parts.py --row-parts --windows 4 --json benchmarks/results/row-parts-cpu.json
    python benchmarks/fp8_parts.py --copies --windows 4 --json benchmarks/results/int8-copies-cpu.json
    python benchmarks/fp8_parts.py --balance --windows 8 --data docs --json benchmarks/results/fp8-balance-cpu.json
    python benchmarks/fp8_parts.py --e3m4 --windows 8 --data docs --json benchmarks/results/fp8-e3m4-cpu.json

Sums are in float32 and everything else is unrounded, so a row has the cost of its own rounding alone. The text is that
of `accuracy.py`. Differences of perplexity have the standard error of the mean difference of a token's logarithm. The
divergence (Kullback-Leibler, from the unrounded model, in nats per token) has ten times less noise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from about import commit, cpu_name
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.quantized import (
    BLOCK_LEN,
    FP8,
    dequantize,
    quantize,
    quantize_fp8,
    quantize_groups_fp8,
    quantize_int8,
)
from headrace.kernels.reference.e3m4 import E3M4_MAX, decode_e3m4, encode_e3m4
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.models.decoder import Layer
from headrace.models.quantized import kept_in_16_bits
from headrace.models.weights.key_units import HEADROOM
from headrace.models.weights.reader import Matrix, WeightReader
from headrace.quantize.calibrate import record_inputs
from headrace.quantize.compensation import compensated_fp8
from headrace.quantize.evaluate import embedded_text, prefill, windows_of
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
    key_rotation: str = "none"  # of queries and keys after RoPE, one of ROTATIONS
    key_scale: float = 1.0  # keys are multiplied by it before rounding
    key_matrices: Tensor | None = None  # [layers, Hkv, D, D], of queries before the rotation; of keys the inverse
    has_int8_keys: bool = False  # with a scale per token and head, instead of FP8
    e3m4_keys: Tensor | None = None  # [layers, Hkv], units of keys in e3m4, instead of FP8
    e3m4_values: Tensor | None = None  # [layers, Hkv]
    value_scale: float = 1.0
    is_compensated: bool = False  # weights rounded with error compensation (GPTQ)
    has_input_groups: bool = False  # a scale per 128 inputs of a token instead of one
    balanced: frozenset[str] = frozenset()  # inputs whose channels are divided by the root of their largest value
    mixed: frozenset[str] = frozenset()  # inputs that are multiplied by a Hadamard matrix over each 64 channels
    input_rounding: Rounding | None = None  # instead of FP8 or INT8
    has_int4_weights: bool = False  # instead of FP8
    kept_rounding: Rounding | None = None  # of the weights of `plain_downs`
    has_int8_head: bool = False


def fp8_rows(x: Tensor) -> Tensor:
    return dequantize(quantize_fp8(x))


def int8_rows(x: Tensor) -> Tensor:
    return dequantize(quantize_int8(x))


def int4_rows(x: Tensor) -> Tensor:
    return dequantize(quantize(x, "int4"))


def bf16_rows(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def fp8_parts_of_rows(x: Tensor) -> Tensor:
    """As GPU kernels split few rows in bfloat16 (`kernels/gpu/row_parts.py`)."""
    units = bf16_rows(x).abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    wide = bf16_rows(x) / units
    high = wide.to(FP8).float()
    return (high + (wide - high).to(FP8).float()) * units


def integer_parts_of_rows(x: Tensor) -> Tensor:
    units = bf16_rows(x).abs().amax(-1, keepdim=True).clamp(min=1e-30) / (127 * 256)
    return (bf16_rows(x) / units).round() * units


def fp8_groups(x: Tensor) -> Tensor:
    values, scales = quantize_groups_fp8(x)
    return values.float() * scales.repeat_interleave(BLOCK_LEN, 1)[:, : x.shape[1]]


@cache
def hadamard(size: int) -> Tensor:
    """Returns the orthonormal Hadamard matrix, [size, size]; the size is a power of two."""
    if size == 1:
        return torch.ones(1, 1)
    return torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), hadamard(size // 2)) / math.sqrt(2)


ROTATIONS: dict[str, Callable[[int], Tensor]] = {  # orthonormal matrices of a head's dimensions
    "none": torch.eye,
    "whole": hadamard,
    "halves": lambda dim: torch.block_diag(hadamard(dim // 2), hadamard(dim // 2)),
    "blocks of 16": lambda dim: torch.block_diag(*[hadamard(16)] * (dim // 16)),
    "pairs": lambda dim: torch.kron(hadamard(2), torch.eye(dim // 2)),  # the two dimensions that RoPE rotates together
}


def balanced_rows(largest: Tensor | None) -> Rounding:
    """Rounds inputs whose channels are divided by the square root of their largest value, as SmoothQuant does."""
    assert largest is not None
    scales = largest.clamp(min=1e-5).sqrt()
    scales = (scales / (scales.max() * scales.min()).sqrt()).clamp(1e-2, 1e2)
    return lambda x: fp8_rows(x / scales) * scales


def mixed_rows(x: Tensor) -> Tensor:
    """Rounds inputs with each 64 channels multiplied by a Hadamard matrix."""
    matrix = hadamard(64)
    return (fp8_rows((x.unflatten(1, (-1, 64)) @ matrix).flatten(1)).unflatten(1, (-1, 64)) @ matrix.t()).flatten(1)


@dataclass(frozen=True)
class Linear:
    """A linear layer that remembers its weight, and may round its input."""

    weight: Tensor
    packed: ops.PackedLinear
    compensated: Tensor | None = None  # the weight, rounded with error compensation
    largest: Tensor | None = None  # [K], largest absolute value of each channel of the input, on the data
    round_input: Rounding | None = None

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        return self.packed(x if self.round_input is None else self.round_input(x))

    def rounded(self, round_weight: Rounding | None, round_input: Rounding | None) -> Linear:
        packed = self.packed if round_weight is None else ops.pack_linear(round_weight(self.weight))
        return replace(self, packed=packed, round_input=round_input)

    def with_compensated(self) -> Linear:
        assert self.compensated is not None
        return replace(self, packed=ops.pack_linear(self.compensated))


def load(model: str) -> Decoder:
    """Loads the model with linear layers that can be rounded; it must have no biases."""

    def pack(self: WeightReader, matrix: Matrix) -> Linear:
        assert matrix.bias is None and isinstance(matrix.weight, Tensor)
        return Linear(matrix.weight.clone(), ops.pack_linear(matrix.weight))

    def plain(self: WeightReader, weight: Tensor, bias: Tensor | None) -> Linear:  # the head
        assert bias is None
        return Linear(weight, ops.pack_linear(weight))

    WeightReader.pack, WeightReader.plain = pack, plain
    return load_decoder(open_checkpoint(model), dtype=torch.float32, max_len=1024)


def kept_downs(num_layers: int) -> frozenset[int]:
    return frozenset(int(name.split(".")[2]) for name in kept_in_16_bits(num_layers))


def applied(variant: Variant, decoder: Decoder) -> Decoder:
    layers = tuple(
        layer if index in variant.plain_layers else rounded_layer(_of_layer(variant, index), layer)
        for index, layer in enumerate(decoder.layers)
    )
    head = decoder.head
    if variant.has_int8_head:
        assert isinstance(head, Linear)
        head = head.rounded(int8_rows, None)
    return replace(decoder, layers=layers, head=head)


def _of_layer(variant: Variant, index: int) -> Variant:
    if index not in variant.plain_downs:
        return variant
    return replace(variant, weights=variant.weights - {"down"}, inputs=variant.inputs - {"down"})


def rounded_layer(variant: Variant, layer: Layer) -> Layer:
    rounding = int4_rows if variant.has_int4_weights else int8_rows if variant.is_int8 else fp8_rows

    def rounded(owner: Any, part: str) -> Linear:
        linear: Linear = getattr(owner, part)
        is_compensated = variant.is_compensated and part in variant.weights
        of_weight = rounding if part in variant.weights and not is_compensated else None
        if part == "down" and part not in variant.weights:
            of_weight = variant.kept_rounding
        of_input = variant.input_rounding or (fp8_groups if variant.has_input_groups else rounding)
        if part in variant.balanced:
            of_input = balanced_rows(linear.largest)
        elif part in variant.mixed:
            of_input = mixed_rows
        found = linear.rounded(of_weight, of_input if part in variant.inputs else None)
        return replace(found, packed=linear.with_compensated().packed) if is_compensated else found

    attention, mlp = layer.mixer, layer.mlp
    return replace(
        layer,
        mixer=replace(attention, qkv=rounded(attention, "qkv"), output=rounded(attention, "output")),
        mlp=replace(mlp, up=rounded(mlp, "up"), down=rounded(mlp, "down")),
    )


def with_compensated(decoder: Decoder, windows: Tensor) -> Decoder:
    """Rounds all weights with error compensation too, on these windows of text."""
    inputs = record_inputs(decoder, windows, has_moments=True)

    def added(owner: Any, part: str, index: int) -> Linear:
        linear: Linear = getattr(owner, part)
        moments = getattr(inputs[index], part).moments
        compensated = dequantize(compensated_fp8(linear.weight, moments))
        return replace(linear, compensated=compensated, largest=getattr(inputs[index], part).largest)

    def of(index: int, layer: Layer) -> Layer:
        attention, mlp = layer.mixer, layer.mlp
        return replace(
            layer,
            mixer=replace(attention, qkv=added(attention, "qkv", index), output=added(attention, "output", index)),
            mlp=replace(mlp, up=added(mlp, "up", index), down=added(mlp, "down", index)),
        )

    return replace(decoder, layers=tuple(of(index, layer) for index, layer in enumerate(decoder.layers)))


def patched_store(variant: Variant, store: Any) -> Any:
    """Returns a `rope_and_store` that rounds; the layers must call it in their order."""
    matrices = None if variant.key_matrices is None else itertools.cycle(variant.key_matrices)
    key_units, value_units = (
        None if units is None else itertools.cycle(units[:, None, :, None, None])  # [1, Hkv, 1, 1] a layer
        for units in (variant.e3m4_keys, variant.e3m4_values)
    )

    def rope_and_store(qkv: Tensor, layout: Any, cos_sin: Tensor, cache: Any, *arguments: Any) -> Tensor:
        q: Tensor = store(qkv, layout, cos_sin, cache, *arguments)
        if variant.keys:
            if matrices is not None:
                matrix = next(matrices)  # [Hkv, D, D]
                q = (q.unflatten(1, (len(matrix), -1)) @ matrix).flatten(1, 2)
                cache.keys.copy_(cache.keys @ torch.linalg.inv(matrix).mT)
            rotation = ROTATIONS[variant.key_rotation](q.shape[-1])
            q = q @ rotation
            mixed = cache.keys @ rotation  # [num_blocks, Hkv, block_size, D]
            if variant.has_int8_keys:
                cache.keys.copy_(int8_rows(mixed.flatten(0, 2)).view_as(mixed))
            elif key_units is not None:
                cache.keys.copy_(e3m4(mixed, next(key_units)))
            else:
                cache.keys.copy_(fp8(mixed, variant.key_scale))
        if variant.values:
            rounded = fp8(cache.values, variant.value_scale)
            cache.values.copy_(rounded if value_units is None else e3m4(cache.values, next(value_units)))
        return q

    return rope_and_store


def e3m4(x: Tensor, units: Tensor) -> Tensor:
    return decode_e3m4(encode_e3m4(x / units)) * units


def fp8(x: Tensor, scale: float) -> Tensor:
    return (x * scale).to(FP8).float() / scale


def log_probabilities(variant: Variant, decoder: Decoder, windows: Tensor) -> list[Tensor]:
    """Returns those of all tokens after each token of a window but its last, [window_len - 1, vocabulary] a window."""
    store = ops.rope_and_store
    ops.rope_and_store = patched_store(variant, store)
    rounded = applied(variant, decoder)
    try:
        with torch.inference_mode():
            return [torch.log_softmax(rounded.logits(prefill(rounded, ids)[:-1]).float(), -1) for ids in windows]
    finally:
        ops.rope_and_store = store


@dataclass(frozen=True)
class Cost:
    """What a variant costs, against the unrounded model."""

    perplexity: float
    change: float  # relative
    change_error: float  # standard error of `change`
    divergence: float  # nats per token
    divergence_error: float

    @classmethod
    def of(cls, found: list[Tensor], plain: list[Tensor], windows: Tensor) -> Cost:
        chosen = [one.gather(1, ids[1:].long()[:, None]) for one, ids in zip(found, windows, strict=True)]
        before = [one.gather(1, ids[1:].long()[:, None]) for one, ids in zip(plain, windows, strict=True)]
        more = torch.cat(before) - torch.cat(chosen)
        pairs = zip(found, plain, strict=True)
        apart = torch.cat([(other.exp() * (other - one)).sum(-1) for one, other in pairs])
        return cls(
            perplexity=math.exp(-float(torch.cat(chosen).mean())),
            change=math.expm1(float(more.mean())),
            change_error=float(more.std()) / math.sqrt(more.numel()),
            divergence=float(apart.mean()),
            divergence_error=float(apart.std()) / math.sqrt(apart.numel()),
        )


@dataclass(frozen=True)
class Moments:
    """Second moments of queries, averaged over the heads of a group, and of keys: [layers, Hkv, D, D] each."""

    queries: Tensor
    keys: Tensor

    @classmethod
    def of_data(cls, decoder: Decoder, windows: Tensor) -> Moments:
        """Those after RoPE, on windows of text."""
        spec, store, calls = decoder.spec, ops.rope_and_store, itertools.count()
        queries = torch.zeros(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        keys = torch.zeros_like(queries)

        def rope_and_store(qkv: Tensor, layout: Any, cos_sin: Tensor, cache: Any, *arguments: Any) -> Tensor:
            q: Tensor = store(qkv, layout, cos_sin, cache, *arguments)
            layer = next(calls) % spec.num_layers
            groups = q.unflatten(1, (spec.num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, heads, T, D]
            k = cache.keys.transpose(0, 1).flatten(1, 2)[:, : len(q)]  # [Hkv, T, D]
            queries[layer] += (groups.mT @ groups).mean(1)
            keys[layer] += k.mT @ k
            return q

        ops.rope_and_store = rope_and_store
        try:
            with torch.inference_mode():
                for ids in windows:
                    prefill(decoder, ids)
        finally:
            ops.rope_and_store = store
        return cls(queries / windows.numel(), keys / windows.numel())

    @classmethod
    def of_weights(cls, decoder: Decoder) -> Moments:
        """Those before RoPE of normed inputs whose channels are independent and alike; only their diagonals."""
        spec, found = decoder.spec, []
        for layer in decoder.layers:
            rows = (layer.mixer.qkv.weight * layer.attention_norm.weight).square().sum(1).view(-1, spec.head_dim)
            q, k, _ = rows.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads))
            found.append(torch.stack((q.unflatten(0, (spec.num_kv_heads, -1)).mean(1), k)))
        queries, keys = torch.stack(found, 1)  # [layers, Hkv, D] each
        return cls(queries.diag_embed(), keys.diag_embed())

    def factors(self) -> Tensor:  # [layers, Hkv, D]
        """Factors of queries, and divisors of keys, for which the error of scores is smallest if all dimensions are
        mixed. The two dimensions that RoPE rotates together have the same one."""
        q, k = (side.diagonal(dim1=-2, dim2=-1).unflatten(-1, (2, -1)).sum(-2) for side in (self.queries, self.keys))
        return (k / q).pow(0.25).repeat(1, 1, 2)

    def matrices(self) -> Tensor:  # [layers, Hkv, D, D]
        """The same with any matrix, which RoPE allows only after it: both sides get the same, diagonal moments."""
        q, k = root(self.queries), root(self.keys)
        left, size, _ = torch.linalg.svd(k @ q)
        return (k @ left / size.clamp(min=1e-9).sqrt().unsqueeze(-2)).float()


def root(moments: Tensor) -> Tensor:
    sizes, vectors = torch.linalg.eigh(moments.double())
    return vectors * sizes.clamp(min=1e-9).sqrt().unsqueeze(-2) @ vectors.mT


def balance_variants(decoder: Decoder, windows: Tensor) -> dict[str, Variant]:
    """Keys whose dimensions are divided by a factor that queries are multiplied by, and keys in INT8."""
    data = Moments.of_data(decoder, windows)
    by_data, by_weights = data.factors(), Moments.of_weights(decoder).factors()
    plain = Variant(keys=True)
    halves, whole = replace(plain, key_rotation="halves"), replace(plain, key_rotation="whole")

    def balanced(variant: Variant, factors: Tensor) -> Variant:
        return replace(variant, key_matrices=factors.diag_embed())

    found = {
        "keys": plain,
        "keys, balanced by data": balanced(plain, by_data),
        "keys, rotated: halves": halves,
        "keys, balanced by data, rotated: halves": balanced(halves, by_data),
        "keys, balanced by data in powers of 2, rotated: halves": balanced(halves, by_data.log2().round().exp2()),
        "keys, balanced by weights, rotated: halves": balanced(halves, by_weights),
        "keys, rotated: whole": whole,
        "keys, balanced by data, rotated: whole": balanced(whole, by_data),
        "keys, balanced by weights, rotated: whole": balanced(whole, by_weights),
        "keys, any matrix by data, rotated: whole": replace(whole, key_matrices=data.matrices()),
        "keys in INT8": replace(plain, has_int8_keys=True),
        "keys in INT8, rotated: halves": replace(halves, has_int8_keys=True),
        "keys in INT8, rotated: whole": replace(whole, has_int8_keys=True),
    }
    kept = kept_downs(decoder.spec.num_layers)
    cached = replace(halves, weights=EVERY, inputs=EVERY, plain_downs=kept, is_compensated=True, values=True)
    name = "compensated weights and activations, cache rotated: halves"
    found[name] = cached
    found[f"{name}, balanced by data"] = balanced(cached, by_data)
    found[f"{name}, keys in INT8"] = replace(cached, has_int8_keys=True)
    return found


def units_by_weights(decoder: Decoder, headroom: float) -> tuple[Tensor, Tensor]:  # [layers, Hkv] each
    """Units of keys as the engine chooses them, but with this headroom, and of values by the same rule."""
    spec = decoder.spec
    keys = torch.tensor([layer.mixer.key_units for layer in decoder.layers]) * (headroom / HEADROOM)
    rows = [(layer.mixer.qkv.weight * layer.attention_norm.weight)[-spec.kv_size :] for layer in decoder.layers]
    sizes = torch.stack(rows).square().sum(2).unflatten(1, (spec.num_kv_heads, -1)).mean(2).sqrt()
    return keys, (headroom / E3M4_MAX * sizes).log2().ceil().exp2()


def key_sizes(decoder: Decoder, windows: Tensor) -> dict[str, list[float]]:
    """Root mean square and largest value of each head's mixed keys on text, relative to the root mean square that is
    expected by the weights: the smallest of all heads, the median and the largest."""
    spec, store, calls = decoder.spec, ops.rope_and_store, itertools.count()
    squares, largest = (torch.zeros(spec.num_layers, spec.num_kv_heads) for _ in range(2))

    def rope_and_store(qkv: Tensor, layout: Any, cos_sin: Tensor, cache: Any, *arguments: Any) -> Tensor:
        q: Tensor = store(qkv, layout, cos_sin, cache, *arguments)
        layer = next(calls) % spec.num_layers
        keys = cache.keys.transpose(0, 1).flatten(1, 2)[:, : len(q)] @ ROTATIONS["halves"](spec.head_dim)
        squares[layer] += keys.square().mean((1, 2)) / len(windows)
        largest[layer] = torch.maximum(largest[layer], keys.abs().amax((1, 2)))
        return q

    ops.rope_and_store = rope_and_store
    try:
        with torch.inference_mode():
            for ids in windows:
                prefill(decoder, ids)
    finally:
        ops.rope_and_store = store
    expected = Moments.of_weights(decoder).keys.diagonal(dim1=-2, dim2=-1).mean(-1).sqrt()
    found = {"rms": squares.sqrt() / expected, "largest": largest / expected}
    return {name: [round(float(x), 3) for x in (each.min(), each.median(), each.max())] for name, each in found.items()}


def e3m4_variants(decoder: Decoder) -> dict[str, Variant]:
    """A cache in e3m4 instead of e4m3: keys and values times a power of two for each head."""
    spec = decoder.spec
    fixed = torch.full((spec.num_layers, spec.num_kv_heads), 2.0**13)  # up to 62
    plain, values = Variant(keys=True), Variant(values=True)
    halves = replace(plain, key_rotation="halves")
    found = {
        "keys, rotated: halves": halves,
        "keys in e3m4": replace(plain, e3m4_keys=fixed),
        "keys in e3m4, rotated: halves": replace(halves, e3m4_keys=fixed),
        "values": values,
    }
    for headroom in (8, 16, 32):
        of_keys, of_values = units_by_weights(decoder, headroom)
        found[f"keys in e3m4, rotated: halves, headroom {headroom}"] = replace(halves, e3m4_keys=of_keys)
        found[f"values in e3m4, headroom {headroom}"] = replace(values, e3m4_values=of_values)
    kept = kept_downs(spec.num_layers)
    cached = replace(halves, weights=EVERY, inputs=EVERY, plain_downs=kept, is_compensated=True, values=True)
    name = "compensated weights and activations, cache rotated: halves"
    found[name] = cached
    found[f"{name}, keys in e3m4"] = replace(cached, e3m4_keys=fixed)
    for headroom in (16, 32):
        of_keys = units_by_weights(decoder, headroom)[0]
        found[f"{name}, keys in e3m4, headroom {headroom}"] = replace(cached, e3m4_keys=of_keys)
    both = replace(cached, e3m4_keys=units_by_weights(decoder, 32)[0], e3m4_values=units_by_weights(decoder, 16)[1])
    found[f"{name}, keys and values in e3m4, headroom 32 and 16"] = both
    return found


def key_variants(num_layers: int) -> dict[str, Variant]:
    """What lowers the cost of keys in FP8, and of all parts together, with the down projections kept that Headrace
    keeps."""
    kept = kept_downs(num_layers)
    both = Variant(EVERY, EVERY, plain_downs=kept)
    found = {
        "keys": Variant(keys=True),
        "values": Variant(values=True),
        "keys, times 16": Variant(keys=True, key_scale=16.0),
        "values, times 16": Variant(values=True, value_scale=16.0),
    }
    for name in ROTATIONS:
        if name != "none":
            found[f"keys, rotated: {name}"] = Variant(keys=True, key_rotation=name)
    compensated = replace(both, is_compensated=True)
    cases = {"weights and activations": both, "compensated weights and activations": compensated}
    for name, case in cases.items():
        found[name] = case
        found[f"{name}, cache"] = replace(case, keys=True, values=True)
        found[f"{name}, cache rotated: halves"] = replace(case, keys=True, values=True, key_rotation="halves")
    found["compensated weights"] = replace(compensated, inputs=frozenset())
    found["activations"] = replace(both, weights=frozenset())
    found["activations, a scale per 128 inputs"] = replace(both, weights=frozenset(), has_input_groups=True)
    return found


def input_variants(num_layers: int) -> dict[str, Variant]:
    """Which inputs cost how much, and what does not lower it."""
    kept = kept_downs(num_layers)
    found = {"inputs": Variant(inputs=EVERY, plain_downs=kept)}
    for part in PARTS:
        alone = Variant(inputs=frozenset({part}), plain_downs=kept)
        found[f"inputs of {part}"] = alone
        found[f"inputs of {part}, mixed"] = replace(alone, mixed=frozenset({part}))
        found[f"inputs of {part}, balanced"] = replace(alone, balanced=frozenset({part}))
    return found


def row_part_variants() -> dict[str, Variant]:
    """How exact the rows of small steps on a GPU are: two parts of eight bits each."""
    roundings = {
        "FP8": None,
        "bfloat16": bf16_rows,
        "two FP8 parts of bfloat16": fp8_parts_of_rows,
        "two integer parts of bfloat16": integer_parts_of_rows,
    }
    return {f"inputs in {name}": Variant(inputs=EVERY, input_rounding=each) for name, each in roundings.items()}


def copy_variants(num_layers: int) -> dict[str, Variant]:
    """What few rows on a GPU lose by INT8 copies of the head and of the matrices that keep 16 bits."""
    int4 = Variant(weights=EVERY, has_int4_weights=True)
    kept = replace(int4, plain_downs=kept_downs(num_layers))
    return {
        "head in INT8": Variant(has_int8_head=True),
        "weights in four bits": int4,
        "weights in four bits, four down projections in 16": kept,
        "weights in four bits, four down projections in INT8": replace(kept, kept_rounding=int8_rows),
    }


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
    kept = kept_downs(last + 1)
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
    inputs = record_inputs(decoder, windows[:1, :256], has_moments=True)
    largest = {index: float(each.down.largest.max()) for index, each in inputs.items()}
    typical = {index: math.sqrt(float(each.down.moments.diagonal().mean()) / 256) for index, each in inputs.items()}
    order = sorted(largest, key=lambda index: -largest[index] / typical[index])
    for index in order[:6]:
        print(f"layer {index}: largest input of down {largest[index]:.1f}, RMS {typical[index]:.4f}", flush=True)
    return order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window-len", type=int, default=1024)
    parser.add_argument("--only", nargs="*", help="names of rows; default: all")
    parser.add_argument("--keys", action="store_true", help="the rows about keys, and about all parts together")
    parser.add_argument("--inputs", action="store_true", help="the rows about inputs of linear layers")
    parser.add_argument("--row-parts", action="store_true", help="the rows about inputs as two parts of eight bits")
    parser.add_argument("--copies", action="store_true", help="the rows about INT8 copies of what keeps 16 bits")
    parser.add_argument("--balance", action="store_true", help="the rows about balanced keys, and keys in INT8")
    parser.add_argument("--e3m4", action="store_true", help="the rows about a cache in e3m4")
    parser.add_argument("--data", type=Path, help="folder of Markdown files, for --keys, --inputs, --balance, --e3m4")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    decoder = load(given.model)
    tokenizer = load_tokenizer(open_checkpoint(given.model).text)
    windows = windows_of(tokenizer.encode(embedded_text()[:80_000]), given.windows, given.window_len)
    if given.keys or given.inputs or given.balance or given.e3m4:
        text = "\n".join(path.read_text() for path in sorted(given.data.glob("*.md")))
        data = windows_of(tokenizer.encode(text[:120_000]), 16)
        decoder = with_compensated(decoder, data)
        if given.balance:
            chosen = balance_variants(decoder, data)
        elif given.e3m4:
            chosen = e3m4_variants(decoder)
        else:
            chosen = (key_variants if given.keys else input_variants)(decoder.spec.num_layers)
    elif given.row_parts:
        chosen = row_part_variants()
    elif given.copies:
        chosen = copy_variants(decoder.spec.num_layers)
    else:
        chosen = variants(decoder, loudest_layers(decoder, windows))
    if given.only:
        chosen = {name: chosen[name] for name in given.only}
    facts = {"keys_to_expected": key_sizes(decoder, windows)} if given.e3m4 else {}
    plain = log_probabilities(Variant(), decoder, windows)
    found: dict[str, Cost] = {}
    for name, variant in chosen.items():
        found[name] = cost = Cost.of(log_probabilities(variant, decoder, windows), plain, windows)
        print(
            f"{name:66} {cost.perplexity:8.4f} {cost.change:+7.2%} +- {cost.change_error:.2%}, "
            f"divergence {cost.divergence:.5f} +- {cost.divergence_error:.5f}",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(record_of(given.model, windows, found) | facts, indent=1) + "\n")


def record_of(model: str, windows: Tensor, found: dict[str, Cost]) -> dict[str, Any]:
    return {
        "model": model,
        "command": "python benchmarks/fp8_parts.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cpu": cpu_name(),
        "num_windows": windows.shape[0],
        "window_len": windows.shape[1],
        "costs": {name: {key: round(value, 6) for key, value in vars(cost).items()} for name, cost in found.items()},
    }


if __name__ == "__main__":
    main()
