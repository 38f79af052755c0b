"""Routes of steps with few tokens, computed together with the router's logits, against the separate operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.kernels.gpu.few_routes import multiply_and_route, takes_router
from headrace.kernels.gpu.few_rows import Linear
from headrace.kernels.gpu.routing import route, sort_routes
from headrace.kernels.layout import Routes
from tests.kernels.places import Place, cases

RULES = ["sigmoid", "sigmoid_of_chosen", "softmax", "softmax_of_chosen"]


def exact_rows(place: Place, *shape: int) -> Tensor:
    """Small integers, most of them zero: sums of their products are exact in every type, whatever the order, and ties
    are frequent."""
    values = torch.randint(-1, 2, shape) * (torch.rand(shape) < 0.1)
    return values.to(place.device, place.dtype)


def assert_equal_routes(found: Routes, expected: Routes) -> None:
    assert found.chosen is not None and expected.chosen is not None
    assert torch.equal(found.chosen, expected.chosen)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.ends, expected.ends)


@cases(
    "num_tokens num_experts num_chosen width",
    gpu=[
        (tokens, *shape)
        for tokens in (2, 3, 5, 11, 16)
        for shape in [(128, 8, 2048), (512, 8, 2048), (256, 8, 4096), (60, 4, 2048), (8, 2, 4096), (16, 1, 896)]
    ],
    interpreted=[(2, 8, 1, 128), (16, 60, 4, 256), (5, 128, 8, 512), (7, 512, 6, 384), (3, 160, 3, 128)],
)
@pytest.mark.parametrize("rule", RULES)
def test_one_launch_gives_the_routes_of_separate_ones(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, width: int, rule: str
) -> None:
    router = Linear.of(exact_rows(place, num_experts, width))
    x = exact_rows(place, num_tokens, width)
    assert takes_router(router, x, num_chosen, has_groups=False)

    found = multiply_and_route(router, x, num_chosen, rule, scale=1.5)

    logits = torch.nn.functional.linear(x, router.weight)
    assert_equal_routes(found, route(logits, num_chosen, rule, scale=1.5))


@cases("num_experts num_chosen width", gpu=[(128, 8, 2048), (60, 4, 2048)], interpreted=[(12, 3, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_a_bias_changes_the_logits_and_a_correction_the_choice(
    place: Place, num_experts: int, num_chosen: int, width: int, has_bias: bool, is_corrected: bool
) -> None:
    bias = torch.randint(-9, 10, (num_experts,)).to(place.device, place.dtype) if has_bias else None
    correction = torch.randn(num_experts, device=place.device) if is_corrected else None
    router, x = Linear.of(exact_rows(place, num_experts, width), bias), exact_rows(place, 6, width)
    logits = torch.nn.functional.linear(x, router.weight, bias)
    for rule in ("sigmoid_of_chosen", "softmax"):
        found = multiply_and_route(router, x, num_chosen, rule, correction=correction)
        assert_equal_routes(found, route(logits, num_chosen, rule, correction=correction))


@cases("num_experts width", gpu=[(16, 4096)], interpreted=[(6, 128)])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")  # numpy's, in the interpreter
def test_sparsemixer_routes_in_one_launch(place: Place, num_experts: int, width: int) -> None:
    bias = torch.arange(4, num_experts + 4).to(place.device, place.dtype) * 8  # no logit is near zero
    router, x = Linear.of(exact_rows(place, num_experts, width), bias), exact_rows(place, 5, width)
    logits = torch.nn.functional.linear(x, router.weight, bias)
    found = multiply_and_route(router, x, 2, "sparsemixer", jitter=0.2)
    assert (found.weights < 1).any()  # some experts are near the chosen one
    assert_equal_routes(found, route(logits, 2, "sparsemixer", jitter=0.2))


@cases("num_experts num_chosen width", gpu=[(128, 8, 2048)], interpreted=[(24, 4, 256)])
def test_equal_logits_go_to_the_first_experts(place: Place, num_experts: int, num_chosen: int, width: int) -> None:
    router, x = Linear.of(torch.zeros_like(place.randn(num_experts, width))), place.randn(4, width)
    found = multiply_and_route(router, x, num_chosen, "softmax_of_chosen")
    assert found.chosen is not None
    assert found.chosen.view(4, -1).tolist() == [list(range(num_chosen))] * 4
    torch.testing.assert_close(found.weights, torch.full_like(found.weights, 1 / num_chosen))


@cases("num_experts num_chosen width", gpu=[(128, 8, 2048), (256, 8, 4096)], interpreted=[(24, 3, 256)])
def test_routes_repeat_exactly_and_leave_the_arrivals_at_zero(
    place: Place, num_experts: int, num_chosen: int, width: int
) -> None:
    router, x = Linear.of(place.randn(num_experts, width) * width**-0.5), place.randn(16, width)
    assert router.arrivals is not None
    found, again = (multiply_and_route(router, x, num_chosen, "softmax") for _ in range(2))
    assert torch.equal(found.weights, again.weights) and torch.equal(found.order, again.order)
    assert not router.arrivals.any()

    assert found.chosen is not None
    order, ends = sort_routes(found.chosen, num_experts)
    assert torch.equal(found.order, order) and torch.equal(found.ends, ends)
    # The logits of random rows are rounded: another order of their sums may change a choice, but no weight by much.
    separate = route(torch.nn.functional.linear(x, router.weight), num_chosen, "softmax")
    torch.testing.assert_close(found.weights, separate.weights, atol=1e-3, rtol=0.05)


@cases("width", gpu=[(2048,)], interpreted=[(128,)])
def test_routes_that_need_no_order_have_none(place: Place, width: int) -> None:
    router, x = Linear.of(exact_rows(place, 16, width)), exact_rows(place, 4, width)
    found, sorted_too = (multiply_and_route(router, x, 2, "softmax", sorts=sorts) for sorts in (False, True))
    assert found.order.numel() == found.ends.numel() == 0
    assert found.chosen is not None and sorted_too.chosen is not None
    assert torch.equal(found.chosen, sorted_too.chosen) and torch.equal(found.weights, sorted_too.weights)


@cases("", gpu=[()], interpreted=[()])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")  # numpy's, in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning:triton")
def test_a_row_of_no_numbers_still_goes_to_experts_that_exist(place: Place) -> None:
    router, x = Linear.of(place.randn(6, 128)), place.randn(5, 128)
    x[2] = float("nan")
    found = multiply_and_route(router, x, 2, "softmax_of_chosen")
    assert found.chosen is not None and found.chosen.max() < 6
    assert sorted(found.order.tolist()) == list(range(10))
    assert found.ends[-1] == 10


@cases("", gpu=[()], interpreted=[()])
def test_what_one_launch_does_not_take_is_left_to_separate_ones(place: Place) -> None:
    router, x = Linear.of(place.randn(8, 128)), place.randn(16, 128)
    assert takes_router(router, x, 2, has_groups=False)
    assert not takes_router(router, x, 2, has_groups=True)
    assert not takes_router(router, x[:1], 2, has_groups=False)  # its norm is part of the router
    assert not takes_router(router, torch.cat([x, x[:1]]), 2, has_groups=False)
    assert not takes_router(Linear.of(place.randn(8, 192)), place.randn(16, 192), 2, has_groups=False)
    assert not takes_router(Linear.of(place.randn(640, 128)), x, 2, has_groups=False)
    assert not takes_router(Linear.of(place.randn(32, 128)), x, 10, has_groups=False)
    assert not takes_router(object(), x, 2, has_groups=False)


@cases("num_experts num_chosen width", gpu=[(128, 8, 2048)], interpreted=[])
def test_a_graph_routes_the_rows_that_it_finds(place: Place, num_experts: int, num_chosen: int, width: int) -> None:
    router, x = Linear.of(exact_rows(place, num_experts, width)), exact_rows(place, 16, width)
    multiply_and_route(router, x, num_chosen, "softmax")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [multiply_and_route(router, x, num_chosen, "softmax") for _ in range(3)]
    for _ in range(5):
        x.copy_(exact_rows(place, 16, width))
        graph.replay()
        expected = route(torch.nn.functional.linear(x, router.weight), num_chosen, "softmax")
        for routes in found:
            assert_equal_routes(routes, expected)
