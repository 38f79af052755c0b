"""Paged attention: the reference against PyTorch's own attention, the CPU kernel against the reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import ops, reference
from headrace.kernels.cpu import attention
from headrace.kernels.layout import LayerCache, StepLayout
from headrace.kernels.reference.e3m4 import encode_e3m4
from tests.tolerances import sum_error

NAN = float("nan")


@dataclass(frozen=True)
class Step:
    q: Tensor  # [T, Hq, D]
    cache: LayerCache
    layout: StepLayout
    keys: list[Tensor]  # of each sequence, [Hkv, context_len, D]
    values: list[Tensor]


def build_step(
    lens: list[tuple[int, int]],  # query_len and context_len of each sequence
    *,
    heads: tuple[int, int] = (9, 3),
    head_dim: int = 64,
    block_size: int = 16,
    poison: float = NAN,
    seed: int | None = None,
) -> Step:
    """Builds a step with scattered blocks and slots, whose unused cache positions and blocks all hold `poison`.
    Without a seed, all steps of a test have the test's own.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    num_blocks = [-(-context_len // block_size) for _, context_len in lens]
    block_ids = torch.randperm(sum(num_blocks) + 2, generator=generator, dtype=torch.int32)
    slots = torch.randperm(len(lens) + 2, generator=generator, dtype=torch.int32)[: len(lens)]
    tables = torch.full((len(lens) + 2, max(num_blocks) + 1), 2**30, dtype=torch.int32)
    cache = ops.allocate_cache(len(block_ids), block_size, heads[1], head_dim, torch.float32, torch.device("cpu"))
    cache.keys.fill_(poison)
    cache.values.fill_(poison)
    keys = [torch.randn(heads[1], context_len, head_dim, generator=generator) for _, context_len in lens]
    values = [torch.randn(heads[1], context_len, head_dim, generator=generator) for _, context_len in lens]
    first = 0
    for seq, (_, context_len) in enumerate(lens):
        blocks = block_ids[first : first + num_blocks[seq]]
        first += num_blocks[seq]
        tables[slots[seq], : len(blocks)] = blocks
        positions = torch.arange(context_len)
        where = blocks.long()[positions // block_size], slice(None), positions % block_size
        cache.keys[where] = keys[seq].transpose(0, 1)
        cache.values[where] = values[seq].transpose(0, 1)
    positions = torch.cat([torch.arange(context_len - query_len, context_len) for query_len, context_len in lens])
    layout = StepLayout(
        positions=positions,
        slot_mapping=torch.zeros_like(positions),
        query_starts=torch.tensor([0, *[query_len for query_len, _ in lens]]).cumsum(0).int(),
        context_lens=torch.tensor([context_len for _, context_len in lens], dtype=torch.int32),
        slots=slots,
        block_tables=tables,
        max_query_len=max(query_len for query_len, _ in lens),
        max_context_len=max(context_len for _, context_len in lens),
    )
    q = torch.randn(len(positions), heads[0], head_dim, generator=generator)
    return Step(q, cache, layout, keys, values)


NARROW = (torch.float16, torch.float8_e4m3fn)


def narrowed(step: Step, dtype: torch.dtype) -> Step:
    """The same step over a cache of this type, with a unit for each head in FP8."""
    keys, values = step.cache.keys, step.cache.values
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    cache = ops.allocate_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, torch.device("cpu"))
    if dtype == torch.float16:
        cache.keys.copy_(keys)
        cache.values.copy_(values)
    else:
        cache = dataclasses.replace(cache, key_units=2.0 ** torch.arange(10.0, 10.0 + num_kv_heads))
        assert cache.key_units is not None
        cache.keys.copy_(encode_e3m4(keys / cache.key_units[:, None, None]))
        cache.values.view(torch.uint8).copy_(values.to(dtype).view(torch.uint8))
    return dataclasses.replace(step, cache=cache)


