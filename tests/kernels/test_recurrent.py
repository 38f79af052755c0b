"""Operations with a recurrent state: the forms for CPUs and GPUs against the reference, which goes token by token."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from headrace.kernels import reference
from headrace.kernels.layout import StepLayout
from tests.kernels.places import Place, cases, everywhere, make_layout, relative_error

CPU = Place("cpu", "cpu", torch.float32, error=1e-5, attention_error=1e-5)
# Decodes first (one of them the first token of its sequence), then a prompt that goes on, then fresh prompts.
MIXED = ([1, 1, 1, 70, 2, 129], [9, 1, 40, 95, 2, 129])
DECODE = ([1, 1, 1], [9, 1, 40])
NUM_SLOTS = 6
Call = Callable[[ModuleType, StepLayout, Tensor], Tensor]


def check(place: Place, kernels: ModuleType, call: Call, state_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Outputs and states equal the reference's. Slots whose sequence starts hold NaN, and others keep their state."""
    for query_lens, context_lens in (MIXED, DECODE):
        layout, _ = make_layout(place, query_lens, context_lens, 16)
        state = torch.randn(NUM_SLOTS, *state_shape, device=place.device).to(dtype)
        is_first = [query == context for query, context in zip(query_lens, context_lens, strict=True)]
        state[layout.slots.long()[torch.tensor(is_first, device=place.device)]] = float("nan")
        expected_state = state.clone()
        expected = call(reference, layout, expected_state)
        found = call(kernels, layout, state)
        assert found.dtype == expected.dtype and relative_error(found, expected) < place.error
        used = layout.slots.long()
        assert relative_error(state[used], expected_state[used]) < place.error
        unused = [slot for slot in range(NUM_SLOTS) if slot not in used.tolist()]
        assert torch.equal(state[unused], expected_state[unused])


def check_causal_conv(place: Place, kernels: ModuleType, num_channels: int, kernel_size: int, *, biased: bool) -> None:
    weight, bias = place.randn(num_channels, kernel_size), place.randn(num_channels) if biased else None
    wide = place.randn(sum(MIXED[0]), num_channels + 24)  # its rows lie apart

    def call(kernels: ModuleType, layout: StepLayout, state: Tensor) -> Tensor:
        x = wide[: layout.num_tokens, 16 : 16 + num_channels]
        out: Tensor = kernels.causal_conv(x, layout, state, weight, bias, activates=biased)
        return out

    check(place, kernels, call, (kernel_size - 1, num_channels), place.dtype)


def check_selective_scan(place: Place, kernels: ModuleType, shape: tuple[int, int, int, int]) -> None:
    num_heads, head_dim, num_groups, state_size = shape
    num_tokens, inner, of_groups = sum(MIXED[0]), num_heads * head_dim, num_groups * state_size
    wide, dt = place.randn(num_tokens, inner + 2 * of_groups), place.randn(num_tokens, num_heads)
    rate, skip, dt_bias = (torch.randn(num_heads, device=place.device) for _ in range(3))

    def call(kernels: ModuleType, layout: StepLayout, state: Tensor) -> Tensor:
        x, b, c = wide[: layout.num_tokens].split((inner, of_groups, of_groups), dim=1)
        out: Tensor = kernels.selective_scan(
            x.unflatten(1, (num_heads, head_dim)),
            b.unflatten(1, (num_groups, state_size)),
            c.unflatten(1, (num_groups, state_size)),
            dt[: layout.num_tokens],
            layout,
            state,
            rate=-rate.exp(),
            skip=skip,
            dt_bias=dt_bias,
        )
        return out

    check(place, kernels, call, (num_heads, head_dim, state_size), torch.float32)


def check_delta_rule(place: Place, kernels: ModuleType, shape: tuple[int, int, int, int]) -> None:
    num_key_heads, num_heads, key_dim, value_dim = shape
    keys, values = num_key_heads * key_dim, num_heads * value_dim
    num_tokens = sum(MIXED[0])
    wide, gates = place.randn(num_tokens, 2 * keys + values), place.randn(num_tokens, 2 * num_heads)
    rate, dt_bias = (torch.randn(num_heads, device=place.device) for _ in range(2))

    def call(kernels: ModuleType, layout: StepLayout, state: Tensor) -> Tensor:
        q, k, v = wide[: layout.num_tokens].split((keys, keys, values), dim=1)
        a, b = gates[: layout.num_tokens].chunk(2, dim=1)
        out: Tensor = kernels.gated_delta_rule(
            q.unflatten(1, (num_key_heads, key_dim)),
            k.unflatten(1, (num_key_heads, key_dim)),
            v.unflatten(1, (num_heads, value_dim)),
            a,
            b,
            layout,
            state,
            rate=-rate.exp(),
            dt_bias=dt_bias,
        )
        return out

    check(place, kernels, call, (num_heads, key_dim, value_dim), torch.float32)


@pytest.mark.parametrize("shape", [(6, 8, 2, 16), (4, 12, 1, 10)])
def test_the_scan_of_a_cpu_in_chunks_equals_that_by_token(shape: tuple[int, int, int, int]) -> None:
    from headrace.kernels import cpu

    check_selective_scan(CPU, cpu, shape)


