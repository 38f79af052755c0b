"""Cosines and sines of the rotary embedding, computed once in float64 and stored in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.spec import QueryGrowth, RopeSpec

_POSITIONS_AT_ONCE = 8192  # bounds the float64 scratch of long contexts


def cos_sin_table(
    rope: RopeSpec, *, head_dim: int, max_len: int, device: torch.device, rotary_dim: int | None = None
) -> Tensor:
    """[max_len, head_dim]: each row has the cosines of a position in its first half, the sines in its second.

    Each half starts with the dimensions that rotate (see `head_order`); the others have cosine 1 and sine 0.
    """
    table = torch.zeros(max_len, 2, head_dim // 2, dtype=torch.float32)
    table[:, 0] = 1.0
    if rope.kind == "none":
        return table.flatten(1).to(device)
    frequencies = inverse_frequencies(rope, rotary_dim or head_dim, max_len=max_len)
    for start in range(0, max_len, _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, max_len)
        angles = torch.outer(torch.arange(start, end, dtype=torch.float64), frequencies)  # [positions, frequencies]
        table[start:end, 0, : len(frequencies)] = angles.cos() * rope.attention_factor
        table[start:end, 1, : len(frequencies)] = angles.sin() * rope.attention_factor
    return table.flatten(1).to(device)


def query_scales(growth: QueryGrowth | None, *, max_len: int, device: torch.device) -> Tensor | None:
    """[max_len] float32: returns the factor of the query at each position, or None if all are 1."""
    if growth is None or max_len < growth.step:
        return None
    steps = torch.arange(growth.offset, max_len + growth.offset, dtype=torch.float64).div(growth.step).floor()
    return (1.0 + growth.strength * steps.log1p()).to(device, torch.float32)


def head_order(head_dim: int, rotary_dim: int | None, *, rotates_pairs: bool) -> list[int] | None:
    """Returns which dimension of the checkpoint's head is at each index of ours; None: they are in order.

    Kernels rotate whole heads, dimension i with i + half. For heads that rotate in part, or in neighbouring pairs, the
    two dimensions of a pair are put half a head apart. Scores do not depend on the order of dimensions as long as
    queries and keys share it.
    """
    rotary_dim = rotary_dim or head_dim
    if rotary_dim == head_dim and not rotates_pairs:
        return None
    rotated, still = list(range(rotary_dim)), list(range(rotary_dim, head_dim))
    first, second = (rotated[::2], rotated[1::2]) if rotates_pairs else _halves(rotated)
    still_first, still_second = _halves(still)
    return first + still_first + second + still_second


def _halves(dims: list[int]) -> tuple[list[int], list[int]]:
    return dims[: len(dims) // 2], dims[len(dims) // 2 :]


def inverse_frequencies(rope: RopeSpec, rotary_dim: int, *, max_len: int = 0) -> Tensor:
    """[rotary_dim / 2] float64, radians per position.

    Two kinds depend on the context length, `max_len`. It is the engine's, and so the same for all its sequences: keys
    in the cache were rotated once, and must match later queries.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    theta = _stretched_theta(rope, rotary_dim, max_len) if rope.kind == "dynamic" else rope.theta
    frequencies = theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _stretch_llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _stretch_yarn(frequencies, rope, rotary_dim)
    elif rope.kind == "longrope":
        divisors = rope.long_divisors if max_len > rope.original_max_len else rope.short_divisors
        frequencies = frequencies / _divisors(divisors, "the divisors of rope type 'longrope'", len(frequencies))
    if rope.frequency_divisors:
        frequencies = frequencies / _divisors(rope.frequency_divisors, "tensor 'rope_freqs.weight'", len(frequencies))
    return frequencies


def _stretched_theta(rope: RopeSpec, rotary_dim: int, max_len: int) -> float:
    """Scales the base: beyond the original context it grows with the context."""
    stretch = rope.factor * max(max_len, rope.original_max_len) / rope.original_max_len - (rope.factor - 1)
    return float(rope.theta * stretch ** (rotary_dim / (rotary_dim - 2)))


def _stretch_llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Keeps fast frequencies, divides slow ones by the factor, and blends those between."""
    turns = frequencies * rope.original_max_len / (2 * math.pi)  # full turns within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies, rope.factor, kept.clamp(0, 1))


def _stretch_yarn(frequencies: Tensor, rope: RopeSpec, rotary_dim: int) -> Tensor:
    """Blends as llama3 does, but linearly over the dimensions between two numbers of turns."""
    low, high = (_dimension_of_turns(turns, rope, rotary_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / span
    return _blend(frequencies, rope.factor, 1 - ramp.clamp(0, 1))


def _dimension_of_turns(turns: float, rope: RopeSpec, rotary_dim: int) -> float:
    wavelength = rope.original_max_len / (turns * 2 * math.pi)
    return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return frequencies * kept + frequencies / factor * (1 - kept)


def _divisors(values: tuple[float, ...], what: str, num_frequencies: int) -> Tensor:
    if len(values) != num_frequencies:
        raise ModelError(f"{what} must have {num_frequencies} values, found {len(values)}")
    return torch.tensor(values, dtype=torch.float64)
