"""Prefill graphs: their sizes, and how a step with prompts is brought into their form."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.hub_config import spec_from_config
from headrace.models.spec import ModelSpec
from headrace.runner.gpu.graph_sizes import fitting_prefill_size, max_prefill_tokens, prefill_graph_bytes
from headrace.runner.gpu.prefill_graphs import prefill_shapes
from headrace.runner.gpu.tiles import TILE_ROWS

SHAPES = list(prefill_shapes(2048, 40, 4096))
PADDING_SLOT = 40


@given(st.integers(0, 40), st.lists(st.integers(2, 300), max_size=6))
def test_a_step_keeps_its_tokens_and_the_rest_is_padding(num_decodes: int, prompts: list[int]) -> None:
    num_tokens = np.array([1] * num_decodes + prompts, np.int64)
    slots = np.random.default_rng(num_decodes).permutation(PADDING_SLOT + 10)[: len(num_tokens)]
    slots[slots == PADDING_SLOT] = PADDING_SLOT + 10
    shape = next(shape for shape in SHAPES if shape.num_tokens >= num_tokens.sum())
    packed = shape.packed(slots, num_tokens, num_decodes, PADDING_SLOT)
    token_slots, offsets, seq_slots, lens, starts, tiles = (a.numpy() for a in shape.unpacked(torch.from_numpy(packed)))

    num_padding = shape.num_tokens - num_tokens.sum()
    assert token_slots.tolist() == [*np.repeat(slots, num_tokens), *[PADDING_SLOT] * num_padding]
    assert offsets.tolist() == [n for length in [*num_tokens, num_padding] for n in range(length)]
    is_used = (lens > 0) & (seq_slots != PADDING_SLOT)
    assert seq_slots[is_used].tolist() == slots.tolist() and lens[is_used].tolist() == num_tokens.tolist()
    assert (lens[:num_decodes] == 1).all() and not lens[num_decodes : shape.num_decodes].any()
    assert np.array_equal(np.diff(starts), lens) and starts[-1] == shape.num_tokens

    computed = np.zeros(shape.num_tokens, np.int64)
    for seq, first in tiles.reshape(-1, 2):
        end = min(first + TILE_ROWS, lens[seq])
        computed[starts[seq] + first : starts[seq] + end] += 1
    assert (computed[num_decodes:] == 1).all() and not computed[:num_decodes].any()


def test_the_padding_of_a_graph_is_within_the_models_context() -> None:
    for max_model_len in (32, 64, 100, 4096):
        shapes = list(prefill_shapes(8192, 1024, max_model_len))
        sizes = [0, *(shape.num_tokens for shape in shapes)]
        assert all(later - earlier <= max_model_len for earlier, later in itertools.pairwise(sizes))
        for shape in shapes:
            _, offsets, *_ = shape.unpacked(torch.from_numpy(shape.only_padding(PADDING_SLOT)))
            assert int(offsets.max()) < max_model_len
    assert sizes[-1] == 2048


def test_no_graph_is_larger_than_a_step() -> None:
    assert [shape.num_tokens for shape in prefill_shapes(100, 16, 4096)] == [32, 64, 96]
    assert all(shape.num_decodes == min(16, shape.num_tokens) for shape in prefill_shapes(100, 16, 4096))


def test_steps_that_the_host_launches_in_time_have_no_graph() -> None:
    small, large = llama(2048, 8192, num_layers=16), llama(4096, 14336, num_layers=32)
    assert max_prefill_tokens(small, 8192) == 2048 and max_prefill_tokens(small, 512) == 512
    assert 1024 < max_prefill_tokens(large, 8192) < 1152
    assert prefill_graph_bytes(4000, small, 8192) == 1000 and prefill_graph_bytes(4000, small, 512) == 4000


def llama(hidden_size: int, intermediate_size: int, num_layers: int) -> ModelSpec:
    return spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1024,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
    )


def test_the_smallest_graph_with_room_is_taken_and_none_for_many_prompts_or_long_contexts() -> None:
    sizes = [shape.num_tokens for shape in SHAPES]

    def fitting(num_tokens: int, num_prompts: int = 1, longest: int = 100) -> int | None:
        return fitting_prefill_size(sizes, num_tokens, num_prompts, longest)

    assert [fitting(n) for n in (2, 32, 33, 257, 1025, 2048)] == [32, 32, 64, 320, 1152, 2048]
    assert fitting(2049) is None
    assert fitting(200, num_prompts=64) == 224 and fitting(200, num_prompts=65) is None
    assert fitting(200, longest=8192) == 224 and fitting(200, longest=8193) is None