@pytest.mark.parametrize("shape", [(2, 4, 16, 16), (3, 3, 12, 20)])
def test_the_delta_rule_of_a_cpu_in_chunks_equals_that_by_token(shape: tuple[int, int, int, int]) -> None:
    from headrace.kernels import cpu

    check_delta_rule(CPU, cpu, shape)


def check_repeated_keys(place: Place, kernels: ModuleType, *, error: float) -> None:
    """Each token then overwrites what the one before wrote, the hardest case for the triangular system of a chunk."""
    layout, _ = make_layout(place, [200], [200], 16)
    ones, values = torch.ones(200, 1, 8, device=place.device, dtype=place.dtype), place.randn(200, 1, 8)
    gates = [torch.full((200, 1), value, device=place.device, dtype=place.dtype) for value in (-20.0, 8.0)]
    head = torch.ones(1, device=place.device)
    found, expected = (
        each.gated_delta_rule(
            ones,
            ones,
            values,
            *gates,
            layout,
            torch.zeros(1, 1, 8, 8, device=place.device),
            rate=-head,
            dt_bias=0 * head,
        )
        for each in (kernels, reference)
    )
    assert relative_error(found, expected) < error


def test_the_delta_rule_of_a_cpu_is_stable_for_keys_that_repeat() -> None:
    from headrace.kernels import cpu

    check_repeated_keys(CPU, cpu, error=1e-5)


@everywhere
def test_the_delta_rule_of_a_gpu_is_stable_for_keys_that_repeat(place: Place) -> None:
    from headrace.kernels import gpu

    check_repeated_keys(place, gpu, error=max(place.error, 1e-3))


@cases("num_channels kernel_size", gpu=[(2048, 3), (8448, 4)], interpreted=[(40, 3), (24, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_convolutions_match_their_reference(place: Place, num_channels: int, kernel_size: int, biased: bool) -> None:
    from headrace.kernels import gpu

    check_causal_conv(place, gpu, num_channels, kernel_size, biased=biased)


@cases("shape", gpu=[((64, 64, 8, 128),), ((24, 64, 1, 256),), ((4, 96, 2, 16),)], interpreted=[((4, 8, 2, 16),)])
def test_scans_match_their_reference(place: Place, shape: tuple[int, int, int, int]) -> None:
    from headrace.kernels import gpu

    check_selective_scan(place, gpu, shape)


@cases("shape", gpu=[((16, 32, 128, 128),), ((2, 6, 96, 40),)], interpreted=[((2, 4, 8, 20),)])
def test_delta_rules_match_their_reference(place: Place, shape: tuple[int, int, int, int]) -> None:
    from headrace.kernels import gpu

    check_delta_rule(place, gpu, shape)


@everywhere
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("weight_len", [None, 32, 96])
def test_gated_norms_match_their_reference(place: Place, norm_first: bool, weight_len: int | None) -> None:
    from headrace.kernels import gpu

    x, wide = place.randn(7, 96), place.randn(7, 200)
    weight = None if weight_len is None else torch.randn(weight_len, device=place.device)
    found, expected = (
        kernels.gated_norm(x, wide[:, 8:104], weight, 1e-5, group_size=32, norm_first=norm_first)
        for kernels in (gpu, reference)
    )
    assert relative_error(found, expected) < place.error


@everywhere
def test_padding_of_a_graph_leaves_all_states_as_they_are(place: Place) -> None:
    """Sequences of a graph that are padding: a token with a context length of 0, or no token."""
    from headrace.kernels import gpu

    starts, slots = [0, 1, 2, 2], [0, 1, 1]
    tensors = {
        "query_starts": torch.tensor(starts, dtype=torch.int32),
        "context_lens": torch.tensor([5, 0, 0], dtype=torch.int32),
        "slots": torch.tensor(slots, dtype=torch.int32),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "positions": torch.tensor([4, 0]),
        "slot_mapping": torch.tensor([4, 0]),
    }
    layout = StepLayout(
        **{name: tensor.to(place.device) for name, tensor in tensors.items()},
        max_query_len=1,
        max_context_len=16,
        num_decodes=3,
    )
    conv, scan, delta = (torch.ones(2, *shape, device=place.device) for shape in ((3, 24), (2, 8, 16), (2, 8, 16)))
    head = torch.ones(2, device=place.device)
    x = place.randn(2, 24)
    gpu.causal_conv(x, layout, conv, place.randn(24, 4), activates=True)
    heads, gates = place.randn(2, 2, 8), place.randn(2, 2)
    group = place.randn(2, 1, 16)
    gpu.selective_scan(heads, group, group, gates, layout, scan, rate=-head, skip=head, dt_bias=head)
    values = place.randn(2, 2, 16)
    gpu.gated_delta_rule(heads, heads, values, gates, gates, layout, delta, rate=-head, dt_bias=head)
    for state in (conv, scan, delta):
        assert (state[1] == 1).all() and not (state[0] == 1).all()
