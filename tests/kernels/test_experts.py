"""Expert routing and grouped GEMMs: the references against plain sums, the kernels against the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.dist.mesh import Span
from headrace.kernels import ops, reference
from headrace.kernels.layout import Routes
from headrace.kernels.quantized import BLOCK_LEN, FP8, Fp8Weight, dequantize, quantize_int4
from headrace.models.mixture import routes_to
from tests.kernels.places import Place, cases, relative_error

RULES = ["sigmoid", "sigmoid_of_chosen", "softmax", "softmax_of_chosen"]


def route_one_by_one(logits: Tensor, num_chosen: int, rule: str) -> list[list[tuple[int, float]]]:
    """Returns each token's experts and their weights, the highest first."""
    found = []
    for line in logits.float():
        chosen = line.argsort(descending=True)[:num_chosen]
        weights = {
            "sigmoid": line.sigmoid()[chosen],
            "sigmoid_of_chosen": line.sigmoid()[chosen] / line.sigmoid()[chosen].sum(),
            "softmax": line.softmax(0)[chosen],
            "softmax_of_chosen": line[chosen].softmax(0),
        }[rule]
        found.append(list(zip(chosen.tolist(), weights.tolist(), strict=True)))
    return found


def experts_of(routes: Routes) -> Tensor:
    """Returns the expert of each route, [R]."""
    counts = routes.ends.diff(prepend=torch.zeros_like(routes.ends[:1]))
    experts = torch.empty_like(routes.order)
    experts[routes.order.long()] = torch.repeat_interleave(counts.cpu()).to(experts)
    return experts


