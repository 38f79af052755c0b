"""Rotary embedding and the write to the cache: the kernel against its reference, and the cache's own operations."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.cpu import rope
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.kernels.reference.e3m4 import decode_e3m4

CPU = torch.device("cpu")


def build_layout(num_tokens: int, *, num_slots: int) -> StepLayout:
    """Single tokens of as many sequences; only positions and slots matter here."""
    return StepLayout(
        positions=torch.randint(100, (num_tokens,)),
        slot_mapping=torch.randperm(num_slots)[:num_tokens],
        query_starts=torch.arange(num_tokens + 1, dtype=torch.int32),
        context_lens=torch.ones(num_tokens, dtype=torch.int32),
        slots=torch.zeros(num_tokens, dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        max_query_len=1,
        max_context_len=1,
    )


def build_cos_sin(head_dim: int) -> Tensor:
    angles = torch.outer(torch.arange(100.0), 10000.0 ** -torch.linspace(0, 1, head_dim // 2))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def build_caches(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype = torch.float32
) -> tuple[LayerCache, LayerCache]:
    fast = rope.allocate_cache(12, block_size, num_kv_heads, head_dim, dtype, CPU)
    plain = reference.allocate_cache(12, block_size, num_kv_heads, head_dim, dtype, CPU)
    for cache in (fast, plain):
        cache.keys.fill_(7)
        cache.values.fill_(7)
    return fast, plain


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim", "block_size"),
    [(1, (9, 3), 64, 16), (70, (9, 3), 64, 16), (33, (4, 4), 128, 8), (20, (8, 1), 96, 32), (5, (2, 1), 8, 4)],
)
def test_the_kernel_matches_the_reference_and_touches_no_other_slot(
    num_tokens: int, heads: tuple[int, int], head_dim: int, block_size: int, with_norms: bool
) -> None:
    qkv = torch.randn(num_tokens, (heads[0] + 2 * heads[1]) * head_dim)
    layout, cos_sin = build_layout(num_tokens, num_slots=12 * block_size), build_cos_sin(head_dim)
    fast, plain = build_caches(heads[1], head_dim, block_size)
    q_norm, k_norm = (torch.randn(head_dim), torch.randn(head_dim)) if with_norms else (None, None)
    expected = reference.rope_and_store(qkv.clone(), layout, cos_sin, plain, *heads, q_norm, k_norm, 1e-6)
    q = rope.rope_and_store(qkv.clone(), layout, cos_sin, fast, *heads, q_norm, k_norm, 1e-6)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(fast.keys, plain.keys)
    torch.testing.assert_close(fast.values, plain.values)


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim", "block_size"), [(1, (9, 3), 64, 16), (70, (9, 3), 64, 16), (20, (8, 1), 96, 32)]
)
def test_the_kernel_stores_float16_as_the_reference_does(
    num_tokens: int, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    qkv = torch.randn(num_tokens, (heads[0] + 2 * heads[1]) * head_dim)
    qkv[0, -1], qkv[0, -2] = 1e6, -1e6  # out of range: the largest numbers
    layout, cos_sin = build_layout(num_tokens, num_slots=12 * block_size), build_cos_sin(head_dim)
    fast, plain = build_caches(heads[1], head_dim, block_size, torch.float16)
    expected = reference.rope_and_store(qkv.clone(), layout, cos_sin, plain, *heads, None, None, 1e-6)
    torch.testing.assert_close(
        rope.rope_and_store(qkv.clone(), layout, cos_sin, fast, *heads, None, None, 1e-6), expected
    )
    assert torch.equal(fast.values, plain.values)
    assert fast.values.abs().max() == 65504
    torch.testing.assert_close(fast.keys, plain.keys, rtol=2**-10, atol=1e-6)  # an angle's last bit may round otherwise


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim", "block_size"), [(1, (9, 3), 64, 16), (70, (9, 3), 64, 16), (20, (8, 1), 96, 32)]
)
def test_the_kernel_mixes_and_stores_keys_in_e3m4_as_the_reference_does(
    num_tokens: int, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    qkv = torch.randn(num_tokens, (heads[0] + 2 * heads[1]) * head_dim)
    qkv[0, -1] = 1e6
    layout, cos_sin = build_layout(num_tokens, num_slots=12 * block_size), build_cos_sin(head_dim)
    units = 2.0 ** torch.arange(10.0, 10.0 + heads[1])
    fast, plain = (
        dataclasses.replace(cache, key_units=units)
        for cache in build_caches(heads[1], head_dim, block_size, torch.float8_e4m3fn)
    )
    expected = reference.rope_and_store(qkv.clone(), layout, cos_sin, plain, *heads, None, None, 1e-6)
    found = rope.rope_and_store(qkv.clone(), layout, cos_sin, fast, *heads, None, None, 1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(fast.values.view(torch.uint8), plain.values.view(torch.uint8))
    keys, wanted = decode_e3m4(fast.keys), decode_e3m4(plain.keys)
    assert (keys == wanted).float().mean() > 0.999  # a last bit of a sum may round to the neighbour
    torch.testing.assert_close(keys, wanted, rtol=2**-4, atol=2**-18)


def test_the_reference_turns_each_pair_of_halves_by_its_angle() -> None:
    _, cache = build_caches(1, 2, 16)
    layout = build_layout(1, num_slots=16)
    angle = 0.3
    cos_sin = torch.tensor([[math.cos(angle), math.sin(angle)]]).expand(100, 2)
    qkv = torch.tensor([[1.0, 0.0, 0.0, 2.0, 5.0, 6.0]])
    q = reference.rope_and_store(qkv, layout, cos_sin, cache, 1, 1, None, None, 0.0)
    slot = int(layout.slot_mapping[0])
    torch.testing.assert_close(q[0, 0], torch.tensor([math.cos(angle), math.sin(angle)]))
    torch.testing.assert_close(cache.keys[0, 0, slot], torch.tensor([-2 * math.sin(angle), 2 * math.cos(angle)]))
    torch.testing.assert_close(cache.values[0, 0, slot], torch.tensor([5.0, 6.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_blocks_copies_in_every_layer_and_nothing_else(dtype: torch.dtype) -> None:
    caches = [ops.allocate_cache(5, 16, 2, 8, dtype, CPU) for _ in range(3)]
    for cache in caches:
        cache.keys.copy_(torch.randn(5, 2, 16, 8))
        cache.values.copy_(torch.randn(5, 2, 16, 8))
    before = [(cache.keys.clone(), cache.values.clone()) for cache in caches]
    ops.copy_blocks(caches, torch.tensor([0, 3]), torch.tensor([4, 1]))
    for cache, sides in zip(caches, before, strict=True):
        for side, old in zip((cache.keys, cache.values), sides, strict=True):
            assert torch.equal(side, old[[0, 3, 2, 3, 0]])


def test_a_caches_sides_both_look_like_blocks_of_heads_of_tokens() -> None:
    cache = ops.allocate_cache(7, 16, 3, 64, torch.float32, CPU)
    assert cache.keys.shape == cache.values.shape == (7, 3, 16, 64)
    assert cache.block_size == 16
