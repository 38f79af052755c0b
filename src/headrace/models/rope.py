"""The cosines and sines of the rotary embedding, computed once in float64 and kept in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.spec import RopeSpec

_POSITIONS_AT_ONCE = 8192  # bounds the float64 scratch of long contexts


def cos_sin_table(rope: RopeSpec, *, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """[max_len, head_dim]: a line has the cosines of a position in its first half, the sines in its second."""
    frequencies = inverse_frequencies(rope, head_dim)
    table = torch.empty(max_len, head_dim, dtype=torch.float32)
    for start in range(0, max_len, _POSITIONS_AT_ONCE):
        end = min(start + _POSITIONS_AT_ONCE, max_len)
        angles = torch.outer(torch.arange(start, end, dtype=torch.float64), frequencies)  # [positions, head_dim / 2]
        table[start:end, : head_dim // 2] = angles.cos() * rope.attention_factor
        table[start:end, head_dim // 2 :] = angles.sin() * rope.attention_factor
    return table.to(device)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """[head_dim / 2] float64, radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _stretch_llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _stretch_yarn(frequencies, rope, head_dim)
    if rope.frequency_divisors:
        frequencies = frequencies / _divisors(rope, num_frequencies=head_dim // 2)
    return frequencies


def _stretch_llama3(frequencies: Tensor, rope: RopeSpec) -> Tensor:
    """Fast frequencies stay, slow ones are divided by the factor, those between are blended."""
    turns = frequencies * rope.original_max_len / (2 * math.pi)  # full turns within the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(frequencies, rope.factor, kept.clamp(0, 1))


def _stretch_yarn(frequencies: Tensor, rope: RopeSpec, head_dim: int) -> Tensor:
    """As llama3, but the blend runs linearly over the dimensions between two numbers of turns."""
    low, high = (_dimension_of_turns(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / span
    return _blend(frequencies, rope.factor, 1 - ramp.clamp(0, 1))


def _dimension_of_turns(turns: float, rope: RopeSpec, head_dim: int) -> float:
    wavelength = rope.original_max_len / (turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    return frequencies * kept + frequencies / factor * (1 - kept)


def _divisors(rope: RopeSpec, *, num_frequencies: int) -> Tensor:
    if len(rope.frequency_divisors) != num_frequencies:
        found = len(rope.frequency_divisors)
        raise ModelError(f"tensor 'rope_freqs.weight' must have {num_frequencies} values, found {found}")
    return torch.tensor(rope.frequency_divisors, dtype=torch.float64)