def without_ties(logits: Tensor) -> Tensor:
    """Only the rows with no two equal logits: of these either may come first."""
    return logits[(logits.float().sort(-1).values.diff(dim=-1) > 0).all(-1)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_tokens_go_to_their_highest_experts(rule: str, num_chosen: int) -> None:
    logits = torch.randn(20, 7)
    routes = ops.route(logits, num_chosen, rule)
    expected = [route for token in route_one_by_one(logits, num_chosen, rule) for route in token]
    assert experts_of(routes).tolist() == [expert for expert, _ in expected]
    torch.testing.assert_close(routes.weights, torch.tensor([weight for _, weight in expected]))
    order = routes.order.tolist()
    assert order == sorted(order, key=lambda route: (expected[route][0], route))


@cases("num_tokens num_experts", gpu=[(300, 256)], interpreted=[(20, 12)])
@pytest.mark.parametrize("is_corrected", [False, True])
def test_tokens_stay_within_their_best_groups(
    place: Place, num_tokens: int, num_experts: int, is_corrected: bool
) -> None:
    """The best group is that of the highest logit, or of the two highest corrected scores."""
    from headrace.kernels import gpu

    logits = torch.randn(num_tokens, num_experts, device=place.device)
    correction = torch.rand(num_experts, device=place.device) if is_corrected else None
    rule = "sigmoid_of_chosen" if is_corrected else "softmax"
    groups = {"num_groups": 4, "num_groups_chosen": 2}
    found = gpu.route(logits, 3, rule, correction=correction, scale=2.5, **groups)
    same = reference.route(logits, 3, rule, correction=correction, scale=2.5, **groups)
    assert torch.equal(found.order, same.order) and torch.equal(found.ends, same.ends)
    torch.testing.assert_close(found.weights, same.weights)
    for token, experts in zip(logits, experts_of(found).view(num_tokens, 3).tolist(), strict=True):
        by_group = (token if correction is None else token.sigmoid() + correction).view(4, -1)
        best = by_group.sort(descending=True).values[:, : 2 if is_corrected else 1].sum(1)
        allowed = set(best.topk(2).indices.tolist())
        assert {expert // (num_experts // 4) for expert in experts} <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chosen", [1, 3])
def test_each_route_is_multiplied_by_the_matrix_of_its_expert(num_chosen: int, dtype: torch.dtype) -> None:
    weight, x = torch.randn(7, 24, 16).to(dtype), torch.randn(20, 16).to(dtype)
    logits = torch.randn(20, 7)
    logits[:, 2] = -9.0  # no token is routed there
    routes = ops.route(logits, num_chosen, "softmax")
    experts = experts_of(routes).tolist()
    packed = ops.pack_experts(weight)
    of_tokens = torch.stack([weight[expert] @ x[route // num_chosen] for route, expert in enumerate(experts)])
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(packed(x, routes), of_tokens, **tolerance)
    weighed = (of_tokens.float() * routes.weights[:, None]).to(dtype)
    torch.testing.assert_close(packed(x, routes, weighs=True), weighed, **tolerance)
    wide = torch.randn(20 * num_chosen, 16).to(dtype)
    of_routes = torch.stack([weight[expert] @ wide[route] for route, expert in enumerate(experts)])
    torch.testing.assert_close(packed(wide, routes), of_routes, **tolerance)


def test_no_tokens_have_no_routes() -> None:
    routes = ops.route(torch.empty(0, 7), 2, "softmax")
    assert routes.ends.tolist() == [0] * 7
    assert ops.pack_experts(torch.randn(7, 24, 16))(torch.empty(0, 16), routes).shape == (0, 24)


@cases(
    "num_tokens num_experts num_chosen",
    gpu=[(1, 16, 1), (300, 16, 1), (5000, 128, 8), (77, 7, 3), (0, 8, 2)],
    interpreted=[(1, 16, 1), (30, 7, 3), (0, 8, 2)],
)
@pytest.mark.parametrize("rule", ["sigmoid", "softmax", "softmax_of_chosen"])  # others: with a correction
def test_routes_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, rule: str
) -> None:
    from headrace.kernels import gpu

    rows = [torch.randperm(num_experts) for _ in range(num_tokens)]  # no two equal
    logits = torch.stack(rows) if rows else torch.empty(0, num_experts)
    logits = ((logits - num_experts / 2) / 8).to(place.device, place.dtype)
    found, expected = gpu.route(logits, num_chosen, rule), reference.route(logits, num_chosen, rule)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.ends, expected.ends)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)


@cases("num_routes", gpu=[(40_000,)], interpreted=[(1500,)])  # more than one program looks at at a time
def test_routes_are_sorted_by_expert(place: Place, num_routes: int) -> None:
    from headrace.kernels.gpu.routing import sort_routes

    chosen = torch.randint(0, 3, (num_routes,), dtype=torch.int32, device=place.device)
    order, ends = sort_routes(chosen, 4)
    assert torch.equal(order, chosen.argsort(stable=True).int())
    assert torch.equal(ends, torch.bincount(chosen, minlength=4).cumsum(0).int())


@cases("num_tokens num_experts num_chosen", gpu=[(300, 128, 8), (77, 7, 3)], interpreted=[(30, 7, 3)])
@pytest.mark.parametrize("rule", ["sigmoid", "sigmoid_of_chosen", "softmax_of_chosen"])
def test_corrected_routes_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, rule: str
) -> None:
    from headrace.kernels import gpu

    logits, correction = place.randn(num_tokens, num_experts), torch.randn(num_experts, device=place.device)
    found = gpu.route(logits, num_chosen, rule, correction=correction, scale=2.5)
    expected = reference.route(logits, num_chosen, rule, correction=correction, scale=2.5)
    assert torch.equal(found.ends, expected.ends)
    assert torch.equal(found.order, expected.order)
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)


@cases("num_tokens num_experts", gpu=[(300, 16)], interpreted=[(40, 6)])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")
def test_sparsemixer_routes_match_their_reference(place: Place, num_tokens: int, num_experts: int) -> None:
    from headrace.kernels import gpu

    logits = without_ties(place.randn(2 * num_tokens, num_experts))[:num_tokens]
    assert len(logits) == num_tokens
    found, expected = (kernels.route(logits, 2, "sparsemixer", jitter=0.2) for kernels in (gpu, reference))
    assert torch.equal(found.order, expected.order) and torch.equal(found.ends, expected.ends)
    assert 0 < (found.weights < 1).sum() < len(found.weights)  # some experts are near the chosen one
    torch.testing.assert_close(found.weights, expected.weights, atol=1e-6, rtol=1e-5)


