"""The workload whose answers end by themselves, and the same with known lengths."""

from __future__ import annotations

from headrace.bench.workloads import WorkloadSpec, build


def test_answers_of_open_end_at_one_of_four_ids_or_after_2048_tokens() -> None:
    workload = build(WorkloadSpec(name="open", num_requests=3))
    assert workload.spec.ends == "random"
    for request in workload.requests:
        params = workload.sampling(request)
        assert params["max_tokens"] == 2048 and "ignore_eos" not in params
        assert len(params["stop_token_ids"]) == 4 and set(params["stop_token_ids"]) < set(params["allowed_token_ids"])
        assert len(params["allowed_token_ids"]) == 4 * 256  # one in 256 tokens ends an answer


def test_known_lengths_are_asked_for_exactly_from_the_same_token_ids() -> None:
    unknown = build(WorkloadSpec(name="open", num_requests=3)).with_seeds()
    known = unknown.with_known_lengths([5, 70, 2048])
    found = [known.sampling(request) for request in known.requests]
    assert [params["max_tokens"] for params in found] == [5, 70, 2048]
    assert [params["seed"] for params in found] == [0, 1, 2]
    for params, request in zip(found, unknown.requests, strict=True):
        assert params["ignore_eos"] and "stop_token_ids" not in params
        assert params["allowed_token_ids"] == request.allowed_token_ids
