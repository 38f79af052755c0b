"""Experts of 2 to 16 tokens whose routes are in order with their experts, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.kernels import gpu, reference
from headrace.kernels.gpu import sorted_experts
from headrace.kernels.gpu.few_routes import multiply_and_route
from headrace.kernels.gpu.few_rows import Linear
from headrace.kernels.layout import Routes
from tests.kernels.places import Place, cases, relative_error

SHAPES = [
    (128, 8, 256, 512),
    (40, 4, 768, 256),
    (8, 2, 512, 384),
    (512, 8, 128, 256),
]  # experts, chosen, columns, width
SMALL = [(12, 3, 128, 256), (4, 4, 64, 384)]


def routes_with_experts(place: Place, num_tokens: int, num_experts: int, num_chosen: int) -> Routes:
    """Routes half of the tokens to the same experts, and none to the first."""
    logits = torch.randn(num_tokens, num_experts)
    logits[: num_tokens // 2] = logits[0]
    logits[:, 0] = -20.0
    routes = reference.route(logits.to(place.device), num_chosen, "softmax")
    counts = routes.ends.diff(prepend=torch.zeros_like(routes.ends[:1]))
    experts = torch.arange(num_experts, dtype=torch.int32, device=place.device)
    return replace(routes, experts=torch.repeat_interleave(experts, counts.long()))


@cases(
    "num_tokens num_experts num_chosen num_columns width",
    gpu=[(tokens, *shape) for tokens in (2, 5, 16) for shape in SHAPES],
    interpreted=[(tokens, *shape) for tokens in (2, 16) for shape in SMALL],
)
@pytest.mark.parametrize("weighs", [False, True])
def test_rows_of_tokens_and_of_routes_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, num_columns: int, width: int, weighs: bool
) -> None:
    routes = routes_with_experts(place, num_tokens, num_experts, num_chosen)
    weight = place.randn(num_experts, num_columns, width)
    for num_rows in (num_tokens, num_tokens * num_chosen):
        x = place.randn(num_rows, width)
        assert sorted_experts.takes(weight, x, routes, None)
        expected = reference.pack_experts(weight)(x, routes, weighs=weighs)
        assert relative_error(gpu.pack_experts(weight)(x, routes, weighs=weighs), expected) < place.error


@cases(
    "num_tokens num_experts num_chosen num_columns width",
    gpu=[(tokens, *shape) for tokens in (2, 5, 16) for shape in SHAPES],
    interpreted=[(tokens, *shape) for tokens in (2, 16) for shape in SMALL],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_and_up_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, num_columns: int, width: int, activation: str
) -> None:
    routes = routes_with_experts(place, num_tokens, num_experts, num_chosen)
    weight, x = place.randn(num_experts, 2 * num_columns, width) * width**-0.5, place.randn(num_tokens, width)
    assert sorted_experts.takes(weight, x, routes, activation)
    activate = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}[activation]
    expected = activate(reference.pack_experts(weight)(x, routes))
    found = gpu.gated_experts(gpu.pack_experts(weight), x, routes, activation)
    assert relative_error(found, expected) < 2 * place.error


@cases("num_tokens num_experts num_chosen", gpu=[(16, 128, 8), (3, 60, 4)], interpreted=[(5, 24, 3)])
def test_the_router_gives_routes_that_are_taken(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int
) -> None:
    router, x = Linear.of(place.randn(num_experts, 256) * 256**-0.5), place.randn(num_tokens, 256)
    weight = place.randn(num_experts, 128, 256)
    routes = multiply_and_route(router, x, num_chosen, "softmax")
    assert sorted_experts.takes(weight, x, routes, None)
    assert routes.experts is not None and routes.chosen is not None
    assert torch.equal(routes.experts, routes.chosen[routes.order.long()])


@cases("", gpu=[()], interpreted=[()])
def test_other_routes_and_shapes_are_left_to_the_grouped_gemm(place: Place) -> None:
    routes = routes_with_experts(place, 4, 8, 2)
    x = place.randn(4, 256)
    assert sorted_experts.takes(place.randn(8, 128, 256), x, routes, "silu")
    assert not sorted_experts.takes(place.randn(8, 128, 256), x, replace(routes, experts=None), None)
    assert not sorted_experts.takes(place.randn(8, 72, 256), x, routes, None)
    assert not sorted_experts.takes(place.randn(8, 128, 200), place.randn(4, 200), routes, None)
    router = Linear.of(place.randn(8, 256))
    assert multiply_and_route(router, x, 1, "sigmoid").experts is None  # the kernel could not tell up from down