def test_a_correction_changes_the_choice_but_not_the_weights() -> None:
    logits, correction = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0.0, -9.0, 0.0])
    routes = ops.route(logits, 2, "sigmoid", correction=correction, scale=2.0)
    assert experts_of(routes).tolist() == [0, 2]
    torch.testing.assert_close(routes.weights, 2 * torch.tensor([2.0, 0.0]).sigmoid())


@cases("", gpu=[()], interpreted=[()])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning:triton")  # numpy's, in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning:triton")
def test_a_token_whose_logits_are_no_numbers_still_goes_to_experts_that_exist(place: Place) -> None:
    from headrace.kernels import gpu

    logits = place.randn(5, 6)
    logits[2] = float("nan")
    routes = gpu.route(logits, 2, "softmax_of_chosen")
    assert sorted(routes.order.tolist()) == list(range(10))
    assert routes.ends[-1] == 10


def uneven_routes(place: Place, num_tokens: int, num_experts: int, num_chosen: int) -> Routes:
    """Routes most tokens to one expert, and none to some."""
    logits = torch.randn(num_tokens, num_experts)
    logits[: num_tokens // 2, 1] += 9.0
    logits[:, 0] = -20.0
    return reference.route(logits.to(place.device), num_chosen, "softmax")


GEMMS = [(1, 16, 1), (3, 16, 2), (40, 4, 1), (150, 4, 2), (900, 4, 1)]  # tokens, experts, chosen


@cases(
    "num_tokens num_experts num_chosen num_columns width",
    gpu=[(*case, *shape) for case in [*GEMMS, (4000, 64, 4)] for shape in [(512, 256), (200, 136)]],
    interpreted=[(*case, *shape) for case in GEMMS[:4] for shape in [(128, 64), (72, 40)]],
)
@pytest.mark.parametrize("weighs", [False, True])
def test_expert_gemms_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, num_columns: int, width: int, weighs: bool
) -> None:
    from headrace.kernels import gpu

    routes = uneven_routes(place, num_tokens, num_experts, num_chosen)
    weight = place.randn(num_experts, num_columns, width)
    for num_rows in {num_tokens, num_tokens * num_chosen}:
        x = place.randn(num_rows, width)
        expected = reference.pack_experts(weight)(x, routes, weighs=weighs)
        found = gpu.pack_experts(weight)(x, routes, weighs=weighs)
        assert relative_error(found, expected) < place.error


MANY_ROUTES = (0, 1, 32, 33, 64, 65, 128, 129, 161, 193)  # of each expert
FEW_ROUTES = (0, 1, 32, 33, 64, 65, 96, 0, 17, 1)  # tiles of 64
FEWER_ROUTES = (0, 96, 16, 17, 0, 1, 32, 33, 0, 0, 0, 0)  # tiles of 32


@cases(
    "num_routes num_columns width",
    gpu=[
        (num_routes, *shape)
        for num_routes in (MANY_ROUTES, FEW_ROUTES, FEWER_ROUTES)
        for shape in [(512, 256), (384, 192), (320, 64), (200, 136)]
    ],
    interpreted=[(MANY_ROUTES, 72, 40), (FEW_ROUTES, 128, 64), (FEWER_ROUTES, 128, 64)],
)
def test_last_tiles_of_all_heights_match_their_reference(
    place: Place, num_routes: tuple[int, ...], num_columns: int, width: int
) -> None:
    from headrace.kernels import gpu

    experts = torch.repeat_interleave(torch.tensor(num_routes))[torch.randperm(sum(num_routes))]
    logits = torch.nn.functional.one_hot(experts, len(num_routes)).float() * 9.0
    routes = reference.route(logits.to(place.device), 1, "softmax")
    weight, x = place.randn(len(num_routes), num_columns, width) * width**-0.5, place.randn(len(experts), width)
    expected = reference.pack_experts(weight)(x, routes)
    packed = gpu.pack_experts(weight)
    assert relative_error(packed(x, routes), expected) < place.error
    gated = gpu.gated_experts(packed, x, routes, "silu")
    assert relative_error(gated, reference.silu_and_mul(expected)) < 2 * place.error


