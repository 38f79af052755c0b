"""The attention kernels against their references, on fresh random inputs; see `test_gpu`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.kernels import reference
from headrace.kernels.layout import Gathering, LayerCache, Splits, StepLayout
from tests.kernels.places import (
    GPU,
    INTERPRETERS,
    SHAPES,
    SMALL_SHAPES,
    Place,
    cases,
    in_fp8,
    keys_of,
    make_cache,
    make_layout,
    record_compilations,
    relative_error,
)

FIVE_SPLITS = [Splits(), Splits(5), Splits(5, num_seqs=3)]
SMALL_LENS = ([1, 1, 1, 1, 150, 2, 17], [1, 15, 16, 199, 170, 2, 150])  # of queries and contexts
THREE_SPLITS = [Splits(), Splits(3), Splits(3, num_seqs=19)]
SMALL_GROUPS = (4, [75] * 18 + [125, 5, 65] + [103] * 5)  # the size of a block, and contexts


@cases(
    "num_heads num_kv_heads head_dim splits query_lens context_lens",
    gpu=[
        (*shape, splits, [1, 1, 1, 1, 200, 2, 17], [1, 15, 16, 777, 300, 2, 129])
        for shape in SHAPES
        for splits in FIVE_SPLITS
    ],
    interpreted=[(*shape, splits, *SMALL_LENS) for shape in SMALL_SHAPES for splits in FIVE_SPLITS],
    quick=[
        (*SMALL_SHAPES[0], FIVE_SPLITS[0], *SMALL_LENS),
        (*SMALL_SHAPES[1], FIVE_SPLITS[1], *SMALL_LENS),
        (*SMALL_SHAPES[0], FIVE_SPLITS[2], *SMALL_LENS),
    ],
)
@pytest.mark.parametrize(
    ("window", "slides", "softcap"), [(None, True, None), (50, True, None), (50, False, None), (None, True, 20.0)]
)
def test_attention_matches_its_reference(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    splits: Splits,
    query_lens: list[int],
    context_lens: list[int],
    window: int | None,
    slides: bool,
    softcap: float | None,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, context_lens, 16, splits)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
    assert relative_error(found, expected) < place.attention_error


@cases("num_heads num_kv_heads head_dim", gpu=[(64, 8, 64), (8, 8, 96)], interpreted=[(4, 2, 16)])
@pytest.mark.parametrize("window", [None, 50])
def test_sinks_take_their_share(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    """With one sink far below all scores, one far above, and others among them; contexts are split and not."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 1, 1, 40], [1, 199, 150, 120], 16, Splits(3, num_seqs=2))
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    sinks = torch.linspace(-30.0, 30.0, num_heads, device=place.device)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, window, sinks=sinks)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, sinks=sinks)
    assert relative_error(found, expected) < place.attention_error


