"""The Triton kernels against their twins, on fresh random inputs.

Each test has cases for a GPU, and smaller ones for Triton's interpreter, which runs the same kernels on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernels import twins
from headrace.kernels.layout import Gathering, LayerCache, Splits, StepLayout
from headrace.steps import BROKEN, FULL, GOES_ON, STOPPED


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the kernels run, in which type, and how far from their twins they may be there."""

    name: str
    device: str
    dtype: torch.dtype
    error: float
    attention_error: float

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


GPU = Place("gpu", "cuda", torch.bfloat16, error=5e-3, attention_error=1e-2)
INTERPRETERS = [  # no bfloat16: the interpreter keeps it as integers, and multiplies these in a `tl.dot`
    Place("interpreted_float16", "cpu", torch.float16, error=1e-3, attention_error=1e-3),
    Place("interpreted_float32", "cpu", torch.float32, error=1e-5, attention_error=1e-5),
]


def cases(names: str, *, gpu: list[tuple[Any, ...]], interpreted: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """`place` and the named values: some on a GPU, some, small because it is slow, in each type of the interpreter. Of
    the two, float16 is left to the slow tests."""
    params = [pytest.param(GPU, *values, marks=pytest.mark.gpu) for values in gpu]
    for place in INTERPRETERS:
        marks = [pytest.mark.interpreted] + ([pytest.mark.slow] if place.dtype == torch.float16 else [])
        params += [pytest.param(place, *values, marks=marks) for values in interpreted]
    return pytest.mark.parametrize(
        ["place", *names.split()], params, ids=lambda value: value.name if isinstance(value, Place) else None
    )


SHAPES = [(32, 8, 128), (24, 8, 128), (32, 8, 64), (9, 3, 64), (8, 8, 96), (16, 2, 256)]  # Hq, Hkv, D
SMALL_SHAPES = [(4, 2, 16), (3, 1, 24)]
WHOLE = Splits()
everywhere = cases("", gpu=[()], interpreted=[()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def make_cache(place: Place, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(place.randn(*shape), place.randn(*shape))


def make_layout(
    place: Place, query_lens: list[int], context_lens: list[int], block_size: int, splits: Splits = WHOLE
) -> tuple[StepLayout, int]:
    """Sequences with scattered blocks, those of one token first; the layout and the number of blocks."""
    from headrace.runner.tiles import tiles_of

    num_seqs = len(query_lens)
    counts = [-(-n // block_size) for n in context_lens]
    order = torch.randperm(sum(counts))
    tables = torch.zeros(num_seqs, max(counts), dtype=torch.int32)
    start = 0
    for seq, count in enumerate(counts):
        tables[seq, :count] = order[start : start + count]
        start += count
    rows = torch.randperm(num_seqs).int()
    shuffled = torch.zeros_like(tables)
    shuffled[rows.long()] = tables
    positions = torch.cat([torch.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)])
    token_rows = torch.repeat_interleave(torch.arange(num_seqs), torch.tensor(query_lens))
    slots = tables[token_rows, positions // block_size].long() * block_size + positions % block_size
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(query_lens).numpy()
    num_single = next((i for i, q in enumerate(query_lens) if q > 1), num_seqs)
    tiles = torch.from_numpy(tiles_of(lens, num_single)[0].copy()).int() if num_single < num_seqs else None
    return StepLayout(
        positions=positions.to(place.device),
        slots=slots.to(place.device),
        query_starts=starts.to(place.device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32).to(place.device),
        rows=rows.to(place.device),
        block_tables=shuffled.to(place.device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_single=num_single,
        splits=splits,
        tiles=None if tiles is None else tiles.to(place.device),
    ), sum(counts)


@cases("hidden_size", gpu=[(576,), (2048,), (4096,)], interpreted=[(64,), (200,)])
def test_norms_equal_their_twins(place: Place, hidden_size: int) -> None:
    from headrace.kernels import gpu

    x = place.randn(37, hidden_size)
    weight = place.randn(hidden_size)
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5)) < place.error
    residual = torch.randn_like(x)
    other = residual.clone()
    found = gpu.add_rms_norm(x, residual, weight, 1e-5)
    assert relative_error(found, twins.add_rms_norm(x, other, weight, 1e-5)) < place.error
    assert torch.equal(residual, other)


@cases("hidden_size", gpu=[(576,), (2048,), (4608,)], interpreted=[(64,), (200,)])
def test_layer_norms_equal_their_twins(place: Place, hidden_size: int) -> None:
    from headrace.kernels import gpu

    x = 3 + place.randn(37, hidden_size)
    weight, bias = (torch.randn(hidden_size, device=place.device) for _ in range(2))
    expected = twins.layer_norm(x, weight, bias, 1e-5)
    assert relative_error(gpu.layer_norm(x, weight, bias, 1e-5), expected) < place.error
    residual = torch.randn_like(x)
    other = residual.clone()
    found = gpu.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert relative_error(found, twins.add_layer_norm(x, other, weight, bias, 1e-5)) < place.error
    assert torch.equal(residual, other)


@everywhere
def test_a_norm_reads_rows_that_lie_apart(place: Place) -> None:
    from headrace.kernels import gpu

    wide, weight = place.randn(9, 300), torch.randn(200, device=place.device)
    part = wide[:, 50:250]
    assert relative_error(gpu.rms_norm(part, weight, 1e-5), twins.rms_norm(part, weight, 1e-5)) < place.error


@everywhere
def test_norms_take_weights_in_float32(place: Place) -> None:
    from headrace.kernels import gpu

    x, weight = place.randn(5, 576), torch.randn(576, device=place.device)
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5)) < place.error


@everywhere
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning:triton")  # numpy's, in the interpreter
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_equal_their_twins(place: Place, name: str) -> None:
    from headrace.kernels import gpu

    x = 3 * place.randn(19, 2 * 3000)
    assert relative_error(getattr(gpu, name)(x), getattr(twins, name)(x)) < place.error


@everywhere
def test_the_soft_cap_equals_its_twin_and_works_in_place(place: Place) -> None:
    from headrace.kernels import gpu

    x = 40 * place.randn(7, 5001)
    expected = twins.soft_cap(x.float(), 30.0)
    assert gpu.soft_cap(x, 30.0) is x
    assert relative_error(x, expected) < place.error


@cases(
    "num_heads num_kv_heads head_dim query_lens",
    gpu=[(*shape, [1, 1, 40, 7]) for shape in SHAPES],
    interpreted=[(*shape, [1, 1, 20, 3]) for shape in SMALL_SHAPES],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_store_equals_its_twin(
    place: Place, num_heads: int, num_kv_heads: int, head_dim: int, query_lens: list[int], has_norms: bool
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, [33, 1, 64, 100], 16)
    qkv = place.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(128, head_dim, device=place.device)
    norms = [torch.randn(head_dim, device=place.device) if has_norms else None for _ in range(2)]
    ours, theirs = (make_cache(place, num_blocks, 16, num_kv_heads, head_dim) for _ in range(2))
    theirs.keys.copy_(ours.keys)
    theirs.values.copy_(ours.values)
    expected = twins.rope_and_store(qkv.clone(), layout, cos_sin, theirs, num_heads, num_kv_heads, *norms, 1e-6)
    found = gpu.rope_and_store(qkv.clone(), layout, cos_sin, ours, num_heads, num_kv_heads, *norms, 1e-6)
    assert relative_error(found, expected) < place.error
    assert relative_error(ours.keys, theirs.keys) < place.error
    assert torch.equal(ours.values, theirs.values)


@cases(
    "num_heads num_kv_heads head_dim query_lens context_lens",
    gpu=[(*shape, [1, 1, 1, 1, 200, 2, 17], [1, 15, 16, 777, 300, 2, 129]) for shape in SHAPES],
    interpreted=[(*shape, [1, 1, 1, 1, 150, 2, 17], [1, 15, 16, 199, 170, 2, 150]) for shape in SMALL_SHAPES],
)
@pytest.mark.parametrize("splits", [Splits(), Splits(5), Splits(5, num_seqs=3)], ids=str)
@pytest.mark.parametrize(
    ("window", "slides", "softcap"), [(None, True, None), (50, True, None), (50, False, None), (None, True, 20.0)]
)
def test_attention_equals_its_twin(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_lens: list[int],
    context_lens: list[int],
    splits: Splits,
    window: int | None,
    slides: bool,
    softcap: float | None,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, query_lens, context_lens, 16, splits)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    expected = twins.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
    assert relative_error(found, expected) < place.attention_error


@cases("num_seqs longest", gpu=[(40, 3000), (300, 1500)], interpreted=[(3, 200)])
def test_parts_of_contexts_are_merged_by_the_last_to_end(place: Place, num_seqs: int, longest: int) -> None:
    """Whoever that is: the counts of those that ended are zeros again, and the answer is the same each time."""
    from headrace.kernels import gpu

    arrivals = torch.zeros(num_seqs * 2, dtype=torch.int32, device=place.device)
    context_lens = [longest - index for index in range(num_seqs)]
    layout, num_blocks = make_layout(place, [1] * num_seqs, context_lens, 16, Splits(4, 64, arrivals=arrivals))
    cache = make_cache(place, num_blocks, 16, 2, 64)
    q = place.randn(num_seqs, 8, 64)
    expected = twins.paged_attention(q, cache, layout, 0.125)
    for _ in range(3):
        assert relative_error(gpu.paged_attention(q, cache, layout, 0.125), expected) < place.attention_error
        assert not arrivals.any()


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 20.0), (200, None), (60, None)])
def test_attention_of_prompts_that_begin_equals_its_twin(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None
) -> None:
    """With FlashAttention-3 where it is installed and no prompt outgrows the window; by the cache otherwise."""
    from headrace.kernels import gpu
    from headrace.runner.tiles import tiles_of

    query_lens, context_lens = [1, 1, 30, 200, 2, 129], [40, 1, 77, 200, 2, 129]
    layout, num_blocks = make_layout(GPU, query_lens, context_lens, 16)
    tiles, num_fresh_tiles = tiles_of(torch.tensor(query_lens).numpy(), 2, 3)
    layout = dataclasses.replace(
        layout,
        tiles=torch.from_numpy(tiles.copy()).int().cuda(),
        num_fresh=3,
        num_fresh_tiles=num_fresh_tiles,
    )
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    qkv = GPU.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(256, head_dim, device="cuda")
    q = gpu.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads)
    for slides in (True,) if window is None else (True, False):
        expected = twins.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        assert relative_error(found, expected) < GPU.attention_error