@cases(
    "num_tokens num_columns width",
    gpu=[(tokens, *shape) for tokens in (30, 400) for shape in [(320, 64), (200, 136)]],
    interpreted=[(30, 64, 64), (90, 128, 64), (30, 72, 40)],
)
@pytest.mark.parametrize("span", [Span(0, 3), Span(4, 9), Span(8, 12)], ids=str)
def test_a_rank_with_some_of_the_experts_computes_the_routes_to_these(
    place: Place, num_tokens: int, num_columns: int, width: int, span: Span
) -> None:
    from headrace.kernels import gpu

    routes = uneven_routes(place, num_tokens, 12, 3)
    weight, x = place.randn(12, num_columns, width), place.randn(num_tokens, width)
    expected = reference.pack_experts(weight)(x, routes, weighs=True)
    found = gpu.pack_experts(weight[span.start : span.end])(x, routes_to(span, routes), weighs=True)
    experts = experts_of(routes)
    is_ours = (experts >= span.start) & (experts < span.end)
    assert relative_error(found[is_ours], expected[is_ours]) < place.error


@cases("num_tokens num_chosen", gpu=[(1, 1), (50, 2), (900, 1)], interpreted=[])
@pytest.mark.parametrize("weighs", [False, True])
def test_fp8_gemms_match_their_reference(place: Place, num_tokens: int, num_chosen: int, weighs: bool) -> None:
    from headrace.kernels import gpu

    routes = uneven_routes(place, num_tokens, 8, num_chosen)
    weight, x = place.randn(8, 512, 384), place.randn(num_tokens, 384)
    expected = reference.pack_experts(weight, as_fp8=True)(x, routes, weighs=weighs)
    packed = gpu.pack_experts(weight, as_fp8=True)
    assert packed.takes_fp8
    assert relative_error(packed(x, routes, weighs=weighs), expected) < 0.02
    assert relative_error(packed(gpu.quantize_rows(x), routes, weighs=weighs), expected) < 0.02


