"""Levels of load against a server that costs nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench.load import ClosedLoop, OpenLoop
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.online import Measured, loads_of, measure_online, num_requests_of, part_of, series_of, warm_up_of
from headrace.bench.outcomes import Outcome
from headrace.bench.record import read_records, read_rows, write_record
from headrace.bench.slo import Slo
from headrace.bench.workloads import BenchRequest, WorkloadSpec, build
from tests.bench.engines_for_tests import FakeRunning

SMALL = build(WorkloadSpec(name="random", num_requests=40, input_len=6, output_len=5))


def measured(behaviour: Behaviour | None = None, slo: str | None = None, **options: object) -> Measured:
    loads = loads_of(concurrency=[2, 4], num_requests=12)
    with null_server(behaviour) as server:
        engine = FakeRunning(lambda workload: 1.0, address=server.address)
        return measure_online(
            engine,
            SMALL,
            loads,
            slo=Slo.parse(slo) if slo else None,
            **options,  # type: ignore[arg-type]
        )


def test_each_level_has_its_own_requests_and_figures(tmp_path: Path) -> None:
    found = measured(slo="e2e:p50<60s;success>=0.5")
    levels = found.record["levels"]
    assert [level["load"]["concurrency"] for level in levels] == [2, 4]
    for level, rows in zip(levels, found.rows, strict=True):
        assert level["summary"]["num_ok"] == len(rows) == 12
        assert level["summary"]["num_output_tokens"] == 60
        assert level["summary"]["slo"]["verdict"] == "met"
        assert sum(tokens for _, tokens, _ in level["series"]) > 0
        assert level["steady"]["reason"]
    assert found.record["summary"]["load"] in [level["load"] for level in levels]
    path = tmp_path / "r.json"
    write_record(found.record, path, found.rows)
    (record,) = read_records([path])
    assert [len(read_rows(level, tmp_path) or []) for level in record["levels"]] == [12, 12]


def test_refusals_are_counted_apart() -> None:
    found = measured(Behaviour(refused_share=1.0))
    summary = found.record["levels"][0]["summary"]
    assert (summary["num_ok"], summary["num_refused"]) == (0, 12)
    assert summary["requests_per_s"] == 0
    assert any("429 or 503" in warning for warning in found.record["levels"][0]["warnings"])


def test_levels_take_different_requests_until_there_are_no_more() -> None:
    first, is_repeated = part_of(SMALL, ClosedLoop(concurrency=2, num_requests=30), 0)
    second, is_repeated_too = part_of(SMALL, ClosedLoop(concurrency=2, num_requests=30), 30)
    assert (is_repeated, is_repeated_too) == (False, True)
    assert first.requests == SMALL.requests[:30]
    assert list(second.requests) == [*SMALL.requests[30:], *SMALL.requests[:20]]


def test_no_measured_prompt_is_sent_before_its_level() -> None:
    chat = BenchRequest(output_len=40, messages=[{"role": "user", "content": "Hi there"}, {"role": "user"}], due_s=1.0)
    text = BenchRequest(output_len=5, prompt="One two")
    warm_up = warm_up_of(replace(SMALL, requests=[*SMALL.requests, chat, text])).requests
    assert [request.output_len for request in warm_up] == [5] * 14 + [16, 5]
    for request, measured_one in zip(warm_up[:14], SMALL.requests[-14:], strict=True):
        assert isinstance(request.prompt, list) and isinstance(measured_one.prompt, list)
        assert request.prompt[0] != measured_one.prompt[0]
        assert sorted(request.prompt) == sorted(measured_one.prompt)
    assert warm_up[14].messages == [{"role": "user", "content": "i thereH"}, {"role": "user"}]
    assert (warm_up[14].prompt, warm_up[14].due_s, warm_up[15].prompt) == (None, None, "ne twoO")


def test_a_closed_loop_without_a_length_has_four_requests_per_client() -> None:
    assert (
        len(part_of(build(WorkloadSpec(name="random", num_requests=9)), ClosedLoop(concurrency=32), 0)[0].requests)
        == 128
    )


def test_loads_that_are_limited_by_time_have_enough_different_prompts() -> None:
    assert num_requests_of(ClosedLoop(concurrency=2, seconds=5)) == 4096
    assert num_requests_of(ClosedLoop(concurrency=256, seconds=5)) == 8192
    assert num_requests_of(OpenLoop(rate=10, seconds=5)) == 60


def test_prompts_that_repeat_within_a_level_are_warned_about() -> None:
    with null_server() as server:
        engine = FakeRunning(lambda workload: 1.0, address=server.address)
        found = measure_online(engine, SMALL.first(3), [ClosedLoop(concurrency=2, num_requests=9)], warms_up=False)
    assert any("prompts repeat" in warning for warning in found.record["levels"][0]["warnings"])


def test_loads_of_a_curve() -> None:
    found = loads_of(concurrency=[1, 8], rates=[2.5], burstiness=0.5, seconds=3.0)
    assert found[0] == ClosedLoop(concurrency=1, seconds=3.0)
    assert found[2] == OpenLoop(rate=2.5, burstiness=0.5, seconds=3.0)


def test_the_series_adds_up_to_all_tokens() -> None:
    outcomes = [
        Outcome(index=i, due_s=i, sent_s=i, first_s=i + 1, end_s=i + 3, num_output_tokens=4, chunk_s=[i + 1, i + 3])
        for i in range(5)
    ]
    series = series_of(outcomes, 7.0)
    width = series[1][0] - series[0][0]
    assert sum(rate * width for _, rate, _ in series) == pytest.approx(20)
    assert max(running for _, _, running in series) >= 3


def test_a_record_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    from headrace.bench.record import RecordError

    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be written"):
        write_record({"id": "x"}, tmp_path / "file" / "r.json")


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    from headrace.bench.record import RecordError

    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": "something"}))
    with pytest.raises(RecordError, match="not a record"):
        read_records([path])
