"""The named workloads are the same for ever: records of different commits and engines compare them."""

from __future__ import annotations

from hashlib import sha256

import pytest

from headrace.bench.workloads import NAMED, WorkloadSpec, build
from headrace.errors import ConfigError

# SHA-256 of each request's prompt and answer length, as measured for docs/performance.md since the first record.
CONTENTS = {
    "chat": "ca30cc13c8faecf2ff88b03627a6b2c20993455eaeea845e62bc718bfb8b040a",
    "prefill": "0ac513909731f65a15809d23ae2f7a2e9fe9d1f4290fb2b46e810422bc4b708a",
    "decode": "3091e5de3122bbd43eb1e57da30c6070010aca1189e7ca3314097ec7dcc78478",
    "prefix": "6d27dec081a1e77589031daff729a1d41dac727c6daa9702603abddbedb74d92",
    "uniform": "46662be27d551f785e522479acca223e82c29ec0f0563a29416b577bbeacaffc",
    "mixed": "7de72ddc1a09cdb4b4ba666d21ee99ebac595a15479c962691be5bba045105f5",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_named_workloads_never_change(name: str) -> None:
    digest = sha256()
    for request in build(WorkloadSpec(name=name)).requests:
        digest.update(f"{request.prompt} {request.messages} {request.output_len}\n".encode())
    assert digest.hexdigest() == CONTENTS[name]


def test_every_named_workload_has_the_number_of_requests_asked_for() -> None:
    for name in NAMED:
        assert len(build(WorkloadSpec(name=name, num_requests=7)).requests) == 7


def test_equal_specs_have_equal_hashes_and_requests() -> None:
    one, other = (build(WorkloadSpec(name="random", num_requests=5, spread=0.5)) for _ in range(2))
    assert one.spec.hash == other.spec.hash
    assert one.requests == other.requests


def test_every_parameter_changes_the_hash() -> None:
    base = WorkloadSpec(name="random")
    changed = [
        WorkloadSpec(name="random", **{field: value})
        for field, value in {
            "num_requests": 3,
            "seed": 9,
            "input_len": 7,
            "output_len": 7,
            "spread": 0.25,
            "prefix_len": 16,
            "num_prefixes": 4,
            "prefix_share": 0.5,
            "ends": "eos",
            "temperature": 0.0,
            "first_token_id": 5,
            "last_token_id": 50_000,
            "data_digest": "ab",
            "uses_lengths_only": True,
        }.items()
    ]
    assert len({spec.hash for spec in [base, *changed]}) == len(changed) + 1


def test_random_lengths_stay_within_their_spread() -> None:
    requests = build(WorkloadSpec(name="random", num_requests=500, input_len=100, output_len=40, spread=0.5)).requests
    assert {len(request.prompt or []) for request in requests} <= set(range(50, 151))
    assert {request.output_len for request in requests} <= set(range(20, 61))
    assert len({request.output_len for request in requests}) > 20


def test_the_share_of_requests_with_a_prefix_is_as_asked() -> None:
    spec = WorkloadSpec(name="random", num_requests=1000, input_len=64, prefix_len=32, num_prefixes=2, prefix_share=0.3)
    heads = [tuple((request.prompt or [])[:32]) for request in build(spec).requests]
    num_shared = sum(heads.count(head) > 1 for head in heads)
    assert 230 < num_shared < 370


def test_token_ids_fit_a_small_vocabulary() -> None:
    spec = WorkloadSpec(name="chat", num_requests=20).for_vocabulary(512)
    assert max(max(request.prompt or [0]) for request in build(spec).requests) < 512


def test_random_ends_are_stop_tokens_and_not_lengths() -> None:
    workload = build(WorkloadSpec(name="decode", num_requests=4, ends="random"))
    request = workload.requests[0]
    assert len(request.stop_token_ids or []) == 4
    assert len(request.allowed_token_ids or []) == 4 * 1024
    assert set(request.stop_token_ids or []) < set(request.allowed_token_ids or [])
    assert request.output_len == 8 * 1024
    assert "ignore_eos" not in workload.sampling(request)
    assert "min_tokens" not in workload.sampling(request)


def test_exact_ends_ignore_the_end_of_sequence() -> None:
    workload = build(WorkloadSpec(name="decode", num_requests=1))
    params = workload.sampling(workload.requests[0])
    assert params["ignore_eos"] is True
    assert params["min_tokens"] == params["max_tokens"] == 1024


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'decode'"):
        build(WorkloadSpec(name="decodes"))


@pytest.mark.parametrize(
    "given", [{"num_requests": 0}, {"spread": 1.0}, {"prefix_share": 1.5}, {"ends": "sometimes"}, {"prefix_len": -1}]
)
def test_impossible_parameters_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        WorkloadSpec(name="random", **given)  # type: ignore[arg-type]
