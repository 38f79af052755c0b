"""The FP8 kernels against their references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.layout import Fp8Rows, LayerCache, Splits
from tests.kernels.places import (
    INTERPRETERS,
    SHAPES,
    SMALL_SHAPES,
    Place,
    cases,
    in_fp8,
    keys_of,
    make_cache,
    make_layout,
    relative_error,
)

ROUNDING = 0.02  # of e4m3: two kernels that differ in the last bit of a sum may round to different FP8 values
KEY_ROUNDING = 0.015  # of e3m4: the reference rounds keys to 16 bits before


# What writes e4m3 runs on a GPU only: the interpreter does not carry when it rounds up to a power of two.
on_gpu = cases("", gpu=[()], interpreted=[])


def dequantized(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales


def make_fp8_cache(place: Place, num_blocks: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    return in_fp8(make_cache(place, num_blocks, 16, num_kv_heads, head_dim))


@on_gpu
def test_rows_are_quantized_by_their_largest_value(place: Place) -> None:
    from headrace.kernels import gpu

    x = place.randn(9, 300) * torch.logspace(-3, 2, 9, device=place.device)[:, None].to(place.dtype)
    x[4] = 0
    found, expected = gpu.quantize_rows(x), reference.quantize_rows(x)
    assert torch.equal(found.scales, expected.scales)
    assert relative_error(dequantized(found), x) < 0.04
    assert relative_error(dequantized(found), dequantized(expected)) < ROUNDING
    assert not dequantized(found)[4].any()


@on_gpu
def test_norms_in_fp8_match_their_references(place: Place) -> None:
    from headrace.kernels import gpu

    x, weight = place.randn(7, 200), torch.randn(200, device=place.device)
    assert relative_error(dequantized(gpu.rms_norm_fp8(x, weight, 1e-5)), reference.rms_norm(x, weight, 1e-5)) < 0.04
    residual = place.randn(7, 200)
    other = residual.clone()
    found = gpu.add_rms_norm_fp8(x, residual, weight, 1e-5)
    assert (
        relative_error(dequantized(found), dequantized(reference.add_rms_norm_fp8(x, other, weight, 1e-5))) < ROUNDING
    )
    assert torch.equal(residual, other)


@on_gpu
def test_layer_norms_in_fp8_match_their_references(place: Place) -> None:
    from headrace.kernels import gpu

    x, weight, bias = place.randn(7, 200), *(torch.randn(200, device=place.device) for _ in range(2))
    expected = reference.layer_norm(x, weight, bias, 1e-5)
    assert relative_error(dequantized(gpu.layer_norm_fp8(x, weight, bias, 1e-5)), expected) < 0.04
    residual = place.randn(7, 200)
    other = residual.clone()
    found = gpu.add_layer_norm_fp8(x, residual, weight, bias, 1e-5)
    assert (
        relative_error(dequantized(found), dequantized(reference.add_layer_norm_fp8(x, other, weight, bias, 1e-5)))
        < ROUNDING
    )
    assert torch.equal(residual, other)


@on_gpu
@pytest.mark.parametrize("name", ["gelu_fp8", "gelu_tanh_fp8"])
def test_plain_activations_in_fp8_match_their_references(place: Place, name: str) -> None:
    from headrace.kernels import gpu

    x = 3 * place.randn(5, 700)
    assert relative_error(dequantized(getattr(gpu, name)(x)), dequantized(getattr(reference, name)(x))) < ROUNDING


@on_gpu
@pytest.mark.parametrize("name", ["silu_and_mul_fp8", "gelu_tanh_and_mul_fp8"])
def test_gated_activations_in_fp8_match_their_references(place: Place, name: str) -> None:
    from headrace.kernels import gpu

    x = 3 * place.randn(5, 2 * 700)
    assert relative_error(dequantized(getattr(gpu, name)(x)), dequantized(getattr(reference, name)(x))) < ROUNDING


@cases("num_heads num_kv_heads head_dim query_lens", gpu=[(*shape, [1, 1, 40, 7]) for shape in SHAPES], interpreted=[])
def test_a_cache_in_fp8_is_written_as_by_its_reference(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, query_lens: list[int]
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, [33, 1, 64, 100], 16)
    qkv = 200 * place.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)  # some past the largest
    cos_sin = torch.randn(128, head_dim, device=place.device)
    ours, theirs = (make_fp8_cache(place, num_blocks, num_kv_heads, head_dim) for _ in range(2))
    theirs.keys.copy_(ours.keys)
    theirs.values.copy_(ours.values)
    reference.rope_and_store(qkv.clone(), layout, cos_sin, theirs, num_heads, num_kv_heads, None, None, 1e-6)
    gpu.rope_and_store(qkv.clone(), layout, cos_sin, ours, num_heads, num_kv_heads, None, None, 1e-6)
    assert relative_error(keys_of(ours), keys_of(theirs)) < KEY_ROUNDING
    assert torch.equal(ours.values.float(), theirs.values.float())
    assert ours.values.float().abs().max() == reference.FP8_MAX


@cases("num_heads num_kv_heads head_dim", gpu=SHAPES, interpreted=[*SMALL_SHAPES, (2, 2, 80)])
def test_keys_of_a_cache_in_fp8_are_written_as_by_their_reference(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 5], [33, 64], 16)
    ours = make_fp8_cache(place, num_blocks, num_kv_heads, head_dim)
    theirs = dataclasses.replace(ours, keys=ours.keys.clone(), values=ours.values.clone())
    sizes = torch.logspace(-3, 1, layout.num_tokens, device=place.device)[:, None]  # some are out of range
    qkv = place.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim) * sizes.to(place.dtype)
    cos_sin = torch.randn(128, head_dim, device=place.device)
    reference.rope_and_store(qkv.clone(), layout, cos_sin, theirs, num_heads, num_kv_heads, None, None, 1e-6)
    gpu.rope_and_store(qkv.clone(), layout, cos_sin, ours, num_heads, num_kv_heads, None, None, 1e-6)
    assert relative_error(keys_of(ours), keys_of(theirs)) < KEY_ROUNDING
    assert ((ours.keys & 0x7F) == 0x7F).any(), "no key is as large as its unit allows"


@cases(
    "num_heads num_kv_heads head_dim",
    gpu=SHAPES,
    interpreted=[*SMALL_SHAPES, (2, 2, 80)],
)
def test_queries_and_keys_for_a_cache_in_fp8_are_mixed_as_by_their_reference(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Compares the keys beside the queries too, which fresh prefills read."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 5], [33, 64], 16)
    qkv = place.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(128, head_dim, device=place.device)
    cache = make_fp8_cache(place, num_blocks, num_kv_heads, head_dim)
    swapped = qkv.unflatten(1, (-1, head_dim)).clone()  # with keys for queries
    swapped[:, :num_kv_heads] = swapped[:, num_heads : num_heads + num_kv_heads]
    expected, keys = (
        reference.rope_and_store(x, layout, cos_sin, cache, num_heads, num_kv_heads, None, None, 1e-6)
        for x in (qkv.clone(), swapped.flatten(1))
    )
    found = gpu.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads, None, None, 1e-6)
    found_keys = qkv.unflatten(1, (-1, head_dim))[:, num_heads : num_heads + num_kv_heads]
    assert relative_error(found, expected) < place.error
    assert relative_error(found_keys, keys[:, :num_kv_heads]) < place.error


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
def test_mixing_queries_and_keys_leaves_scores_as_they_are(head_dim: int) -> None:
    layout, num_blocks = make_layout(INTERPRETERS[-1], [4], [4], 16)
    qkv, cos_sin = torch.randn(layout.num_tokens, 3 * head_dim), torch.randn(128, head_dim)
    scores = []
    for dtype in (torch.float32, torch.float8_e4m3fn):
        cache = reference.allocate_cache(num_blocks, 16, 1, head_dim, dtype, torch.device("cpu"))
        q = reference.rope_and_store(qkv.clone(), layout, cos_sin, cache, 1, 1, None, None, 1e-6)
        keys = keys_of(cache).flatten(0, 2)[layout.slot_mapping]
        scores.append(q[:, 0] @ keys.t())
    assert relative_error(scores[1], scores[0]) < 0.025


@pytest.mark.parametrize(("head_dim", "length"), [(8, 4), (64, 32), (80, 8), (96, 16), (128, 64)])
def test_a_large_dimension_of_a_key_is_spread_over_its_half(head_dim: int, length: int) -> None:
    layout, num_blocks = make_layout(INTERPRETERS[-1], [1], [1], 16)
    qkv = torch.zeros(1, 3 * head_dim)
    qkv[0, head_dim] = 8.0  # of the key, after one head of queries
    cos_sin = torch.cat((torch.ones(4, head_dim // 2), torch.zeros(4, head_dim // 2)), dim=1)  # turns by no angle
    cache = reference.allocate_cache(num_blocks, 16, 1, head_dim, torch.float8_e4m3fn, torch.device("cpu"))
    reference.rope_and_store(qkv, layout, cos_sin, cache, 1, 1, None, None, 1e-6)
    key = keys_of(cache).flatten(0, 2)[int(layout.slot_mapping[0])]
    assert relative_error(key[:length], torch.full((length,), 8.0 * length**-0.5)) < 0.035
    assert not key[length:].any()


@cases(
    "num_heads num_kv_heads head_dim query_lens context_lens",
    gpu=[(*shape, [1, 1, 1, 1, 200, 2, 17], [1, 15, 16, 777, 300, 2, 129]) for shape in SHAPES],
    interpreted=[(*shape, [1, 1, 1, 50, 2, 17], [1, 15, 99, 70, 2, 50]) for shape in SMALL_SHAPES],
)
@pytest.mark.parametrize("splits", [Splits(), Splits(5), Splits(5, num_seqs=3)], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 20.0)])
def test_attention_over_a_cache_in_fp8_matches_its_reference(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_lens: list[int],
    context_lens: list[int],
    splits: Splits,
    window: int | None,
    softcap: float | None,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, context_lens, 16, splits)
    cache = make_fp8_cache(place, num_blocks, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap)
    assert relative_error(found, expected) < max(place.attention_error, 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [17, 300])
def test_fp8_gemms_match_their_references(num_tokens: int, has_bias: bool) -> None:
    from headrace.kernels import gpu

    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(512, device="cuda", dtype=torch.bfloat16) if has_bias else None
    x = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    ours, theirs = gpu.pack_linear(weight, bias, as_fp8=True), reference.pack_linear(weight, bias, as_fp8=True)
    assert ours.prefers_fp8(num_tokens) and not ours.prefers_fp8(16)
    assert relative_error(ours(x), theirs(x)) < 5e-3
    assert relative_error(ours(gpu.quantize_rows(x)), theirs(x)) < 5e-3


@pytest.mark.gpu
def test_matrices_of_odd_sides_are_not_quantized() -> None:
    from headrace.kernels import gpu

    packed = gpu.pack_linear(torch.randn(24, 40, device="cuda", dtype=torch.bfloat16), as_fp8=True)
    assert not packed.prefers_fp8(17)