@cases(
    "num_kv_heads head_dim is_fp8",
    gpu=[(8, 128, False), (2, 64, True), (1, 96, False)],
    interpreted=[(2, 32, False), (1, 24, False), (2, 16, True)],
)
def test_contexts_are_gathered_from_their_blocks(place: Place, num_kv_heads: int, head_dim: int, is_fp8: bool) -> None:
    from headrace.kernels.gpu.gather import gather_contexts

    query_lens, context_lens = [1, 2, 30, 5], [40, 77, 30, 129]
    layout, num_blocks = make_layout(place, query_lens, context_lens, 16)
    cache = make_cache(place, num_blocks, 16, num_kv_heads, head_dim)
    dtype = torch.float8_e4m3fn if is_fp8 else place.dtype
    cache = LayerCache(cache.keys.to(dtype), cache.values.to(dtype))
    gathering = gathering_of(place, context_lens, 1, 3, num_tokens=110)
    found = gather_contexts(cache, layout, gathering, place.dtype)
    for gathered, stored in zip(found, (cache.keys, cache.values), strict=True):
        assert gathered.shape == (num_kv_heads, 110, head_dim)
        for seq, start in ((1, 0), (2, 77)):
            blocks = layout.block_tables[layout.rows[seq].long()].long()
            whole = stored[blocks].transpose(0, 1).flatten(1, 2)[:, : context_lens[seq]]
            assert torch.equal(gathered[:, start : start + context_lens[seq]], whole.to(place.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 20.0), (900, None), (60, None)])