def torch_attention(step: Step, *, window: int | None = None, slides: bool = True) -> Tensor:
    outs = []
    for seq, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        tokens = slice(int(step.layout.query_starts[seq]), int(step.layout.query_starts[seq + 1]))
        positions, key_positions = step.layout.positions[tokens, None], torch.arange(keys.shape[1])
        mask = key_positions <= positions
        if window is not None:
            mask &= (positions - key_positions < window) if slides else (positions // window == key_positions // window)
        q = step.q[tokens].transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        outs.append(out.transpose(0, 1).flatten(1))
    return torch.cat(outs)


def tolerance(step: Step) -> dict[str, float]:
    """A score is a sum of D terms whose norm is about 1, with rounding errors that change its weight by as large a
    share; the output is a mean of up to `max_context_len` values with these weights.
    """
    error = sum_error(step.q.shape[-1]) + sum_error(step.layout.max_context_len)
    return {"rtol": error, "atol": error}


MIXED = [(1, 100), (7, 7), (1, 1), (40, 300), (1, 129), (3, 17)]


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_the_reference_agrees_with_torch_attention_over_contiguous_keys(window: int | None, slides: bool) -> None:
    step = build_step(MIXED)
    out = reference.paged_attention(step.q, step.cache, step.layout, 64**-0.5, window, slides=slides)
    torch.testing.assert_close(out, torch_attention(step, window=window, slides=slides), **tolerance(step))


def test_the_reference_caps_scores_softly() -> None:
    step = build_step([(1, 2)], heads=(1, 1))
    out = reference.paged_attention(step.q, step.cache, step.layout, 1.0, softcap=0.5)
    scores = 0.5 * torch.tanh(step.keys[0][0] @ step.q[0, 0] / 0.5)
    torch.testing.assert_close(out[0], scores.softmax(0) @ step.values[0][0])


def test_a_sink_of_the_reference_is_a_key_whose_value_is_zero() -> None:
    step = build_step([(1, 2)], heads=(1, 1))
    out = reference.paged_attention(step.q, step.cache, step.layout, 1.0, sinks=torch.tensor([0.7]))
    scores = torch.cat((step.keys[0][0] @ step.q[0, 0], torch.tensor([0.7])))
    torch.testing.assert_close(out[0], scores.softmax(0)[:2] @ step.values[0][0])


def test_a_slope_of_the_reference_lowers_scores_with_the_distance() -> None:
    step = build_step([(1, 3)], heads=(1, 1))
    out = reference.paged_attention(step.q, step.cache, step.layout, 1.0, slopes=torch.tensor([0.25]))
    scores = step.keys[0][0] @ step.q[0, 0] - torch.tensor([0.5, 0.25, 0.0])
    torch.testing.assert_close(out[0], scores.softmax(0) @ step.values[0][0])


def assert_like_reference(
    step: Step,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slides: bool = True,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> None:
    scale, further = step.q.shape[-1] ** -0.5, {"slides": slides, "sinks": sinks, "slopes": slopes}
    expected = reference.paged_attention(step.q, step.cache, step.layout, scale, window, softcap, **further)
    out = attention.paged_attention(step.q, step.cache, step.layout, scale, window, softcap, **further)
    torch.testing.assert_close(out, expected, **tolerance(step))


@pytest.mark.parametrize("window", [None, 20])
def test_the_kernel_gives_sinks_their_share(window: int | None) -> None:
    sinks = torch.tensor([-30.0, 0.5, 3.0, 30.0] * 3)[:9]
    assert_like_reference(build_step(MIXED, heads=(9, 3)), window=window, sinks=sinks)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, 2.0)])
def test_the_kernel_lowers_scores_by_the_slope_of_their_head(window: int | None, softcap: float | None) -> None:
    slopes = 0.5 ** torch.arange(1.0, 10.0)
    assert_like_reference(build_step(MIXED, heads=(9, 3)), window=window, softcap=softcap, slopes=slopes)


@pytest.mark.parametrize("block_size", [8, 16, 32, 5])
@pytest.mark.parametrize("head_dim", [64, 128, 96, 80, 72])
def test_the_kernel_matches_the_reference_in_a_mixed_step(head_dim: int, block_size: int) -> None:
    assert_like_reference(build_step(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 2), (16, 2), (64, 1)])
def test_the_kernel_agrees_for_every_number_of_heads_in_a_group(heads: tuple[int, int]) -> None:
    assert_like_reference(build_step(MIXED, heads=heads))


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 16, 150])
def test_the_kernel_agrees_with_windows_and_soft_caps(
    window: int | None, softcap: float | None, block_size: int
) -> None:
    assert_like_reference(build_step(MIXED, block_size=block_size), window=window, softcap=softcap)


@pytest.mark.parametrize("window", [1, 16, 50, 128, 150, 1000])
def test_the_kernel_agrees_with_windows_that_do_not_slide(window: int) -> None:
    assert_like_reference(build_step(MIXED), window=window, slides=False)


