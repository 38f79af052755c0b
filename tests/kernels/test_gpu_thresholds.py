"""min_p, top_k and top_p on a GPU, without a sort, against the reference, which sorts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.sampling.feature import Batch
from headrace.sampling.features import FILTERS
from tests.kernels.places import Place, cases

INF = float("inf")


def settings_of(place: Place, num_rows: int, vocab_size: int, **given: Any) -> dict[str, Tensor]:
    """Returns columns with the given values (one for all slots, or one each), and defaults that filter nothing."""
    defaults = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    return {
        name: torch.as_tensor(given.get(name, default), device=place.device)
        .expand(num_rows)
        .to(torch.int64 if isinstance(default, int) else torch.float64)
        .contiguous()
        for name, default in defaults.items()
    }


def random_settings(place: Place, num_rows: int, vocab_size: int) -> dict[str, Tensor]:
    """Each filter on for about half the slots, in all combinations."""

    def some(values: Tensor, off: float) -> Tensor:
        return torch.where(torch.rand(num_rows) < 0.5, values, torch.full_like(values, off))

    return settings_of(
        place,
        num_rows,
        vocab_size,
        temperature=some(torch.rand(num_rows) * 2 + 0.05, 1.0),
        min_p=some(torch.rand(num_rows) ** 4, 0.0),
        top_k=some((vocab_size * torch.rand(num_rows) ** 3).floor() + 1, 0.0),
        top_p=some(torch.rand(num_rows) * 0.98 + 0.01, 1.0),
        seed=torch.arange(num_rows),
    )


def kept_by_kernel(logits: Tensor, slots: Tensor, columns: dict[str, Tensor]) -> Tensor:
    from headrace.kernels.gpu.sample import weigh
    from headrace.kernels.gpu.threshold_types import Filters, Thresholds
    from headrace.kernels.gpu.thresholds import find_thresholds

    thresholds = Thresholds(
        torch.empty(len(slots), device=logits.device), torch.empty(len(slots), device=logits.device, dtype=torch.int32)
    )
    filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"])
    weights = weigh(logits, slots, columns["temperature"])
    find_thresholds(logits, slots, weights, columns["temperature"], filters, thresholds)
    values, tokens = logits.float(), torch.arange(logits.shape[1], device=logits.device)
    is_equal = (values == thresholds.values[:, None]) & (tokens <= thresholds.last_ids[:, None])
    return ((values > thresholds.values[:, None]) | is_equal) & (values > -INF)


def num_searched(monkeypatch: pytest.MonkeyPatch, logits: Tensor, columns: dict[str, Tensor]) -> int:
    """Returns how many slots are left to the search."""
    from headrace.kernels.gpu import thresholds as module

    seen: list[int] = []

    def watched(*args: Any) -> None:
        seen.append(int(args[-1].values.isnan().sum()))
        search_thresholds(*args)

    search_thresholds = module.search_thresholds
    monkeypatch.setattr(module, "search_thresholds", watched)
    kept_by_kernel(logits, torch.arange(len(logits), device=logits.device), columns)
    monkeypatch.setattr(module, "search_thresholds", search_thresholds)
    return seen[0]


def kept_by_reference(logits: Tensor, slots: Tensor, columns: dict[str, Tensor]) -> Tensor:
    changed = logits.double()
    all_rows = torch.arange(len(slots), device=logits.device)
    for feature in FILTERS:
        feature.apply(Batch(changed, slots, slots, columns), all_rows)
    return changed > -INF


def assert_kept_alike(logits: Tensor, slots: Tensor, columns: dict[str, Tensor]) -> None:
    found, expected = kept_by_kernel(logits, slots, columns), kept_by_reference(logits, slots, columns)
    is_exact = columns["top_p"][slots] == 1.0
    assert torch.equal(found[is_exact], expected[is_exact])
    # Where top_p ends can be a matter of the last bits of a sum.
    assert (found != expected).sum(dim=1).max() <= (1 if logits.shape[1] < 10_000 else 4)
    assert (found != expected).any(dim=1).float().mean() < 0.1


shapes = cases("num_rows vocab_size", gpu=[(64, 128_256), (200, 5003)], interpreted=[(12, 700), (3, 9000)])
shapes_one_by_default = cases(
    "num_rows vocab_size",
    gpu=[(64, 128_256), (200, 5003)],
    interpreted=[(12, 700), (3, 9000)],
    quick=[(3, 9000)],
)
few_rows = cases(
    "num_rows vocab_size",
    gpu=[(64, 128_256), (200, 5003)],
    interpreted=[(4, 700), (1, 9000)],
    quick=[(4, 700)],
)


@shapes
@pytest.mark.parametrize("spread", [0.01, pytest.param(1.0, marks=pytest.mark.slow), 4.0])
def test_the_same_tokens_are_kept_as_by_the_reference(
    place: Place, num_rows: int, vocab_size: int, spread: float
) -> None:
    torch.manual_seed(num_rows)
    logits = place.randn(num_rows, vocab_size) * spread + 3.0
    slots = torch.randperm(num_rows).to(place.device)
    assert_kept_alike(logits, slots, random_settings(place, num_rows, vocab_size))


@cases("num_rows vocab_size", gpu=[(64, 128_256)], interpreted=[(8, 700), (2, 5000)], quick=[(8, 700)])
def test_the_same_tokens_are_kept_where_too_few_can_be_gathered(
    monkeypatch: pytest.MonkeyPatch, place: Place, num_rows: int, vocab_size: int
) -> None:
    from headrace.kernels.gpu import thresholds

    monkeypatch.setattr(thresholds, "CANDIDATES", 64)
    torch.manual_seed(7)
    logits = place.randn(num_rows, vocab_size) * 3
    columns = random_settings(place, num_rows, vocab_size)
    assert_kept_alike(logits, torch.arange(num_rows, device=place.device), columns)
    flat = torch.full_like(logits[:2], 2.0)
    columns = settings_of(place, 2, vocab_size, top_k=vocab_size // 2, top_p=0.5)
    assert num_searched(monkeypatch, flat, columns) == 2
    assert_kept_alike(flat, torch.arange(2, device=place.device), columns)


@cases("num_rows vocab_size", gpu=[(1000, 128_256)], interpreted=[(1, 40_000)])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"top_p": 0.9}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.3}, marks=pytest.mark.slow),
        pytest.param({"top_k": 50}, marks=pytest.mark.slow),
        {"top_k": 1000, "top_p": 0.9},
        pytest.param({"min_p": 0.01, "top_p": 0.9}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [pytest.param(0.7, marks=pytest.mark.slow), 3.0])
def test_rows_that_are_not_flat_are_settled_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    num_rows: int,
    vocab_size: int,
    settings: dict[str, float],
    spread: float,
) -> None:
    torch.manual_seed(6)
    logits = (torch.randn(num_rows, vocab_size, device=place.device) * spread).to(place.dtype)
    logits[0, 77] += 12.0  # one token with most of the probability, which the histogram may miss
    columns = settings_of(place, num_rows, vocab_size, **settings)
    assert num_searched(monkeypatch, logits, columns) <= num_rows // 500  # so many histograms may be unlucky


@shapes_one_by_default
def test_ties_are_kept_in_the_order_of_their_ids(place: Place, num_rows: int, vocab_size: int) -> None:
    torch.manual_seed(1)
    logits = torch.randint(-2, 2, (num_rows, vocab_size), device=place.device).to(place.dtype)
    assert_kept_alike(logits, torch.arange(num_rows, device=place.device), random_settings(place, num_rows, vocab_size))


@shapes_one_by_default
def test_what_is_minus_infinity_is_never_kept(place: Place, num_rows: int, vocab_size: int) -> None:
    torch.manual_seed(2)
    logits = place.randn(num_rows, vocab_size) * 3
    logits[torch.rand(num_rows, vocab_size, device=place.device) < 0.95] = -INF
    logits[:, 7] = 1.0
    assert_kept_alike(logits, torch.arange(num_rows, device=place.device), random_settings(place, num_rows, vocab_size))


@few_rows
@pytest.mark.parametrize("name, value", [("top_k", 1), ("top_k", 50), ("top_p", 0.3), ("top_p", 0.95), ("min_p", 0.1)])
def test_each_filter_keeps_what_transformers_keeps(
    place: Place, num_rows: int, vocab_size: int, name: str, value: float
) -> None:
    torch.manual_seed(3)
    logits = (torch.randn(num_rows, vocab_size, device=place.device) * 3).bfloat16().to(place.dtype)
    if name == "top_k":  # transformers keeps all equal logits
        logits = torch.stack([torch.randperm(vocab_size, device=place.device) for _ in range(num_rows)]).float() / 99
    warper = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}[name](value)
    theirs = warper(torch.empty(0), logits.double()) > -INF
    slots = torch.arange(num_rows, device=place.device)
    found = kept_by_kernel(logits, slots, settings_of(place, num_rows, vocab_size, **{name: value}))
    if name == "top_p":
        # In bfloat16 a hundred logits may equal the threshold; transformers keeps others of them, in its sort's order.
        # How many are kept is a matter of sums, here in float32: where 1e-6 of the sum is less than the token at the
        # threshold, they can differ by that token.
        ours, reference = (
            logits.masked_fill(~kept, -INF).sort(dim=1, descending=True).values for kept in (found, theirs)
        )
        assert (ours != reference).sum(dim=1).max() <= 1
        assert (ours != reference).any(dim=1).float().mean() < 0.1
    else:
        assert torch.equal(found, theirs)


def sampled_from(logits: Tensor, slots: Tensor, columns: dict[str, Tensor], *, has_filters: bool = True) -> list[int]:
    from headrace.kernels.gpu.sample import sample
    from headrace.kernels.gpu.threshold_types import Filters

    sampled = torch.empty(len(slots), device=logits.device, dtype=torch.int64)
    flags = torch.empty(len(slots), device=logits.device, dtype=torch.uint8)
    filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"]) if has_filters else None
    lens = torch.arange(len(columns["seed"]), device=logits.device) + 5
    sample(logits, slots, lens, columns["temperature"], columns["seed"], sampled, flags, filters)
    assert not flags.any()
    return sampled.tolist()


@cases("num_rows vocab_size", gpu=[(256, 128_256)], interpreted=[(6, 4200)])
def test_rows_without_filters_sample_the_same_beside_rows_that_have_some(
    place: Place, num_rows: int, vocab_size: int
) -> None:
    torch.manual_seed(4)
    logits = place.randn(num_rows, vocab_size) * 2
    columns = random_settings(place, num_rows, vocab_size)
    for name, off in (("min_p", 0.0), ("top_k", 0), ("top_p", 1.0)):
        columns[name][:4] = off
    slots = torch.arange(num_rows, device=place.device)
    has_filters = (columns["min_p"] > 0) | (columns["top_k"] > 0) | (columns["top_p"] < 1)
    together = sampled_from(logits, slots, columns)
    alone = sampled_from(logits, slots, columns, has_filters=False)
    plain = (~has_filters).nonzero().flatten().tolist()
    assert len(plain) < num_rows and [together[i] for i in plain] == [alone[i] for i in plain]
    kept = kept_by_kernel(logits, slots, columns)
    assert kept[slots, torch.tensor(together, device=place.device)].all()
    for i in range(0, num_rows, 5):  # and every row samples the same when it is alone
        assert sampled_from(logits[i : i + 1], slots[i : i + 1], columns) == together[i : i + 1]


@cases("num_samples vocab_size", gpu=[(20_000, 9000)], interpreted=[(12, 500)])
def test_what_is_left_is_sampled_by_its_probabilities(place: Place, num_samples: int, vocab_size: int) -> None:
    """Temperature 0.5 makes squares: 900, 625, 400, 225, 49, 9. min_p leaves four, top_k three, top_p two."""
    logits = torch.full((num_samples, vocab_size), -50.0, device=place.device, dtype=torch.float32)
    second = vocab_size // 2
    logits[:, [3, second, second + 1, vocab_size - 1, 20, 21]] = (
        torch.tensor([0.30, 0.25, 0.20, 0.15, 0.07, 0.03]).log().to(place.device)
    )
    columns = settings_of(
        place, num_samples, vocab_size, temperature=0.5, min_p=0.2, top_k=3, top_p=0.75, seed=torch.arange(num_samples)
    )
    sampled = torch.tensor(sampled_from(logits, torch.arange(num_samples, device=place.device), columns))
    assert set(sampled.tolist()) == {3, second}
    expected = 900 / 1525
    error = (expected * (1 - expected) / num_samples) ** 0.5
    assert abs((sampled == 3).double().mean() - expected) < 4 * error


@cases("", gpu=[()], interpreted=[()])
def test_broken_rows_are_flagged_with_filters_too(place: Place) -> None:
    from headrace.kernels.gpu.sample import sample
    from headrace.kernels.gpu.threshold_types import Filters

    logits = place.randn(4, 5000)
    logits[1, 4500], logits[2] = float("nan"), -INF
    slots = torch.arange(4, device=place.device)
    columns = settings_of(place, 4, 5000, top_k=3, top_p=0.5, min_p=0.1)
    sampled, flags = torch.empty_like(slots), torch.empty(4, device=place.device, dtype=torch.uint8)
    filters = Filters(columns["min_p"], columns["top_k"], columns["top_p"])
    sample(logits, slots, torch.zeros_like(slots), columns["temperature"], columns["seed"], sampled, flags, filters)
    assert (flags != 0).tolist() == [False, True, True, False]
    assert sampled[1:3].tolist() == [0, 0]


@cases("", gpu=[()], interpreted=[()])
def test_the_sampler_samples_as_the_graphs_do(place: Place) -> None:
    from headrace.sampling.sample import sample_on_gpu

    torch.manual_seed(5)
    logits = place.randn(8, 600) * 2
    columns = random_settings(place, 8, 600)
    slots = torch.randperm(8).to(place.device)
    batch = Batch(logits.float(), slots, slots + 5, columns)  # the length that `sampled_from` uses
    tokens, flags = sample_on_gpu(batch, has_filters=True)
    assert not flags.any()
    assert tokens.tolist() == sampled_from(logits, slots, columns)