def test_attention_over_gathered_contexts_equals_its_twin(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Rows of one token, prompts that go on, in two gatherings, and one that begins; also where a window is outgrown
    or FlashAttention-3 is not installed, and blocks are read."""
    from headrace.kernels import gpu
    from headrace.runner.tiles import tiles_of

    query_lens, context_lens = [1, 1, 30, 200, 2, 17, 129], [40, 1, 77, 800, 400, 600, 129]
    layout, num_blocks = make_layout(GPU, query_lens, context_lens, 16)
    tiles, num_fresh_tiles = tiles_of(torch.tensor(query_lens).numpy(), 2, 1)
    layout = dataclasses.replace(
        layout,
        tiles=torch.from_numpy(tiles.copy()).int().cuda(),
        num_fresh=1,
        num_fresh_tiles=num_fresh_tiles,
        gatherings=(gathering_of(GPU, context_lens, 2, 5), gathering_of(GPU, context_lens, 5, 6)),
    )
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    cache = LayerCache(cache.keys.to(dtype), cache.values.to(dtype))
    qkv = GPU.randn(layout.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    cos_sin = torch.randn(1024, head_dim, device="cuda")
    q = gpu.rope_and_store(qkv, layout, cos_sin, cache, num_heads, num_kv_heads)
    wide = LayerCache(cache.keys.to(torch.bfloat16), cache.values.to(torch.bfloat16))
    for slides in (True,) if window is None else (True, False):
        expected = twins.paged_attention(q, wide, layout, head_dim**-0.5, window, softcap, slides=slides)
        found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap, slides=slides)
        limit = GPU.attention_error if dtype == torch.bfloat16 else 0.05  # its own tokens are rounded in the cache only
        assert relative_error(found, expected) < limit


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (32, 8, 64)])
def test_attention_over_one_long_gathered_context_equals_its_twin(
    num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """So long that the library cuts it."""
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(GPU, [40], [20_000], 16)
    layout = dataclasses.replace(layout, gatherings=(gathering_of(GPU, [20_000], 0, 1),))
    cache = make_cache(GPU, num_blocks, 16, num_kv_heads, head_dim)
    q = GPU.randn(40, num_heads, head_dim)
    expected = twins.paged_attention(q, cache, layout, head_dim**-0.5)
    assert relative_error(gpu.paged_attention(q, cache, layout, head_dim**-0.5), expected) < GPU.attention_error


def gathering_of(
    place: Place, context_lens: list[int], first: int, end: int, num_tokens: int | None = None
) -> Gathering:
    starts = torch.tensor([0, *torch.tensor(context_lens[first:end]).cumsum(0).tolist()], dtype=torch.int32)
    return Gathering(first, starts.to(place.device), num_tokens or int(starts[-1]), max(context_lens[first:end]))


def with_shared_beginnings(
    place: Place, layout: StepLayout, context_lens: list[int], block_size: int, group: int, head_dim: int
) -> StepLayout:
    """All sequences up to the last eight share ten blocks, and the last five 21."""
    from headrace.kernels.gpu.shared_attention import shared_shape
    from headrace.kernels.layout import SharedPrefixes
    from headrace.runner.prefix_groups import BlockTableMirror
    from headrace.steps import TableWrites

    tables, rows = layout.block_tables, layout.rows.long()
    tables[rows[1:-8], :10] = tables[rows[0], :10].clone()
    tables[rows[-4:], :21] = tables[rows[-5], :21].clone()
    mirror = BlockTableMirror(len(rows), tables.shape[1])
    counts = [-(-n // block_size) for n in context_lens]
    for row, count in zip(rows.tolist(), counts, strict=True):
        indexes = torch.arange(count)
        mirror.write(
            TableWrites(torch.full((count,), row).numpy(), indexes.numpy(), tables[row, :count].long().cpu().numpy())
        )
    num_rows = shared_shape(head_dim, place.dtype).rows
    groups = mirror.groups(rows.cpu().numpy(), block_size=block_size, seqs_per_tile=num_rows // group)
    assert groups is not None and set(groups.tile_lens.tolist()) == {10 * block_size, 21 * block_size}
    tile_seqs = np.concatenate([groups.tile_seqs, np.full_like(groups.tile_seqs, -1)])  # as many places for others
    tile_lens = np.concatenate([groups.tile_lens, np.zeros_like(groups.tile_lens)])
    arrays = (groups.lens, tile_seqs, tile_lens)
    shared = SharedPrefixes(*(torch.from_numpy(a).int().to(place.device) for a in arrays))
    return dataclasses.replace(layout, shared=shared)


@cases(
    "num_heads num_kv_heads head_dim block_size context_lens",
    gpu=[(*shape, 16, [300] * 40 + [500, 17, 260] + [411] * 5) for shape in SHAPES],
    interpreted=[(*shape, 4, [75] * 18 + [125, 5, 65] + [103] * 5) for shape in [(3, 1, 24), (8, 1, 16)]],
)
@pytest.mark.parametrize("splits", [Splits(), Splits(3), Splits(3, num_seqs=19)], ids=str)
def test_attention_over_shared_beginnings_equals_its_twin(
    place: Place,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    context_lens: list[int],
    splits: Splits,
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, block_size, splits)
    layout = with_shared_beginnings(place, layout, context_lens, block_size, num_heads // num_kv_heads, head_dim)
    cache = make_cache(place, num_blocks, block_size, num_kv_heads, head_dim)
    q = place.randn(layout.num_tokens, num_heads, head_dim)
    expected = twins.paged_attention(q, cache, layout, head_dim**-0.5)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5)
    assert relative_error(found, expected) < place.attention_error


@pytest.mark.gpu
def test_no_number_of_tiles_needs_a_kernel_of_its_own() -> None:
    from headrace.kernels import gpu
    from headrace.kernels.gpu import shared_attention

    context_lens = [300] * 40 + [500, 17, 260] + [411] * 5
    layout, num_blocks = make_layout(GPU, [1] * len(context_lens), context_lens, 16)
    layout = with_shared_beginnings(GPU, layout, context_lens, 16, 4, 128)
    assert layout.shared is not None
    cache, q = make_cache(GPU, num_blocks, 16, 8, 128), GPU.randn(layout.num_tokens, 32, 128)
    compiled = set()
    for num_tiles in range(1, len(layout.shared.tile_lens) + 1):
        shared = dataclasses.replace(
            layout.shared, tile_seqs=layout.shared.tile_seqs[:num_tiles], tile_lens=layout.shared.tile_lens[:num_tiles]
        )
        gpu.paged_attention(q, cache, dataclasses.replace(layout, shared=shared), 0.1)
        compiled.add(len(shared_attention._shared.device_caches[torch.cuda.current_device()][0]))
    assert len(compiled) == 1


@pytest.mark.interpreted
@pytest.mark.parametrize("num_programs", [1, 5, 8, 12, 40])
def test_any_number_of_programs_shares_the_work(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of three and six steps on two kv heads: whole, and in two and three parts."""
    from headrace.kernels import gpu
    from headrace.kernels.gpu import shared_attention

    place = INTERPRETERS[-1]
    shape = shared_attention.SharedShape(rows=64, keys=16, num_warps=1, num_stages=1, programs=num_programs)
    monkeypatch.setattr(shared_attention, "shared_shape", lambda *_: shape)
    monkeypatch.setattr(shared_attention, "num_processors", lambda _: 1)
    context_lens = [75] * 18 + [125, 5, 65] + [103] * 5
    layout, num_blocks = make_layout(place, [1] * len(context_lens), context_lens, 4, Splits())
    layout = with_shared_beginnings(place, layout, context_lens, 4, 4, 16)
    cache = make_cache(place, num_blocks, 4, 2, 16)
    q = place.randn(layout.num_tokens, 8, 16)
    expected = twins.paged_attention(q, cache, layout, 0.25)
    assert relative_error(gpu.paged_attention(q, cache, layout, 0.25), expected) < place.attention_error


@cases(
    "vocab_size num_rows tolerance",
    gpu=[(1000, 4096, 0.04), (49_152, 4096, 0.04), (128_256, 4096, 0.04)],
    interpreted=[(1000, 40, 0.2), (9000, 40, 0.2)],
)
def test_the_draw_follows_the_probabilities(place: Place, vocab_size: int, num_rows: int, tolerance: float) -> None:
    from headrace.kernels.gpu.draw import draw

    logits = torch.full((num_rows, vocab_size), -80.0, device=place.device, dtype=place.dtype)
    chosen = torch.tensor([3, vocab_size // 2, vocab_size - 1], device=place.device)
    wanted = torch.tensor([0.2, 0.5, 0.3], device=place.device)
    logits[:, chosen] = (wanted.log() * 2.0).to(place.dtype)  # temperature 2 brings them back
    rows = torch.arange(num_rows, device=place.device, dtype=torch.int32)
    drawn = torch.empty(num_rows, device=place.device, dtype=torch.int64)
    flags = torch.empty(num_rows, device=place.device, dtype=torch.uint8)
    lens = torch.full((num_rows,), 7, device=place.device, dtype=torch.int64)
    temperature = torch.full((num_rows,), 2.0, device=place.device, dtype=torch.float64)
    seed = torch.arange(num_rows, device=place.device, dtype=torch.int64)
    draw(logits, rows, lens, temperature, seed, drawn, flags)
    shares = torch.stack([(drawn == token).float().mean() for token in chosen])
    assert (shares - (logits[0, chosen].float() / 2.0).softmax(0)).abs().max() < tolerance
    assert not flags.any()
    draw(logits, rows, lens, torch.zeros_like(temperature), seed, drawn, flags)
    assert (drawn == vocab_size // 2).all()
    logits[5, 9] = float("nan")
    draw(logits, rows, lens, temperature, seed, drawn, flags)
    assert flags.nonzero().flatten().tolist() == [5]


@everywhere
def test_the_draw_takes_the_numbers_of_the_seed_and_the_length(place: Place) -> None:
    from headrace.kernels.gpu.cuts import CHUNK
    from headrace.kernels.gpu.draw import draw
    from headrace.sampling.philox import philox

    seeds = [0, 1, -1, 12345, 2**31, -(2**63), 2**63 - 1, 0x1234_5678_9ABC_DEF0]
    seed = torch.tensor(seeds * 4, device=place.device)
    lens = torch.tensor([1, 2, 2000, 2**40 + 3], device=place.device).repeat_interleave(len(seeds))
    zero = torch.zeros_like(seed)
    counter, key = (
        (lens & 0xFFFFFFFF, lens >> 32, zero, zero),
        (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF),
    )
    words = philox(counter, key)
    # Half of the weight is in each of two chunks, and half of a chunk's in each of two tokens.
    expected = torch.where(words[0] < 2**31, 0, CHUNK) + torch.where(words[2] < 2**31, 7, 4000)
    logits = torch.full((len(seed), 2 * CHUNK), -100.0, device=place.device, dtype=place.dtype)
    logits[:, [7, 4000, CHUNK + 7, CHUNK + 4000]] = 3.0
    order = torch.randperm(len(seed)).int().to(place.device)  # a row draws the same in any place of a batch
    drawn = torch.empty(len(seed), device=place.device, dtype=torch.int64)
    flags = torch.empty(len(seed), device=place.device, dtype=torch.uint8)
    draw(logits, order, lens, torch.ones(len(seed), device=place.device, dtype=torch.float64), seed, drawn, flags)
    assert torch.equal(drawn, expected[order.long()])


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:triton")  # numpy's, of inf - inf in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_flagged_and_draw_nothing(place: Place, bad: float) -> None:
    from headrace.kernels.gpu.draw import draw

    logits = place.randn(4, 5000)
    logits[1, 4500] = bad
    logits[2] = float("-inf")
    rows = torch.arange(4, device=place.device)
    lens, seed = torch.zeros_like(rows), torch.zeros_like(rows)
    drawn = torch.empty(4, device=place.device, dtype=torch.int64)
    flags = torch.empty(4, device=place.device, dtype=torch.uint8)
    for heat in (0.0, 1.0):
        temperature = torch.full((4,), heat, device=place.device, dtype=torch.float64)
        draw(logits, rows, lens, temperature, seed, drawn, flags)
        assert flags.tolist() == [0, BROKEN, BROKEN, 0]
        assert drawn[1:3].tolist() == [0, 0]


@everywhere
def test_a_decode_step_is_prepared_from_the_rows(place: Place) -> None:
    from headrace.kernels.gpu.rows import prepare_decode

    num_rows, max_len, block_size = 100, 64, 16
    rows = torch.randperm(num_rows)[:70].int().to(place.device)  # more than one program's
    tokens = torch.randint(1000, (num_rows, max_len), device=place.device).int()
    computed = torch.randint(max_len, (num_rows,), device=place.device)
    tables = torch.randperm(num_rows * max_len // block_size).view(num_rows, -1).int().to(place.device)
    token_ids, context_lens = (torch.empty(70, dtype=torch.int32, device=place.device) for _ in range(2))
    positions, slots = (torch.empty(70, dtype=torch.int64, device=place.device) for _ in range(2))
    prepare_decode(rows, tokens, computed, tables, block_size, token_ids, positions, slots, context_lens)
    at = computed[rows.long()]
    assert torch.equal(positions, at)
    assert torch.equal(context_lens, at.int() + 1)
    assert torch.equal(token_ids, tokens[rows.long(), at])
    assert torch.equal(slots, tables[rows.long(), at // block_size].long() * block_size + at % block_size)


@everywhere
@pytest.mark.parametrize("advances", [False, True])
def test_drawn_tokens_are_appended_to_the_rows_that_go_on(place: Place, advances: bool) -> None:
    from headrace.kernels.gpu.rows import append_tokens

    num_rows, max_len = 100, 64
    rows = torch.randperm(num_rows)[:70].to(place.device)
    drawn = torch.randint(1000, 2000, (70,), device=place.device)
    flags = torch.zeros(70, dtype=torch.uint8, device=place.device)
    tokens = torch.randint(1000, (num_rows, max_len), device=place.device).int()
    lens = torch.randint(1, max_len - 1, (num_rows,), device=place.device)
    is_finished = torch.zeros(num_rows, dtype=torch.bool, device=place.device)
    end_len = torch.full((num_rows,), max_len, device=place.device)
    stops = torch.full((num_rows, 4), -1, device=place.device)
    stops[rows[1], 2] = drawn[1]
    end_len[rows[2]] = lens[rows[2]] + 1
    flags[3] = BROKEN
    is_finished[rows[4]] = True
    stops[rows[5], 0], end_len[rows[5]], flags[5] = drawn[5], 1, BROKEN
    stops[rows[6], 3], end_len[rows[6]] = drawn[6], 1
    lens[rows[7]] = max_len  # a row without room, which nothing may be written behind
    standing = [GOES_ON, STOPPED, FULL, BROKEN, GOES_ON, BROKEN, STOPPED, FULL, *[GOES_ON] * 62]
    expected_tokens, expected_lens, expected_finished = tokens.clone(), lens.clone(), is_finished.clone()
    for place_in_batch, row in enumerate(rows.tolist()):
        if is_finished[row]:
            continue
        if lens[row] < max_len:
            expected_tokens[row, lens[row]] = drawn[place_in_batch].int()
        expected_lens[row] += 1
        expected_finished[row] = standing[place_in_batch] != GOES_ON
    computed = torch.arange(num_rows, device=place.device)
    expected_computed = computed + (expected_lens - lens) * advances

    out = torch.empty(2, 70, dtype=torch.int32, device=place.device)
    append_tokens(
        rows.int(),
        drawn,
        flags,
        tokens,
        lens,
        is_finished,
        end_len,
        stops,
        out,
        advances=computed if advances else None,
    )
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(lens, expected_lens)
    assert torch.equal(is_finished, expected_finished)
    assert torch.equal(computed, expected_computed)
    had_not_ended = [i for i in range(70) if i != 4]
    assert out[0, had_not_ended].tolist() == drawn[had_not_ended].tolist()
    assert out[1, had_not_ended].tolist() == [standing[i] for i in had_not_ended]


@everywhere
def test_new_blocks_are_written_into_the_tables(place: Place) -> None:
    from headrace.kernels.gpu.rows import write_tables

    tables = torch.zeros(5, 7, device=place.device, dtype=torch.int32)
    expected = tables.clone()
    writes = [(0, 0, 9), (4, 6, 8), (2, 3, 7)]
    rows, indexes, blocks = (
        torch.tensor(column, device=place.device, dtype=torch.int32) for column in zip(*writes, strict=True)
    )
    write_tables(tables, rows, indexes, blocks)
    expected[rows.long(), indexes.long()] = blocks
    assert torch.equal(tables, expected)


@everywhere
def test_rows_get_their_new_owners(place: Place) -> None:
    from headrace.kernels.gpu.rows import admit

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 99, (7, 2600), generator=generator, dtype=torch.int32)
    lens = torch.randint(0, 99, (7,), generator=generator)
    computed, is_finished = lens // 2, torch.ones(7, dtype=torch.bool)
    prompts = [torch.randint(0, 99, (n,), generator=generator, dtype=torch.int32) for n in (1, 2500, 1024)]
    rows, starts, num_computed = [5, 0, 3], [0, 1, 2501], [0, 48, 1023]
    columns = torch.tensor([rows, [len(p) for p in prompts], num_computed, starts], dtype=torch.int32)
    on_device = [x.to(place.device) for x in (columns, torch.cat(prompts), tokens, lens, computed, is_finished)]
    for row, prompt, number in zip(rows, prompts, num_computed, strict=True):
        tokens[row, : len(prompt)] = prompt
        lens[row], computed[row], is_finished[row] = len(prompt), number, False
    admit(on_device[0], on_device[1], 2500, *on_device[2:])
    for got, expected in zip(on_device[2:], (tokens, lens, computed, is_finished), strict=True):
        assert torch.equal(got.cpu(), expected)


@pytest.mark.gpu
def test_no_number_of_writes_needs_a_kernel_of_its_own() -> None:
    """To compile one takes half a second, for which the GPU would stand still."""
    from headrace.kernels.gpu import rows as row_kernels

    compiled = []
    for num_writes in (3, 1, 16, 1000, 1024):
        tables = torch.zeros(8, 2048, device="cuda", dtype=torch.int32)
        indexes = torch.arange(num_writes, device="cuda", dtype=torch.int32)
        row_kernels.write_tables(tables, torch.full_like(indexes, 3), indexes, indexes + 1)
        assert torch.equal(tables[3, :num_writes], indexes + 1)
        compiled.append(len(row_kernels._write_tables.device_caches[torch.cuda.current_device()][0]))
    assert len(set(compiled)) == 1