def test_the_kernel_agrees_over_contexts_of_many_blocks() -> None:
    assert_like_reference(build_step([(1, 2000), (200, 1500)]))


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((4, 4), 128, 16), ((8, 1), 96, 32), ((6, 2), 72, 8), ((9, 3), 64, 5), ((64, 2), 64, 16)],
)
def test_the_kernel_reads_narrower_caches_in_a_mixed_step(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    step = build_step(MIXED, heads=heads, head_dim=head_dim, block_size=block_size)
    assert_like_reference(narrowed(step, dtype))
    assert_like_reference(narrowed(step, dtype), window=20, softcap=2.0)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrower_cache_in_the_plain_layout_is_read_too(dtype: torch.dtype) -> None:
    step = narrowed(build_step(MIXED), dtype)
    plain = dataclasses.replace(step.cache, keys=step.cache.keys.contiguous())
    assert_like_reference(dataclasses.replace(step, cache=plain))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_tokens_result_over_a_narrower_cache_depends_on_no_other_token(dtype: torch.dtype) -> None:
    """Few rows are multiplied by keys that are widened in registers, many by keys that are widened before."""
    step = narrowed(build_step([(60, 200)]), dtype)
    together = _attend(step)
    for token in (0, 31, 59):
        assert torch.equal(_attend(_one_token(step, token))[0], together[token])


@settings(deadline=None, max_examples=25)
@given(
    lens=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=6),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([16, 32, 64, 72]),
    block_size=st.sampled_from([4, 8, 16, 32]),
    window=st.none() | st.integers(1, 150),
    slides=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_kernel_agrees_on_any_step(
    lens: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    slides: bool,
    seed: int,
) -> None:
    lens = [(query_len, query_len + before) for query_len, before in lens]
    heads = (group * num_kv_heads, num_kv_heads)
    step = build_step(lens, heads=heads, head_dim=head_dim, block_size=block_size, seed=seed)
    assert_like_reference(step, window=window, slides=slides)


@pytest.mark.parametrize("poison", [NAN, float("inf"), 3e38])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_what_unused_cache_positions_hold_never_shows(poison: float, block_size: int) -> None:
    poisoned, clean = (build_step(MIXED, block_size=block_size, poison=held) for held in (poison, 0.0))
    assert torch.equal(_attend(poisoned), _attend(clean))


def test_a_nan_among_a_sequences_own_keys_is_not_hidden() -> None:
    step = build_step([(1, 40), (1, 40)])
    block = step.layout.block_tables[step.layout.slots[0], 1]
    step.cache.keys[block, :, 3] = NAN
    out = _attend(step)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_very_large_scores_do_not_overflow() -> None:
    step = build_step([(1, 300)])
    out = attention.paged_attention(step.q * 1e4, step.cache, step.layout, 1.0)
    torch.testing.assert_close(out, reference.paged_attention(step.q * 1e4, step.cache, step.layout, 1.0))


def test_a_tokens_result_is_the_same_to_the_bit_in_any_batch() -> None:
    together = _attend(build_step([(60, 200), (1, 77)]))[:60]
    step = build_step([(60, 200), (1, 77)])
    for token in (0, 31, 59):
        assert torch.equal(_attend(_one_token(step, token))[0], together[token])


def _one_token(step: Step, token: int) -> Step:
    """One token of the first sequence, alone."""
    layout = StepLayout(
        positions=step.layout.positions[token : token + 1],
        slot_mapping=step.layout.slot_mapping[token : token + 1],
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=step.layout.positions[token : token + 1].int() + 1,
        slots=step.layout.slots[:1],
        block_tables=step.layout.block_tables,
        max_query_len=1,
        max_context_len=step.layout.max_context_len,
    )
    return dataclasses.replace(step, q=step.q[token : token + 1], layout=layout)


def test_the_number_of_threads_does_not_change_the_result() -> None:
    step = build_step(MIXED)
    before = torch.get_num_threads()
    outs = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            outs.append(_attend(step))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_queries_may_be_a_view_into_the_projections() -> None:
    step = build_step(MIXED)
    qkv = torch.cat((step.q, torch.zeros(step.q.shape[0], 6, 64)), dim=1)
    out = attention.paged_attention(qkv[:, :9], step.cache, step.layout, 64**-0.5)
    assert torch.equal(out, _attend(step))


def test_a_cache_in_the_plain_layout_is_read_too() -> None:
    step = build_step(MIXED)
    plain = LayerCache(keys=step.cache.keys.contiguous(), values=step.cache.values)
    out = attention.paged_attention(step.q, plain, step.layout, 64**-0.5)
    torch.testing.assert_close(out, _attend(step), **tolerance(step))


def _attend(step: Step) -> Tensor:
    return attention.paged_attention(step.q, step.cache, step.layout, 64**-0.5)