@cases(
    "num_tokens num_experts num_chosen num_columns width",
    gpu=[(*case, *shape) for case in [*GEMMS, (4000, 64, 4)] for shape in [(512, 256), (272, 136)]],
    interpreted=[(*GEMMS[1], 128, 64), (*GEMMS[2], 80, 40)],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_expert_gemms_match_their_reference(
    place: Place, num_tokens: int, num_experts: int, num_chosen: int, num_columns: int, width: int, activation: str
) -> None:
    from headrace.kernels import gpu

    routes = uneven_routes(place, num_tokens, num_experts, num_chosen)
    weight, x = place.randn(num_experts, num_columns, width) * width**-0.5, place.randn(num_tokens, width)
    activate = {"silu": reference.silu_and_mul, "gelu_tanh": reference.gelu_tanh_and_mul}[activation]
    expected = activate(reference.pack_experts(weight)(x, routes))
    assert (
        relative_error(gpu.gated_experts(gpu.pack_experts(weight), x, routes, activation), expected) < 2 * place.error
    )


def groups_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_groups_fp8`, but without rounding: the interpreter has no FP8."""
    groups = x.float().unflatten(1, (-1, BLOCK_LEN))
    scales = groups.abs().amax(-1)
    return (groups / scales.unsqueeze(-1)).flatten(1).to(x.dtype), scales


@cases(
    "num_tokens num_chosen",
    gpu=[(1, 1), (30, 2), (300, 1), (2000, 2)],
    interpreted=[(9, 2), (100, 2)],  # few routes of each expert, and many
)
@pytest.mark.parametrize("weighs", [False, True])
def test_experts_with_scales_per_block_match_their_reference(
    place: Place, num_tokens: int, num_chosen: int, weighs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.kernels import gpu
    from headrace.kernels.gpu import experts

    routes = uneven_routes(place, num_tokens, 4, num_chosen)
    is_gpu = place.device == "cuda"
    if not is_gpu:
        monkeypatch.setattr(experts, "quantize_groups_fp8", groups_of)
    values = torch.randn(4 * 256, 384, device=place.device).to(FP8 if is_gpu else place.dtype)
    stored = Fp8Weight(values, torch.rand(8, 3, device=place.device) + 0.1)
    matrices = dequantize(stored).view(4, 256, 384).to(place.dtype)
    packed = gpu.pack_quantized_experts(stored, 4, place.dtype)
    assert not packed.takes_fp8
    for num_rows in {num_tokens, num_tokens * num_chosen}:
        x = place.randn(num_rows, 384)
        expected = reference.pack_experts(matrices)(x, routes, weighs=weighs)
        assert relative_error(packed(x, routes, weighs=weighs), expected) < (0.04 if is_gpu else 2 * place.error)
    x = place.randn(num_tokens, 384)
    gated = gpu.gated_experts(packed, x, routes, "silu")
    expected = reference.silu_and_mul(reference.pack_experts(matrices)(x, routes))
    assert relative_error(gated, expected) < (0.06 if is_gpu else 4 * place.error)


@cases("num_tokens", gpu=[(9,), (300,)], interpreted=[])
def test_stored_fp8_with_scales_per_row_is_multiplied_as_what_is_quantized_at_load(
    place: Place, num_tokens: int
) -> None:
    from headrace.kernels import gpu

    routes, weight = uneven_routes(place, num_tokens, 8, 2), place.randn(8, 256, 384)
    rows = gpu.quantize_rows(weight.flatten(0, 1))
    packed = gpu.pack_quantized_experts(Fp8Weight(rows.values, rows.scales), 8, place.dtype)
    x = place.randn(num_tokens, 384)
    assert torch.equal(packed(x, routes), gpu.pack_experts(weight, as_fp8=True)(x, routes))


@cases(
    "num_tokens num_chosen group_len has_zeros",
    gpu=[
        (tokens, chosen, group_len, has_zeros)
        for tokens, chosen in [(1, 1), (16, 2), (100, 1), (2000, 2)]
        for group_len, has_zeros in [(32, True), (64, False), (128, True)]
    ],
    interpreted=[(9, 2, 64, True), (60, 1, 32, False), (90, 2, 128, True)],  # tiles of 16, 32 and 64 routes
)
@pytest.mark.parametrize("weighs", [False, True])
def test_experts_in_four_bits_match_their_reference(
    place: Place, num_tokens: int, num_chosen: int, group_len: int, has_zeros: bool, weighs: bool
) -> None:
    from headrace.kernels import gpu

    num_columns, width = 72, 256 if group_len == 128 else 192  # no multiples of a tile, nor of a packed run
    routes = uneven_routes(place, num_tokens, 3, num_chosen)
    stored = quantize_int4(torch.randn(3 * num_columns, width, device=place.device), group_len, has_zeros=has_zeros)
    matrices = dequantize(stored).view(3, num_columns, width).to(place.dtype)
    packed = gpu.pack_quantized_experts(stored, 3, place.dtype)
    assert packed is not None and not packed.takes_fp8
    for num_rows in {num_tokens, num_tokens * num_chosen}:
        x = place.randn(num_rows, width)
        expected = reference.pack_experts(matrices)(x, routes, weighs=weighs)
        assert relative_error(packed(x, routes, weighs=weighs), expected) < 2 * place.error
    x = place.randn(num_tokens, width)
    gated = gpu.gated_experts(packed, x, routes, "silu")
    expected = reference.silu_and_mul(reference.pack_experts(matrices)(x, routes))
    assert relative_error(gated, expected) < 4 * place.error


def test_groups_of_four_bits_that_no_kernel_takes_are_left_to_the_caller() -> None:
    from headrace.kernels import gpu

    weight = quantize_int4(torch.randn(3 * 64, 96), 48)
    assert gpu.pack_quantized_experts(weight, 3, torch.bfloat16) is None
