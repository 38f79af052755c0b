"""Records of benchmarks and jobs as evidence."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.bench.engines import OfflineRun
from headrace.bench.engines.headrace_worker import counters_of_run
from headrace.bench.offline import measure_offline
from headrace.bench.record import RecordError
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.doctor.diagnosis import diagnose
from headrace.doctor.readers.records import evidence_of_record, read_record
from headrace.engine.core import EngineStats
from headrace.jobs.status.report import JobReport, Tally
from headrace.jobs.store.status_file import JobStatus
from headrace.sched import SchedulerStats
from tests.bench.engines_for_tests import FakeRunning
from tests.bench.records import base_record, level, offline_record, online_record, outcomes
from tests.doctor.builders import COUNTERS, job_summary

IDLE = EngineStats(SchedulerStats(), host_seconds=0.0, wait_seconds=0.0)
BUSY = EngineStats(
    SchedulerStats(
        num_steps=100,
        num_preemptions=7,
        num_recomputed_tokens=90,
        num_prompt_tokens=3000,
        num_generated_tokens=6000,
        num_prefix_queried_tokens=3000,
        num_prefix_hit_tokens=1500,
    ),
    host_seconds=0.5,
    wait_seconds=1.5,
)


def test_an_offline_record_is_read_from_its_median_round() -> None:
    record = offline_record((1000.0, 4000.0, 100.0))
    record["rounds"][0]["counters"] = COUNTERS
    record["rounds"][0] |= {"num_prompt_tokens": 30_000, "num_output_tokens": 40_000}
    seen = evidence_of_record(record, origin="r.json")
    assert (seen.source, seen.seconds, seen.num_steps) == ("offline", 40.0, 500)
    assert (seen.prompt_len, seen.output_len) == (150, 200)
    assert seen.mean_batch == 80 and seen.host_share == 0.75
    assert seen.tokens_per_step == pytest.approx(120)
    assert "max_num_seqs" in seen.given and "block_size" not in seen.given
    rules = [finding.rule for finding in diagnose(seen).problems]
    assert rules == ["cache-preempting", "host"]


def test_a_record_with_a_gpu_and_a_shape_is_judged_by_its_roofline() -> None:
    sizes = {"num_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336, "num_heads": 32, "num_kv_heads": 8}
    model = {"name": "8b", **sizes, "head_dim": 128, "vocab_size": 128_256, "max_model_len": 8192}
    record = offline_record(model=model, machine={"gpus": [{"name": "NVIDIA H200"}]})
    for each in record["rounds"]:
        each["counters"] = COUNTERS | {"num_preemptions": 0, "host_ms_per_step": 0.5}
        each |= {"num_prompt_tokens": 30_000, "num_output_tokens": 40_000}
    seen = evidence_of_record(record, origin="r.json")
    assert seen.gpu is not None and seen.gpu.name == "H200"
    assert seen.model is not None and seen.model.num_params == pytest.approx(8.03e9, rel=0.01)
    diagnosis = diagnose(seen)
    assert diagnosis.limit is not None and diagnosis.limit.title == "decode is bound by memory bandwidth"


def test_an_online_record_is_read_at_its_highest_load() -> None:
    busy = {"cpu_shares": [0.2, 0.95], "loop_lag_ms": {"p50": 1.0, "p99": 30.0, "max": 90.0}, "send_late_ms": None}
    levels = [level(64, outcomes(num_refused=20), client=busy, counters={"num_preemptions": 1}), level(4, outcomes())]
    seen = evidence_of_record(online_record(levels), origin="r.json")
    assert (seen.num_answered, seen.num_refused, seen.num_failed) == (200, 20, 0)
    assert seen.client is not None and seen.client.cpu_share == 0.95
    assert "64 concurrent" in seen.remarks[0]
    rules = [finding.rule for finding in diagnose(seen).problems]
    assert rules == ["client", "refusals"]


def test_seconds_of_host_and_wait_in_an_online_record_are_used() -> None:
    """A server exports seconds; an engine in bench's own process, milliseconds per step."""
    served = level(4, outcomes(), counters={"num_steps": 100, "host_seconds": 3.0, "wait_seconds": 1.0})
    assert evidence_of_record(online_record([served]), origin="r.json").host_share == 0.75


