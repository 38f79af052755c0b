"""Attention over a cache of latents: the reference against keys and values of full heads, kernels against the
reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.layout import LayerCache, Splits, StepLayout
from tests.kernels.places import Place, cases, everywhere, make_layout, relative_error
from tests.kernels.test_attention import MIXED, build_step, tolerance

CPU = torch.device("cpu")


def latent_cache(place: Place, num_blocks: int, rank: int, rotary_dim: int) -> LayerCache:
    return LayerCache.of_latents(place.randn(num_blocks, 1, 16, rank + rotary_dim), rank)


def test_latents_stand_for_keys_and_values_of_all_heads() -> None:
    """Queries multiplied by a head's key matrix see latents as they would see its keys, and the mean of its values is
    its value matrix times the mean of the latents."""
    step = build_step(MIXED, heads=(3, 1), head_dim=40)
    cache = LayerCache.of_latents(step.cache.keys.contiguous(), 32)
    key_up, value_up = torch.randn(3, 24, 32), torch.randn(3, 32, 20)
    still = torch.randn(len(step.q), 3, 24)
    q = torch.cat((torch.einsum("thd,hdr->thr", still, key_up), step.q[:, :, 32:]), dim=-1)
    found = torch.einsum("thr,hrv->thv", reference.latent_attention(q, cache, step.layout, 0.1), value_up)
    for seq, latents in enumerate(step.keys):
        tokens = slice(*step.layout.query_starts[seq : seq + 2].tolist())
        keys = torch.einsum("cr,hdr->hcd", latents[0, :, :32], key_up)
        scores = still[tokens].transpose(0, 1) @ keys.mT + step.q[tokens, :, 32:].transpose(0, 1) @ latents[0, :, 32:].T
        hidden = torch.arange(keys.shape[1]) > step.layout.positions[tokens, None]
        weights = (0.1 * scores).masked_fill(hidden, -torch.inf).softmax(-1)
        expected = weights @ torch.einsum("cr,hrv->hcv", latents[0, :, :32], value_up)
        torch.testing.assert_close(found[tokens], expected.transpose(0, 1), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num_heads", "rank", "rotary_dim"), [(16, 64, 32), (5, 72, 8), (130, 32, 16)])
def test_the_cpu_kernel_matches_the_reference(num_heads: int, rank: int, rotary_dim: int, dtype: torch.dtype) -> None:
    step = build_step(MIXED, heads=(num_heads, 1), head_dim=rank + rotary_dim)
    cache = ops.allocate_latent_cache(len(step.cache.keys), 16, rank, rotary_dim, dtype, CPU)
    cache.keys.copy_(step.cache.keys)  # NaN where no token is
    expected = reference.latent_attention(step.q, cache, step.layout, 0.1)
    torch.testing.assert_close(ops.latent_attention(step.q, cache, step.layout, 0.1), expected, **tolerance(step))


@cases(
    "num_heads rank rotary_dim query_lens context_lens",
    gpu=[(n, 512, 64, [1, 1, 1, 1, 200, 2, 17], [1, 15, 777, 0, 300, 2, 129]) for n in (16, 128, 40)],
    interpreted=[
        (3, 24, 8, [1, 1, 1, 1, 40, 2, 17], [1, 15, 199, 0, 70, 2, 50]),
        (18, 16, 16, [1, 1, 33], [33, 70, 50]),
    ],
)
@pytest.mark.parametrize("splits", [Splits(), Splits(5), Splits(5, num_seqs=2)], ids=str)
def test_the_gpu_kernel_matches_the_reference(
    place: Place,
    num_heads: int,
    rank: int,
    rotary_dim: int,
    query_lens: list[int],
    context_lens: list[int],
    splits: Splits,
) -> None:
    """Decodes, of which some are split and one is padding, prefill continuations and fresh prefills."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, context_lens, 16, splits)
    cache = latent_cache(place, num_blocks, rank, rotary_dim)
    q = place.randn(layout.num_tokens, num_heads, rank + rotary_dim)
    scale = (rank + rotary_dim) ** -0.5
    found = gpu.latent_attention(q, cache, layout, scale)
    assert relative_error(*without_padding(layout, found, reference.latent_attention(q, cache, layout, scale))) < (
        place.attention_error
    )


def without_padding(layout: StepLayout, *outs: Tensor) -> list[Tensor]:
    sizes = layout.query_starts.diff().tolist()
    used = [length > 0 for length in layout.context_lens.tolist()]
    return [torch.cat([part for part, is_used in zip(out.split(sizes), used, strict=True) if is_used]) for out in outs]


@cases("num_heads rank rotary_dim", gpu=[(128, 512, 64)], interpreted=[(3, 24, 8)])
def test_the_gpu_kernel_rotates_and_stores_as_the_reference(
    place: Place, num_heads: int, rank: int, rotary_dim: int
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 30], [40, 30], 16)
    q, latents = place.randn(31, num_heads, rank + rotary_dim), place.randn(31, rank)
    rotary_keys = place.randn(31, rank + rotary_dim)[:, rank:]  # rows of a wider matrix
    cos_sin = torch.randn(64, rotary_dim, device=place.device)
    before = latent_cache(place, num_blocks, rank, rotary_dim).keys
    results = []
    for kernels in (reference, gpu):
        turned, cache = q.clone(), LayerCache.of_latents(before.clone(), rank)
        kernels.rope_and_store_latent(turned, latents, rotary_keys, layout, cos_sin, cache)
        results.append((turned, cache.keys))
    for expected, found in zip(*results, strict=True):
        assert relative_error(found, expected) < place.error


@cases("num_heads rank rotary_dim", gpu=[(128, 512, 64)], interpreted=[(3, 24, 8)])
def test_latents_may_be_in_fp8(place: Place, num_heads: int, rank: int, rotary_dim: int) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 30], [40, 30], 16)
    narrow = latent_cache(place, num_blocks, rank, rotary_dim).keys.to(torch.float8_e4m3fn)
    q = place.randn(31, num_heads, rank + rotary_dim)
    expected = reference.latent_attention(q, LayerCache.of_latents(narrow.to(q.dtype), rank), layout, 0.1)
    found = gpu.latent_attention(q, LayerCache.of_latents(narrow, rank), layout, 0.1)
    assert relative_error(found, expected) < max(1e-3, place.attention_error)  # queries are rounded to float16


@everywhere
def test_splits_of_latents_leave_no_arrivals(place: Place) -> None:
    from headrace.kernels import gpu
    from headrace.kernels.gpu.latent import programs_per_decode

    num_heads = 40
    arrivals = torch.zeros(3 * programs_per_decode(num_heads), dtype=torch.int32, device=place.device)
    layout, num_blocks = make_layout(place, [1, 1, 1], [199, 150, 70], 16, Splits(3, 32, arrivals=arrivals))
    cache = latent_cache(place, num_blocks, 16, 16)
    q = place.randn(3, num_heads, 32)
    expected = reference.latent_attention(q, cache, layout, 0.2)
    for _ in range(2):
        assert relative_error(gpu.latent_attention(q, cache, layout, 0.2), expected) < place.attention_error
        assert not arrivals.any()
