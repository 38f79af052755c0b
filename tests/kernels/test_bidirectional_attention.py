"""Attention and rotation of encoders: the kernels against their references, and these against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.layout import PackedLayout
from tests.kernels.places import Place, cases

LENS = (70, 33, 33, 5, 1)


def build_layout(device: str, lens: tuple[int, ...] = LENS, rows: int = 32) -> PackedLayout:
    starts = np.concatenate([[0], np.cumsum(lens)])
    tiles = [(text, first) for text, length in enumerate(lens) for first in range(0, length, rows)]
    positions = np.concatenate([np.arange(length) for length in lens])
    return PackedLayout(
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        types=torch.zeros(len(positions), dtype=torch.int32, device=device),
        starts=torch.tensor(starts, dtype=torch.int32, device=device),
        lens=lens,
        tiles=torch.tensor(tiles, dtype=torch.int32, device=device),
        tile_rows=rows,
    )


def by_definition(qkv: Tensor, lens: tuple[int, ...], num_heads: int, reach: int | None) -> Tensor:
    """One text and one head at a time, in float64."""
    out, start = [], 0
    for length in lens:
        heads = qkv[start : start + length].double().view(length, 3, num_heads, -1)
        q, k, v = (heads[:, side].transpose(0, 1) for side in range(3))
        scores = 0.25 * q @ k.transpose(1, 2)
        if reach is not None:
            places = torch.arange(length, device=qkv.device)
            scores = scores.masked_fill((places[:, None] - places).abs() > reach, -torch.inf)
        out.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        start += length
    return torch.cat(out)


@pytest.mark.parametrize("reach", [None, 6])
def test_the_reference_sees_the_whole_text_or_its_reach(reach: int | None) -> None:
    qkv = torch.randn(sum(LENS), 3 * 2 * 16)
    found = reference.bidirectional_attention(qkv, build_layout("cpu"), 2, 0.25, reach)
    torch.testing.assert_close(found.double(), by_definition(qkv, LENS, 2, reach), atol=1e-5, rtol=1e-5)


@cases(
    "num_heads head_dim reach",
    gpu=[(12, 64, None), (12, 64, 64), (16, 32, None), (4, 24, 6), (8, 128, 20)],
    interpreted=[(2, 16, None), (2, 24, 6)],
)
def test_the_kernel_matches_its_definition(place: Place, num_heads: int, head_dim: int, reach: int | None) -> None:
    from headrace.kernels.gpu.bidirectional_attention import bidirectional_attention

    qkv = place.randn(sum(LENS), 3 * num_heads * head_dim)
    found = bidirectional_attention(qkv, build_layout(place.device), num_heads, 0.25, reach)
    expected = by_definition(qkv, LENS, num_heads, reach)
    torch.testing.assert_close(found.double(), expected, atol=place.attention_error, rtol=place.attention_error)


@cases("", gpu=[()], interpreted=[()])
def test_the_rotation_matches_its_reference(place: Place) -> None:
    from headrace.kernels.gpu import rope

    layout = build_layout(place.device)
    angles = torch.rand(max(LENS), 12, device=place.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    qkv = place.randn(sum(LENS), 3 * 3 * 24)
    expected = qkv.clone()
    reference.rotate(expected, layout.positions, cos_sin, 3)
    rope.rotate(qkv, layout.positions, cos_sin, 3)
    torch.testing.assert_close(qkv, expected, atol=place.error, rtol=place.error)


def test_the_gate_of_an_encoder_is_the_exact_gelu() -> None:
    gate_up = torch.randn(3, 8)
    expected = torch.nn.functional.gelu(gate_up[:, :4]) * gate_up[:, 4:]
    torch.testing.assert_close(ops.gelu_and_mul(gate_up), expected)