def test_a_sweep_is_read_at_its_best_config_and_names_failures() -> None:
    configs = [
        {"name": "a", "rank": 1, "status": "ok", "settings": {"gpu_memory_utilization": 0.97}},
        {"name": "b", "status": "failed", "failure": {"kind": "oom", "message": "out of memory"}, "settings": {}},
    ]
    record = base_record("sweep", configs=configs, machine={"gpus": [{"name": "NVIDIA H200"}]})
    diagnosis = diagnose(evidence_of_record(record, origin="s.json"))
    assert [finding.rule for finding in diagnosis.problems] == ["memory-high"]
    assert any("config 'b' failed: oom" in remark for remark in diagnosis.evidence.remarks)


def test_a_sweep_with_counters_is_judged_like_a_measurement() -> None:
    counters = {"num_steps": 1000, "num_preemptions": 400, "num_prompt_tokens": 64_000, "num_generated_tokens": 64_000}
    counters |= {"num_recomputed_tokens": 60_000, "host_ms_per_step": 0.2, "wait_ms_per_step": 9.8}
    rounds = [{"seconds": seconds, "output_tokens_per_s": 64_000 / seconds} for seconds in (12.0, 9.0, 10.0)]
    best = {"name": "a", "rank": 1, "status": "ok", "settings": {"max_num_seqs": 256}, "rounds": rounds}
    best |= {"counters": [{}, {}, counters], "in_force": {"device": {"value": "cpu", "source": "automatic"}}}
    record = base_record("sweep", configs=[best], machine={"gpus": [{"name": "NVIDIA H200"}]})
    evidence = evidence_of_record(record, origin="s.json")
    assert (evidence.seconds, evidence.num_steps, evidence.num_preemptions) == (10.0, 1000.0, 400.0)
    assert evidence.host_seconds == pytest.approx(0.2) and evidence.wait_seconds == pytest.approx(9.8)
    assert (evidence.is_on_cpu, evidence.settings["max_num_seqs"]) == (True, 256)
    assert not any("no counters" in remark for remark in evidence.remarks)
    assert "cache-preempting" in [finding.rule for finding in diagnose(evidence).problems]


def test_a_sweep_without_counters_says_so() -> None:
    best = {"name": "a", "rank": 1, "status": "ok", "settings": {}, "rounds": [{"output_tokens_per_s": 10.0}]}
    evidence = evidence_of_record(base_record("sweep", configs=[best]), origin="s.json")
    assert any("no counters" in remark for remark in evidence.remarks)


def test_seconds_of_the_engine_loop_are_taken_as_they_are() -> None:
    counters = {"num_steps": 10.0, "host_seconds": 1.5, "wait_seconds": 8.5}
    evidence = evidence_of_record(online_record([level(4, outcomes(), counters=counters)]), origin="s.json")
    assert (evidence.host_seconds, evidence.wait_seconds) == (1.5, 8.5)


def test_a_healthy_job_has_nothing_wrong() -> None:
    diagnosis = diagnose(evidence_of_record(job_summary(), origin="s.json"))
    assert diagnosis.outcome == "nothing wrong"
    assert diagnosis.limit is not None and diagnosis.limit.limit == "decode"
    assert diagnosis.evidence.is_on_cpu


@pytest.mark.parametrize(("limit", "rule"), [("disk", "disk"), ("reading", "tokenizer"), ("host", "job-host")])
def test_a_job_is_judged_by_the_time_under_its_bottlenecks(limit: str, rule: str) -> None:
    summary = job_summary(limited_by_seconds={limit: 60.0, "decode": 40.0})
    diagnosis = diagnose(evidence_of_record(summary, origin="s.json"))
    assert diagnosis.limit is not None and diagnosis.limit.rule == rule
    assert diagnosis.limit.gain == pytest.approx(1.5)


@pytest.mark.parametrize("limit", ["reading", "host"])
def test_the_start_of_a_job_that_is_mostly_tail_is_no_problem(limit: str) -> None:
    summary = job_summary(limited_by_seconds={limit: 40.0, "tail": 60.0})
    diagnosis = diagnose(evidence_of_record(summary, origin="s.json"))
    assert diagnosis.outcome == "nothing wrong"
    assert diagnosis.limit is not None and diagnosis.limit.rule == "job-tail"


def test_an_older_summary_without_these_seconds_says_so() -> None:
    summary = job_summary()
    del summary["limited_by_seconds"], summary["wait_seconds_per_step"]
    diagnosis = diagnose(evidence_of_record(summary, origin="s.json"))
    assert {"disk", "tokenizer", "host"} <= {each.rule for each in diagnosis.not_judged}