@cases("num_heads num_kv_heads head_dim", gpu=[(32, 32, 128), (24, 8, 64)], interpreted=[(3, 1, 24)])
@pytest.mark.parametrize("window", [None, 50])
def test_slopes_lower_scores_with_the_distance(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    """Decodes with and without splits, and prefills over masked and whole tiles of keys."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1, 1, 1, 40], [1, 199, 150, 190], 16, Splits(3, num_seqs=2))
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    slopes = 0.5 ** torch.linspace(1.0, 8.0, num_heads, device=place.device)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, window, slopes=slopes)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, slopes=slopes)
    assert relative_error(found, expected) < place.attention_error


@cases("num_seqs longest", gpu=[(40, 3000), (300, 1500)], interpreted=[(3, 200)])
def test_splits_of_contexts_are_merged_by_the_last_to_end(place: Place, num_seqs: int, longest: int) -> None:
    """The arrival counts are zero again afterwards, and the result is the same each time."""
    from headrace.kernels import gpu

    arrivals = torch.zeros(num_seqs * 2, dtype=torch.int32, device=place.device)
    context_lens = [longest - index for index in range(num_seqs)]
    layout, num_blocks = make_layout(place, [1] * num_seqs, context_lens, 16, Splits(4, 64, arrivals=arrivals))
    cache = make_cache(place, num_blocks, 16, 2, 64)
    q = place.randn(num_seqs, 8, 64)
    expected = reference.paged_attention(q, cache, layout, 0.125)
    for _ in range(3):
        assert relative_error(gpu.paged_attention(q, cache, layout, 0.125), expected) < place.attention_error
        assert not arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 20.0), (200, None), (60, None)])
def test_attention_of_fresh_prefills_matches_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    """Uses FlashAttention-3 where it is installed and no prompt exceeds the window, else the paged cache."""
    from headrace.kernels import gpu

    query_lens, context_lens = [1, 1, 30, 200, 2, 129], [40, 1, 77, 200, 2, 129]
    layout, num_blocks = make_layout(GPU, query_lens, context_lens, 16, num_fresh=3)
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    qkv = GPU.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(256, head_dim, device="cuda")
    q = gpu.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads)
    for slides in (True,) if window is None else (True, False):
        expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        assert relative_error(found, expected) < GPU.attention_error


@cases(
    "num_kv_heads head_dim is_fp8",
    gpu=[(8, 128, False), (2, 64, True), (1, 96, False)],
    interpreted=[(2, 32, False), (1, 24, False), (2, 16, True)],
)
def test_contexts_are_gathered_from_their_blocks(place: Place, num_kv_heads: int, head_dim: int, is_fp8: bool) -> None:
    from headrace.kernels.gpu.gather_kv import gather_contexts

    query_lens, context_lens = [1, 2, 30, 5], [40, 77, 30, 129]
    layout, num_blocks = make_layout(place, query_lens, context_lens, 16)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    cache = in_fp8(cache) if is_fp8 else cache
    gathering = gathering_of(place, context_lens, 1, 3, num_tokens=110)
    found = gather_contexts(cache, layout, gathering, place.dtype)
    for gathered, stored in zip(found, (keys_of(cache), cache.values.float()), strict=True):
        assert gathered.shape == (num_kv_heads, 110, head_dim)
        for seq, start in ((1, 0), (2, 77)):
            blocks = layout.block_tables[layout.slots[seq].long()].long()
            whole = stored[blocks].transpose(0, 1).flatten(1, 2)[:, : context_lens[seq]]
            assert torch.equal(gathered[:, start : start + context_lens[seq]], whole.to(place.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 20.0), (900, None), (60, None)])
def test_attention_over_gathered_contexts_matches_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None, is_fp8: bool
) -> None:
    """Runs decodes, prefill continuations in two gatherings, and a fresh prefill; also where a context exceeds the
    window or FlashAttention-3 is not installed, and blocks are read."""
    from headrace.kernels import gpu

    query_lens, context_lens = [1, 1, 30, 200, 2, 17, 129], [40, 1, 77, 800, 400, 600, 129]
    layout, num_blocks = make_layout(GPU, query_lens, context_lens, 16, num_fresh=1)
    gatherings = (gathering_of(GPU, context_lens, 2, 5), gathering_of(GPU, context_lens, 5, 6))
    layout = dataclasses.replace(layout, gatherings=gatherings)
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    cache = in_fp8(cache) if is_fp8 else cache
    qkv = GPU.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(1024, head_dim, device="cuda")
    q = gpu.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads)
    wide = LayerCache(keys_of(cache).to(torch.bfloat16), cache.values.to(torch.bfloat16))
    for slides in (True,) if window is None else (True, False):
        expected = reference.paged_attention(q, wide, layout, head_dim**-0.5, window, softcap, slides=slides)
        found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        limit = 0.05 if is_fp8 else GPU.attention_error  # its own tokens are rounded in the cache only
        assert relative_error(found, expected) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (32, 8, 64)])
def test_attention_over_one_long_gathered_context_matches_its_reference(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Uses a context long enough for the library to split it."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(GPU, [40], [20_000], 16)
    layout = dataclasses.replace(layout, gatherings=(gathering_of(GPU, [20_000], 0, 1),))
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    q = GPU.randn(40, num_heads, head_dim)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5)
    assert relative_error(gpu.paged_attention(q, cache, layout, head_dim**-0.5), expected) < GPU.attention_error


def gathering_of(
    place: Place, context_lens: list[int], first: int, end: int, num_tokens: int | None = None
) -> Gathering:
    starts = torch.tensor([0, *torch.tensor(context_lens[first:end]).cumsum(0).tolist()], dtype=torch.int32)
    return Gathering(first, starts.to(place.device), num_tokens or int(starts[-1]), max(context_lens[first:end]))


def with_shared_prefixes(
    place: Place,
    layout: StepLayout,
    context_lens: list[int],
    block_size: int,
    group: int,
    head_dim: int,
    kv_dtype: torch.dtype | None = None,
) -> StepLayout:
    """All sequences up to the last eight share ten blocks, and the last five 21."""
    from headrace.kernels.gpu.shared_attention import shared_shape
    from headrace.kernels.layout import SharedPrefixes
    from headrace.runner.gpu.prefix_groups import BlockTableMirror
    from headrace.steps import TableWrites

    tables, slots = layout.block_tables, layout.slots.long()
    tables[slots[1:-8], :10] = tables[slots[0], :10].clone()
    tables[slots[-4:], :21] = tables[slots[-5], :21].clone()
    mirror = BlockTableMirror(len(slots), tables.shape[1])
    counts = [-(-n // block_size) for n in context_lens]
    for slot, count in zip(slots.tolist(), counts, strict=True):
        indexes = torch.arange(count)
        mirror.write(
            TableWrites(torch.full((count,), slot).numpy(), indexes.numpy(), tables[slot, :count].long().cpu().numpy())
        )
    num_rows = shared_shape(head_dim, kv_dtype or place.dtype).rows
    groups = mirror.groups(slots.cpu().numpy(), block_size=block_size, seqs_per_tile=num_rows // group)
    assert groups is not None and set(groups.tile_lens.tolist()) == {10 * block_size, 21 * block_size}
    tile_seqs = np.concatenate([groups.tile_seqs, np.full_like(groups.tile_seqs, -1)])  # and as much padding
    tile_lens = np.concatenate([groups.tile_lens, np.zeros_like(groups.tile_lens)])
    arrays = (groups.lens, tile_seqs, tile_lens)
    shared = SharedPrefixes(*(torch.from_numpy(a).int().to(place.device) for a in arrays))
    return dataclasses.replace(layout, shared=shared)


@cases(
    "num_heads num_kv_heads head_dim splits block_size context_lens",
    gpu=[(*shape, splits, 16, [300] * 40 + [500, 17, 260] + [411] * 5) for shape in SHAPES for splits in THREE_SPLITS],
    interpreted=[(*shape, splits, *SMALL_GROUPS) for shape in [(3, 1, 24), (8, 1, 16)] for splits in THREE_SPLITS],
    quick=[
        (3, 1, 24, THREE_SPLITS[0], *SMALL_GROUPS),
        (8, 1, 16, THREE_SPLITS[1], *SMALL_GROUPS),
        (3, 1, 24, THREE_SPLITS[2], *SMALL_GROUPS),
    ],
)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_attention_over_shared_prefixes_matches_its_reference(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    splits: Splits,
    block_size: int,
    context_lens: list[int],
    is_fp8: bool,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, block_size, splits)
    cache = make_cache(place, num_blocks, block_size, num_kv_heads, head_dim)
    cache = in_fp8(cache) if is_fp8 else cache
    sizes = (block_size, num_heads // num_kv_heads, head_dim)
    layout = with_shared_prefixes(place, layout, context_lens, *sizes, cache.keys.dtype)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5)
    assert relative_error(found, expected) < max(place.attention_error, 1e-3 if is_fp8 else 0.0)


@cases(
    "block_size context_lens",
    gpu=[(16, [300] * 40 + [500, 17, 260] + [411] * 5)],
    interpreted=[(4, [75] * 18 + [125, 5, 65] + [103] * 5)],
)
def test_a_graph_may_have_more_tiles_than_its_slots_could_fill(
    place: Place, block_size: int, context_lens: list[int]
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, block_size)
    layout = with_shared_prefixes(place, layout, context_lens, block_size, 3, 32)
    shared = layout.shared
    assert shared is not None
    padding = (0, len(context_lens))  # a graph is padded to more sequences than there are slots
    tiles = torch.nn.functional.pad(shared.tile_seqs, (0, 0, *padding), value=-1)
    shared = dataclasses.replace(shared, tile_seqs=tiles, tile_lens=torch.nn.functional.pad(shared.tile_lens, padding))
    cache = make_cache(place, num_blocks, block_size, 1, 32)
    q = place.randn(layout.num_tokens, 3, 32)
    expected = reference.paged_attention(q, cache, layout, 0.2)
    found = gpu.paged_attention(q, cache, dataclasses.replace(layout, shared=shared), 0.2)
    assert relative_error(found, expected) < place.attention_error


@cases("num_heads num_kv_heads head_dim block_size", gpu=[(64, 8, 64, 16)], interpreted=[(3, 1, 24, 4)])
@pytest.mark.parametrize("slopes", [False, True], ids=["sinks", "slopes"])
def test_sinks_and_slopes_apply_to_shared_prefixes(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, slopes: bool
) -> None:
    """A sink is added once, after the prefix; the distance of a slope is that of each sequence's own query."""
    from headrace.kernels import gpu

    context_lens = [45] * 5 + [50, 5, 45] + [87] * 5
    context_lens = [length * block_size // 4 for length in context_lens]
    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, block_size, Splits(3, num_seqs=9))
    layout = with_shared_prefixes(place, layout, context_lens, block_size, num_heads // num_kv_heads, head_dim)
    cache = make_cache(place, num_blocks, block_size, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    per_head = torch.linspace(0.01, 6.0, num_heads, device=place.device)
    further = {"slopes": per_head / 20} if slopes else {"sinks": per_head}
    expected = reference.paged_attention(q, cache, layout, head_dim**-0.5, **further)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, **further)
    assert relative_error(found, expected) < place.attention_error


@pytest.mark.gpu
def test_no_number_of_tiles_needs_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.kernels import gpu

    context_lens = [300] * 40 + [500, 17, 260] + [411] * 5
    layout, num_blocks = make_layout(GPU, [1] * len(context_lens), context_lens, 16)
    layout = with_shared_prefixes(GPU, layout, context_lens, 16, 4, 128)
    assert layout.shared is not None
    cache, q = make_cache(GPU, num_blocks, 16, 8, 128), GPU.randn(layout.num_tokens, 32, 128)
    compiled = record_compilations(monkeypatch)
    for num_tiles in range(1, len(layout.shared.tile_lens) + 1):
        shared = dataclasses.replace(
            layout.shared, tile_seqs=layout.shared.tile_seqs[:num_tiles], tile_lens=layout.shared.tile_lens[:num_tiles]
        )
        gpu.paged_attention(q, cache, dataclasses.replace(layout, shared=shared), 0.1)
    assert compiled.count("_shared") <= 1  # none, if another test has compiled it


@pytest.mark.interpreted
@pytest.mark.parametrize("num_programs", [1, pytest.param(8, marks=pytest.mark.slow), 40])
def test_any_number_of_programs_shares_the_work(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of three and six steps on two kv heads: whole, and in two and three splits."""
    from headrace.kernels import gpu
    from headrace.kernels.gpu import shared_attention

    place = INTERPRETERS[-1]
    shape = shared_attention.SharedShape(rows=64, keys=16, num_warps=1, num_stages=1, programs=num_programs)
    monkeypatch.setattr(shared_attention, "shared_shape", lambda *_: shape)
    monkeypatch.setattr(shared_attention, "num_processors", lambda _: 1)
    context_lens = [75] * 18 + [125, 5, 65] + [103] * 5
    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, 4, Splits())
    layout = with_shared_prefixes(place, layout, context_lens, 4, 4, 16)
    cache = make_cache(place, num_blocks, 4, 2, 16)
    q = place.randn(layout.num_tokens, 8, 16)
    expected = reference.paged_attention(q, cache, layout, 0.25)
    assert relative_error(gpu.paged_attention(q, cache, layout, 0.25), expected) < place.attention_error
