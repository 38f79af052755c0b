"""The Triton kernels against their twins, on fresh random inputs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace.kernels import twins
from headrace.kernels.layout import LayerCache, StepLayout

pytestmark = pytest.mark.gpu

SHAPES = [(32, 8, 128), (24, 8, 128), (32, 8, 64), (9, 3, 64), (8, 8, 96), (16, 2, 256)]  # Hq, Hkv, D


def device() -> torch.device:
    return torch.device("cuda")


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def make_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> LayerCache:
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return LayerCache(
        torch.randn(shape, device="cuda", dtype=torch.bfloat16), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    )


def make_layout(
    query_lens: list[int], context_lens: list[int], block_size: int, num_splits: int = 1
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
    tiles = torch.from_numpy(tiles_of(lens, num_single).copy()).int() if num_single < num_seqs else None
    return StepLayout(
        positions=positions.cuda(),
        slots=slots.cuda(),
        query_starts=starts.cuda(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32).cuda(),
        rows=rows.cuda(),
        block_tables=shuffled.cuda(),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_single=num_single,
        num_splits=num_splits,
        tiles=None if tiles is None else tiles.cuda(),
    ), sum(counts)


@pytest.mark.parametrize("hidden_size", [576, 2048, 4096])
def test_norms_equal_their_twins(hidden_size: int) -> None:
    from headrace.kernels import gpu

    x = torch.randn(37, hidden_size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(hidden_size, device="cuda", dtype=torch.bfloat16)
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5)) < 5e-3
    residual = torch.randn_like(x)
    other = residual.clone()
    assert (
        relative_error(gpu.add_rms_norm(x, residual, weight, 1e-5), twins.add_rms_norm(x, other, weight, 1e-5)) < 5e-3
    )
    assert torch.equal(residual, other)


def test_norms_take_weights_in_float32() -> None:
    from headrace.kernels import gpu

    x, weight = torch.randn(5, 576, device="cuda", dtype=torch.bfloat16), torch.randn(576, device="cuda")
    assert relative_error(gpu.rms_norm(x, weight, 1e-5), twins.rms_norm(x, weight, 1e-5)) < 5e-3


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_equal_their_twins(name: str) -> None:
    from headrace.kernels import gpu

    x = 3 * torch.randn(19, 2 * 3000, device="cuda", dtype=torch.bfloat16)
    assert relative_error(getattr(gpu, name)(x), getattr(twins, name)(x)) < 5e-3


def test_the_soft_cap_equals_its_twin_and_works_in_place() -> None:
    from headrace.kernels import gpu

    x = 40 * torch.randn(7, 5001, device="cuda", dtype=torch.bfloat16)
    expected = twins.soft_cap(x.float(), 30.0)
    assert gpu.soft_cap(x, 30.0) is x
    assert relative_error(x, expected) < 5e-3


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_store_equals_its_twin(num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout([1, 1, 40, 7], [33, 1, 64, 100], 16)
    num_tokens = layout.num_tokens
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device="cuda", dtype=torch.bfloat16)
    cos_sin = torch.randn(128, head_dim, device="cuda")
    norms = [torch.randn(head_dim, device="cuda") if has_norms else None for _ in range(2)]
    ours, theirs = (
        make_cache(num_blocks, 16, num_kv_heads, head_dim),
        make_cache(num_blocks, 16, num_kv_heads, head_dim),
    )
    theirs.keys.copy_(ours.keys)
    theirs.values.copy_(ours.values)
    expected = twins.rope_and_store(qkv.clone(), layout, cos_sin, theirs, num_heads, num_kv_heads, *norms, 1e-6)
    found = gpu.rope_and_store(qkv.clone(), layout, cos_sin, ours, num_heads, num_kv_heads, *norms, 1e-6)
    assert relative_error(found, expected) < 5e-3
    assert relative_error(ours.keys, theirs.keys) < 5e-3
    assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, None), (None, 20.0)])
def test_attention_equals_its_twin(
    num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int, window: int | None, softcap: float | None
) -> None:
    from headrace.kernels import gpu

    layout, num_blocks = make_layout([1, 1, 1, 1, 200, 2, 17], [1, 15, 16, 777, 300, 2, 129], 16, num_splits)
    cache = make_cache(num_blocks, 16, num_kv_heads, head_dim)
    q = torch.randn(layout.num_tokens, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    expected = twins.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap)
    found = gpu.paged_attention(q, cache, layout, head_dim**-0.5, window, softcap)
    assert relative_error(found, expected) < 1e-2


@pytest.mark.parametrize("vocab_size", [1000, 49_152, 128_256])
def test_the_draw_follows_the_probabilities(vocab_size: int) -> None:
    from headrace.kernels.gpu.draw import draw

    num_rows = 4096
    logits = torch.full((num_rows, vocab_size), -80.0, device="cuda", dtype=torch.bfloat16)
    chosen = torch.tensor([3, vocab_size // 2, vocab_size - 1], device="cuda")
    wanted = torch.tensor([0.2, 0.5, 0.3], device="cuda")
    logits[:, chosen] = (wanted.log() * 2.0).bfloat16()  # temperature 2 brings them back
    rows = torch.arange(num_rows, device="cuda", dtype=torch.int32)
    drawn = torch.empty(num_rows, device="cuda", dtype=torch.int64)
    flags = torch.empty(num_rows, device="cuda", dtype=torch.uint8)
    lens = torch.full((num_rows,), 7, device="cuda", dtype=torch.int64)
    temperature = torch.full((num_rows,), 2.0, device="cuda", dtype=torch.float64)
    seed = torch.arange(num_rows, device="cuda", dtype=torch.int64)
    draw(logits, rows, lens, temperature, seed, drawn, flags)
    shares = torch.stack([(drawn == token).float().mean() for token in chosen])
    assert (shares - (logits[0, chosen].float() / 2.0).softmax(0)).abs().max() < 0.04
    assert not flags.any()
    draw(logits, rows, lens, torch.zeros_like(temperature), seed, drawn, flags)
    assert (drawn == vocab_size // 2).all()
    logits[5, 9] = float("nan")
    draw(logits, rows, lens, temperature, seed, drawn, flags)
    assert flags.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_attention_over_shared_beginnings_equals_its_twin(
    num_heads: int, num_kv_heads: int, head_dim: int, num_splits: int
) -> None:
    from headrace.kernels import gpu
    from headrace.kernels.gpu.attention import SHARED_ROWS
    from headrace.kernels.layout import SharedPrefixes
    from headrace.runner.prefix_groups import BlockTableMirror
    from headrace.steps import TableWrites

    context_lens = [300] * 40 + [500, 17, 260] + [411] * 5
    layout, num_blocks = make_layout([1] * len(context_lens), context_lens, 16, num_splits)
    tables, rows = layout.block_tables, layout.rows.long()
    tables[rows[1:40], :10] = tables[rows[0], :10].clone()  # forty sequences share 160 tokens
    tables[rows[44:], :21] = tables[rows[43], :21].clone()  # five share 336
    mirror = BlockTableMirror(len(rows), tables.shape[1])
    counts = [-(-n // 16) for n in context_lens]
    for row, count in zip(rows.tolist(), counts, strict=True):
        indexes = torch.arange(count)
        mirror.write(
            TableWrites(torch.full((count,), row).numpy(), indexes.numpy(), tables[row, :count].long().cpu().numpy())
        )
    seqs_per_tile = SHARED_ROWS // (1 << (num_heads // num_kv_heads - 1).bit_length())
    groups = mirror.groups(rows.cpu().numpy(), block_size=16, seqs_per_tile=seqs_per_tile)
    assert groups is not None and set(groups.tile_lens.tolist()) == {160, 336}
    shared = SharedPrefixes(
        *(torch.from_numpy(a).int().cuda() for a in (groups.lens, groups.tile_seqs, groups.tile_lens))
    )
    cache = make_cache(num_blocks, 16, num_kv_heads, head_dim)
    q = torch.randn(layout.num_tokens, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    expected = twins.paged_attention(q, cache, layout, head_dim**-0.5)
    found = gpu.paged_attention(q, cache, dataclasses.replace(layout, shared=shared), head_dim**-0.5)
    assert relative_error(found, expected) < 1e-2