def test_the_directory_of_a_job_is_read_by_its_status(tmp_path: Path) -> None:
    status = {"limited_by": "disk", "limited_because": "80% of the time goes into writing", "lines_done": 10}
    status |= {"model": "smollm2", "prompt_tokens": 5000, "completion_tokens": 900, "seconds": 60.0}
    (tmp_path / "status.json").write_text(json.dumps(status))
    diagnosis = diagnose(read_record(tmp_path))
    assert diagnosis.limit is not None and diagnosis.limit.limit == "disk"
    assert "80% of the time" in diagnosis.evidence.remarks[0]


def test_of_several_records_the_last_is_read(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(offline_record((rate,))) + "\n" for rate in (1000.0, 2000.0)))
    seen = read_record(path)
    assert seen.seconds == 20.0 and "2 records" in seen.remarks[-1]


@pytest.mark.parametrize("text", ["", "[]", "{}", "not JSON", '{"schema": "headrace.bench/1", "kind": "batching"}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordError):
        read_record(path)


def test_a_file_that_is_not_there_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(RecordError) as raised:
        read_record(tmp_path / "none.json")
    assert str(raised.value) == f"{tmp_path / 'none.json'} cannot be read: No such file or directory"


def test_a_record_without_figures_gives_not_enough_evidence() -> None:
    record = offline_record((), failure={"kind": "oom", "message": "out of memory"})
    diagnosis = diagnose(evidence_of_record(record, origin="r.json"))
    assert diagnosis.outcome == "not enough evidence"
    assert "the run failed: oom" in diagnosis.evidence.remarks[0]


# The names that doctor reads are those that bench and jobs write.


def test_a_record_is_read_as_bench_writes_it() -> None:
    class Counting(FakeRunning):
        def run_offline(self, workload: Workload) -> OfflineRun:
            run = super().run_offline(workload)
            return OfflineRun(run.seconds, run.output_lens, run.prompt_lens, counters=counters_of_run(IDLE, BUSY))

    workload = build(WorkloadSpec(name="random", num_requests=300, input_len=10, output_len=20))
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    record = measure_offline(Counting(lambda workload: 2.0, settings=settings), workload)
    seen = evidence_of_record(json.loads(json.dumps(record)), origin="r.json")
    assert (seen.seconds, seen.num_requests, seen.prompt_len, seen.output_len) == (2.0, 300, 10, 20)
    assert (seen.num_steps, seen.num_preemptions, seen.recomputed_tokens) == (100, 7, 90)
    assert seen.host_share == pytest.approx(0.25) and seen.prefix_hit_share == 0.5
    assert seen.number("max_num_seqs") == 64


def test_the_summary_is_that_of_a_job() -> None:
    report = JobReport(
        output="o",
        model_name="smollm2",
        was_stopped=False,
        num_in_flight=0,
        tally=Tally(num_answered=20, num_prompt_tokens=1000, num_generated_tokens=500),
        seconds=10.0,
        start_seconds=1.0,
        stats=BUSY,
        choices=(),
        seconds_by_limit={"disk": 4.0, "decode": 6.0},
    )
    written = json.loads(json.dumps(report.as_json()))
    assert set(job_summary()) <= set(written)
    seen = evidence_of_record(written, origin="s.json")
    assert (seen.num_preemptions, seen.recomputed_tokens, seen.output_len) == (7, 90, 25)
    assert seen.host_share == pytest.approx(0.25)
    assert seen.limited_by_seconds == {"disk": 4.0, "decode": 6.0}


def test_the_status_is_that_of_a_job() -> None:
    status = JobStatus(
        state="running",
        output="o",
        model="smollm2",
        pid=1,
        started_at=0.0,
        updated_at=1.0,
        seconds=60.0,
        lines_total=None,
        lines_done=10,
        lines_answered=10,
        lines_failed=0,
        lines_in_flight=5,
        lines_ready=0,
        kv_use=0.4,
        sequences_running=5,
        limited_by="reading",
        limited_because="the engine waits",
    )
    seen = evidence_of_record(json.loads(msgspec.json.encode(status)), origin="status.json")
    assert (seen.source, seen.num_running, seen.kv_use, seen.num_requests) == ("job", 5, 0.4, 10)
    assert seen.limited_by_seconds == {"reading": 1.0} and seen.model is not None
