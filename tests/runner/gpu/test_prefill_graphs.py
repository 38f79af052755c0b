"""How a step with prompts is brought into the form of a graph."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.hub_config import spec_from_config
from headrace.models.spec import ModelSpec
from headrace.runner.gpu.prefill_graphs import PromptGraph, PromptGraphs, graph_bytes, most_tokens, prompt_shapes
from headrace.runner.gpu.tiles import TILE_ROWS

SHAPES = list(prompt_shapes(2048, 40, 4096))
NOBODY = 40


@given(st.integers(0, 40), st.lists(st.integers(2, 300), max_size=6))
def test_a_step_keeps_its_tokens_and_nobody_has_the_rest(num_single: int, prompts: list[int]) -> None:
    num_tokens = np.array([1] * num_single + prompts, np.int64)
    slots = np.random.default_rng(num_single).permutation(NOBODY + 10)[: len(num_tokens)]
    slots[slots == NOBODY] = NOBODY + 10
    shape = next(shape for shape in SHAPES if shape.num_tokens >= num_tokens.sum())
    packed = shape.packed(slots, num_tokens, num_single, NOBODY)
    token_slots, offsets, seq_slots, lens, starts, tiles = (a.numpy() for a in shape.unpacked(torch.from_numpy(packed)))

    num_padding = shape.num_tokens - num_tokens.sum()
    assert token_slots.tolist() == [*np.repeat(slots, num_tokens), *[NOBODY] * num_padding]
    assert offsets.tolist() == [n for length in [*num_tokens, num_padding] for n in range(length)]
    is_somebodys = (lens > 0) & (seq_slots != NOBODY)
    assert seq_slots[is_somebodys].tolist() == slots.tolist() and lens[is_somebodys].tolist() == num_tokens.tolist()
    assert (lens[:num_single] == 1).all() and not lens[num_single : shape.num_single].any()
    assert np.array_equal(np.diff(starts), lens) and starts[-1] == shape.num_tokens

    computed = np.zeros(shape.num_tokens, np.int64)
    for seq, first in tiles.reshape(-1, 2):
        end = min(first + TILE_ROWS, lens[seq])
        computed[starts[seq] + first : starts[seq] + end] += 1
    assert (computed[num_single:] == 1).all() and not computed[:num_single].any()


def test_the_fill_of_a_graph_is_within_the_models_context() -> None:
    for max_model_len in (32, 64, 100, 4096):
        shapes = list(prompt_shapes(8192, 1024, max_model_len))
        sizes = [0, *(shape.num_tokens for shape in shapes)]
        assert all(later - earlier <= max_model_len for earlier, later in itertools.pairwise(sizes))
        for shape in shapes:
            _, offsets, *_ = shape.unpacked(torch.from_numpy(shape.of_nobody(NOBODY)))
            assert int(offsets.max()) < max_model_len
    assert sizes[-1] == 2048


def test_no_graph_is_larger_than_a_step() -> None:
    assert [shape.num_tokens for shape in prompt_shapes(100, 16, 4096)] == [32, 64, 96]
    assert all(shape.num_single == min(16, shape.num_tokens) for shape in prompt_shapes(100, 16, 4096))


def test_steps_that_the_host_launches_in_time_are_worth_no_graph() -> None:
    small, large = llama(2048, 8192, num_layers=16), llama(4096, 14336, num_layers=32)
    assert most_tokens(small, 8192) == 2048 and most_tokens(small, 512) == 512
    assert 1024 < most_tokens(large, 8192) < 1152
    assert graph_bytes(4000, small, 8192) == 1000 and graph_bytes(4000, small, 512) == 4000


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


def test_the_smallest_graph_with_room_is_taken_and_none_for_much_or_for_long() -> None:
    graphs = PromptGraphs(
        lambda shape, arrays: arrays[0],
        llama(2048, 8192, num_layers=16),
        max_num_batched_tokens=2048,
        max_num_seqs=40,
        max_model_len=32768,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    without_gpu: Any = None
    graphs._graphs = [PromptGraph(shape, without_gpu, without_gpu, without_gpu) for shape in SHAPES]

    def size(num_tokens: int, num_prompts: int = 1, longest: int = 100) -> int | None:
        graph = graphs.fitting(num_tokens, num_prompts, longest)
        return None if graph is None else graph.shape.num_tokens

    assert [size(n) for n in (2, 32, 33, 257, 1025, 2048)] == [32, 32, 64, 320, 1152, 2048]
    assert size(2049) is None
    assert size(200, num_prompts=64) == 224 and size(200, num_prompts=65) is None
    assert size(200, longest=8192) == 224 and size(200, longest=8193) is None
