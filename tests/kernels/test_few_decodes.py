"""RoPE, the write to the cache and attention in one kernel, against the same in two; see `test_gpu`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.layout import LayerCache, Splits, StepLayout
from tests.kernels.places import Place, cases, in_fp8, keys_of, make_cache, make_layout, relative_error

GPU_SHAPES = [(32, 8, 128), (32, 4, 128), (32, 8, 64), (9, 3, 64), (8, 8, 96), (16, 2, 256), (64, 8, 64), (40, 1, 128)]
SMALL_SHAPES = [(4, 2, 32), (3, 1, 48)]
SPLITS = [Splits(), Splits(2), Splits(5, 16), Splits(32)]
CONTEXT_LENS = [1, 2, 64, 65, 200, 777]
SMALL_CONTEXT_LENS = [1, 65, 150]


def copy_of(cache: LayerCache) -> LayerCache:
    return dataclasses.replace(cache, keys=cache.keys.clone(), values=cache.values.clone())


def norms_of(place: Place, head_dim: int, *, has_norms: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not has_norms:
        return None, None
    return torch.rand(head_dim, device=place.device) + 0.5, torch.rand(head_dim, device=place.device) + 0.5


def round_values(qkv: torch.Tensor, num_columns: int) -> None:
    """Rounds the last columns to FP8: the interpreter does not carry when it rounds up to e4m3."""
    values = qkv[:, -num_columns:]
    values.copy_(values.float().to(torch.float8_e4m3fn).to(qkv.dtype))


def check(
    place: Place,
    heads: tuple[int, int],
    head_dim: int,
    splits: Splits,
    context_lens: list[int],
    scores: tuple[int | None, float | None],  # window and soft cap
    *,
    slides: bool = True,
    has_norms: bool = False,
    is_fp8: bool = False,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, 16, splits)
    layout = dataclasses.replace(layout, has_few_decodes=True)
    cache = make_cache(place, num_blocks, 16, heads[1], head_dim)
    if is_fp8:
        cache = in_fp8(cache)
    expected_cache = copy_of(cache)
    qkv = place.randn(len(context_lens), (heads[0] + 2 * heads[1]) * head_dim)
    if is_fp8:
        round_values(qkv, heads[1] * head_dim)
    angles = torch.rand(max(context_lens), head_dim // 2, device=place.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    rope = (*heads, *norms_of(place, head_dim, has_norms=has_norms), 1e-6)
    assert gpu.takes_few_decodes(layout, head_dim)
    q = reference.rope_and_store(qkv.clone(), layout, cos_sin, expected_cache, *rope)
    found = gpu.rope_and_attend(qkv.clone(), layout, cos_sin, cache, *rope, head_dim**-0.5, *scores, slides=slides)
    read = cache if is_fp8 else expected_cache  # keys that were rounded the other way are compared below
    expected = reference.paged_attention(q, read, layout, head_dim**-0.5, *scores, slides=slides)
    assert relative_error(found, expected) < max(place.attention_error, 1e-3 if is_fp8 else 0.0)
    limit = 5e-3 if is_fp8 else place.error  # some are rounded the other way
    assert relative_error(keys_of(cache), keys_of(expected_cache)) < limit
    assert torch.equal(cache.values.float(), expected_cache.values.float())


@cases(
    "num_heads num_kv_heads head_dim splits context_lens",
    gpu=[(*shape, splits, CONTEXT_LENS) for shape in GPU_SHAPES for splits in SPLITS],
    interpreted=[(*shape, splits, SMALL_CONTEXT_LENS) for shape in SMALL_SHAPES for splits in SPLITS],
    quick=[(*SMALL_SHAPES[0], SPLITS[0], SMALL_CONTEXT_LENS), (*SMALL_SHAPES[1], SPLITS[2], SMALL_CONTEXT_LENS)],
)
@pytest.mark.parametrize(
    ("window", "slides", "softcap", "has_norms"),
    [(None, True, None, False), (50, True, None, True), (50, False, 20.0, False)],
)
def test_one_kernel_computes_what_two_compute(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    splits: Splits,
    context_lens: list[int],
    window: int | None,
    slides: bool,
    softcap: float | None,
    has_norms: bool,
) -> None:
    heads = (num_heads, num_kv_heads)
    check(place, heads, head_dim, splits, context_lens, (window, softcap), slides=slides, has_norms=has_norms)


@cases(
    "num_heads num_kv_heads head_dim splits context_lens",
    gpu=[(*shape, splits, CONTEXT_LENS) for shape in GPU_SHAPES for splits in SPLITS],
    interpreted=[(*shape, splits, SMALL_CONTEXT_LENS) for shape in SMALL_SHAPES for splits in SPLITS],
    quick=[(*SMALL_SHAPES[0], SPLITS[2], SMALL_CONTEXT_LENS)],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_a_cache_in_fp8_is_written_and_read(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    splits: Splits,
    context_lens: list[int],
    has_norms: bool,
) -> None:
    heads, scores = (num_heads, num_kv_heads), (None, None)
    check(place, heads, head_dim, splits, context_lens, scores, has_norms=has_norms, is_fp8=True)


def with_drafts(place: Place, layout: StepLayout, num_rows: list[int]) -> StepLayout:
    """The same step with several tokens of each sequence, of which the first is the layout's."""
    seqs = torch.repeat_interleave(torch.arange(len(num_rows)), torch.tensor(num_rows)).to(place.device)
    offsets = torch.cat([torch.arange(n) for n in num_rows]).to(place.device)
    slots, positions = layout.slots[seqs], layout.positions[seqs] + offsets
    blocks = layout.block_tables[slots.long(), positions // 16].long()
    return dataclasses.replace(
        layout,
        positions=positions,
        slot_mapping=blocks * 16 + positions % 16,
        query_starts=torch.arange(len(seqs) + 1, dtype=torch.int32, device=place.device),
        context_lens=(positions + 1).int(),
        slots=slots,
        num_decodes=len(seqs),
        offsets=offsets.int(),
        has_few_decodes=True,
    )


@cases(
    "num_heads num_kv_heads head_dim",
    gpu=[(32, 8, 128), (32, 4, 128), (9, 3, 64), (16, 2, 256)],
    interpreted=[(4, 2, 32), (3, 1, 48)],
    quick=[(4, 2, 32)],
)
@pytest.mark.parametrize("splits", [Splits(), Splits(3, 16)], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("window", "softcap", "has_norms", "is_fp8"),
    [(None, None, True, False), (20, 20.0, False, False), (3, None, False, False), (None, None, False, True)],
)
@pytest.mark.parametrize("has_slopes", [False, True])
def test_drafts_of_a_sequence_see_those_before_them(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    splits: Splits,
    window: int | None,
    softcap: float | None,
    has_norms: bool,
    is_fp8: bool,
    has_slopes: bool,
) -> None:
    from headrace.kernels import gpu

    # Blocks for the contexts with their drafts; the step begins before these.
    num_rows, lens = [1, 5, 2, 7, 1], [1, 60, 18, 135, 90]
    layout, num_blocks = make_layout(
        place, [1] * 5, [n + r - 1 for n, r in zip(lens, num_rows, strict=True)], 16, splits
    )
    layout = dataclasses.replace(layout, positions=torch.tensor(lens, device=place.device) - 1)
    layout = with_drafts(place, layout, num_rows)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    cache = in_fp8(cache) if is_fp8 else cache
    expected_cache = copy_of(cache)
    qkv = place.randn(sum(num_rows), (num_heads + 2 * num_kv_heads) * head_dim)
    if is_fp8:
        round_values(qkv, num_kv_heads * head_dim)
    angles = torch.rand(200, head_dim // 2, device=place.device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    rope = (num_heads, num_kv_heads, *norms_of(place, head_dim, has_norms=has_norms), 1e-6)
    slopes = torch.linspace(0.01, 0.5, num_heads, device=place.device) if has_slopes else None
    q = reference.rope_and_store(qkv.clone(), layout, cos_sin, expected_cache, *rope)
    found = gpu.rope_and_attend(
        qkv.clone(), layout, cos_sin, cache, *rope, head_dim**-0.5, window, softcap, slopes=slopes
    )
    read = cache if is_fp8 else expected_cache  # keys that were rounded the other way are compared below
    expected = reference.paged_attention(q, read, layout, head_dim**-0.5, window, softcap, slopes=slopes)
    assert relative_error(found, expected) < max(place.attention_error, 1e-3 if is_fp8 else 0.0)
    limit = 5e-3 if is_fp8 else place.error  # some are rounded the other way
    assert relative_error(keys_of(cache), keys_of(expected_cache)) < limit
    assert torch.equal(cache.values.float(), expected_cache.values.float())


@cases("num_heads num_kv_heads head_dim", gpu=[(64, 8, 64), (8, 8, 96)], interpreted=[(4, 2, 32)])
@pytest.mark.parametrize("splits", [Splits(), Splits(3)], ids=["whole", "split"])
@pytest.mark.parametrize("kind", ["sinks", "slopes"])
def test_sinks_and_slopes_apply(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, splits: Splits, kind: str
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 1, 1], [1, 199, 150], 16, splits)
    layout = dataclasses.replace(layout, has_few_decodes=True)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    expected_cache = copy_of(cache)
    qkv = place.randn(3, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.cat((torch.ones(200, head_dim // 2), torch.zeros(200, head_dim // 2)), dim=1).to(place.device)
    each = torch.linspace(-9.0, 9.0, num_heads) if kind == "sinks" else torch.linspace(0.01, 0.5, num_heads)
    extra = {kind: each.to(place.device)}
    q = reference.rope_and_store(qkv.clone(), layout, cos_sin, expected_cache, num_heads, num_kv_heads, None, None, 0.0)
    expected = reference.paged_attention(q, expected_cache, layout, head_dim**-0.5, **extra)
    found = gpu.rope_and_attend(
        qkv, layout, cos_sin, cache, num_heads, num_kv_heads, None, None, 0.0, head_dim**-0.5, **extra
    )
    assert relative_error(found, expected) < place.attention_error


@cases("", gpu=[()], interpreted=[()])
def test_padding_and_later_positions_are_left_alone(place: Place) -> None:
    """A row of padding writes nothing, and what lies behind a context, even if it is no number, has no weight."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 1, 1], [40, 70, 40], 16, Splits(3, 16))
    cache = make_cache(place, num_blocks, 16, 2, 32)
    layout.context_lens[2] = 0
    cache.keys[layout.block_tables[layout.slots[0].long(), 2].long(), :, 8:] = float("nan")
    cache.values[layout.block_tables[layout.slots[0].long(), 2].long(), :, 8:] = float("nan")
    before = copy_of(cache)
    qkv = place.randn(3, 8 * 32)
    cos_sin = torch.ones(80, 32, device=place.device)
    found = gpu.rope_and_attend(qkv, layout, cos_sin, cache, 4, 2, None, None, 0.0, 0.2)
    assert not found[:2].isnan().any()
    changed = (cache.keys != before.keys) & ~before.keys.isnan()
    assert changed.any(-1).any(1).sum() == 2  # (block, offset) of the two tokens


@cases("", gpu=[()], interpreted=[()])
def test_counters_of_splits_are_zero_again(place: Place) -> None:
    from headrace.kernels import gpu

    arrivals = torch.zeros(6, dtype=torch.int32, device=place.device)
    layout, num_blocks = make_layout(place, [1, 1, 1], [200, 17, 90], 16, Splits(4, 16, arrivals=arrivals))
    cache = make_cache(place, num_blocks, 16, 2, 32)
    cos_sin = torch.ones(200, 32, device=place.device)
    first, second = (
        gpu.rope_and_attend(
            torch.ones(3, 8 * 32, device=place.device, dtype=place.dtype),
            layout, cos_sin, copy_of(cache), 4, 2, None, None, 0.0, 0.2,
        )
        for _ in range(2)
    )  # fmt: skip
    assert torch.equal(first, second)
    assert not arrivals.any()
