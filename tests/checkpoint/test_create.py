"""Checkpoints made of records, sweeps and jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.create import from_job, from_records, without_secrets
from headrace.checkpoint.document import CheckpointError
from tests.bench.records import base_record, level, offline_record, online_record, outcomes
from tests.checkpoint.made import sweep_record

SUMMARY: dict[str, Any] = {
    "model": "m",
    "model_digest": "d1",
    "model_shape": {"num_layers": 2},
    "outcome": "finished",
    "requests": 10,
    "answered": 9,
    "done_before": 0,
    "seconds": 2.0,
    "prompt_tokens": 100,
    "completion_tokens": 60,
    "completion_tokens_per_second": 30.0,
    "settings": {"max_num_seqs": {"value": 4, "source": "given", "reason": ""}},
    "machine": {"cpu": "A CPU", "num_cores": 2, "memory_bytes": 1, "platform": "Linux", "gpus": []},
    "versions": {"headrace": "0.1.0"},
    "commit": None,
}


def test_an_offline_record_becomes_figures_with_intervals_over_rounds() -> None:
    facts = from_records([offline_record((1000.0, 1010.0, 990.0))])
    (load,) = facts["verification"]["loads"]
    assert load["figures"]["output_tokens_per_s"]["mean"] == pytest.approx(1000)
    low, high = load["figures"]["output_tokens_per_s"]["interval"]
    assert low < 1000 < high
    assert [each["output_tokens_per_s"] for each in load["rounds"]] == [1000.0, 1010.0, 990.0]
    assert facts["verification"]["judged"] == ["output_tokens_per_s"]
    assert facts["engine"]["settings"]["max_model_len"]["source"] == "automatic"
    assert facts["workload"]["hash"] == "0123456789abcdef"


def test_what_the_operator_decides_stands_beside_what_was_measured() -> None:
    facts = from_records([offline_record()], text="keep 64 sequences")
    assert facts["decision"]["text"] == "keep 64 sequences"
    assert "no other settings were compared" in facts["decision"]["reason"]
    assert "1,000.0 output tokens/s" in facts["decision"]["reason"]


def test_each_level_of_an_online_record_is_a_load() -> None:
    slo = "e2e:p50<60s"
    record = online_record([level(8, outcomes(), slo=slo), level(16, outcomes(num_refused=50), slo=slo)])
    facts = from_records([record])
    loads = facts["verification"]["loads"]
    assert [each["load"] for each in loads] == ["8 concurrent", "16 concurrent"]
    assert [each["figures"]["success_share"]["mean"] for each in loads] == [1.0, 0.8]
    assert [each["slo"] for each in loads] == ["met", "met"]
    assert {"ttft_p50", "goodput_requests_per_s"} <= set(facts["verification"]["judged"])
    assert facts["slo"] == slo


def test_several_records_of_the_same_measurement_are_rounds() -> None:
    records = [online_record([level(8, outcomes(seed=seed))], id=str(seed)) for seed in range(3)]
    facts = from_records(records)
    assert facts["verification"]["num_rounds"] == 3
    assert facts["verification"]["loads"][0]["figures"]["ttft_p50"]["interval"] is not None


def test_records_of_different_settings_are_no_rounds() -> None:
    other = offline_record()
    other["engine"] = other["engine"] | {"settings": {"max_num_seqs": {"value": 1, "source": "given", "reason": ""}}}
    with pytest.raises(CheckpointError, match="2 different engines, models, settings"):
        from_records([offline_record(), other])


@pytest.mark.parametrize("record", [base_record("batching"), offline_record(()), base_record("offline")])
def test_a_record_without_figures_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"nothing was measured|records of kind"):
        from_records([record])


def test_ids_of_gpus_and_the_load_average_are_left_out() -> None:
    gpu = {"name": "H200", "driver_version": "570", "memory.total": "1 MiB", "uuid": "GPU-1"}
    machine = {"cpu": "c", "num_cores": 1, "memory_bytes": 1, "platform": "p", "gpus": [gpu], "load_average": [1.0]}
    found = from_records([offline_record(machine=machine)])["machine"]
    assert found["gpus"] == [{"name": "H200", "driver_version": "570", "memory.total": "1 MiB"}]
    assert "load_average" not in found


def test_keys_in_a_command_are_hidden() -> None:
    command = (
        "headrace serve --api-key secret secret2 --api_key secret --admin-key=secret --url http://me:secret@host:1/x"
    )
    hidden = without_secrets(command)
    assert "secret" not in hidden
    assert "@host:1/x" in hidden


def test_a_sweep_decides_for_its_best_config_with_the_interval_to_the_others(tmp_path: Path) -> None:
    configs = [{"name": "four", "max_num_seqs": 4}, {"name": "eight", "max_num_seqs": 8}, {"name": "own"}]
    record = sweep_record(tmp_path, configs, {4: (1.0, 1.01, 0.99), 8: (0.5, 0.51, 0.49), None: (2.0, 2.01, 1.99)})
    facts = from_records([record])
    decision = facts["decision"]
    assert decision["chosen"] == "eight"
    assert [(each["role"], each["name"], each["is_shown"]) for each in decision["alternatives"]] == [
        ("runner-up", "four", True),
        ("default", "own", True),
    ]
    ratios = [each["ratio"] for each in decision["alternatives"]]
    assert ratios == pytest.approx([2.0, 4.0], rel=0.02)
    assert all(each["interval"][0] < each["ratio"] < each["interval"][1] for each in decision["alternatives"])
    assert "2.00x [" in decision["text"]
    assert facts["engine"]["settings"]["max_num_seqs"] == {"value": 8, "source": "given", "reason": ""}
    assert facts["load"] == {"kind": "offline"}
    assert facts["verification"]["num_rounds"] == 3


def test_a_sweep_without_a_shown_difference_says_so(tmp_path: Path) -> None:
    configs = [{"name": "four", "max_num_seqs": 4}, {"name": "own"}]
    record = sweep_record(tmp_path, configs, {4: (1.0, 1.2, 0.8), None: (1.01, 0.81, 1.21)})
    decision = from_records([record])["decision"]
    assert "no difference shown" in decision["text"]
    assert [each["role"] for each in decision["alternatives"]] == ["default"]


def test_a_sweep_in_which_everything_failed_decides_nothing() -> None:
    record = base_record("sweep", rank_by="output_tokens_per_s", configs=[])
    with pytest.raises(CheckpointError, match="nothing to decide"):
        from_records([record])


def test_a_job_becomes_one_round_that_can_be_run_again() -> None:
    facts = from_job(SUMMARY, command="headrace run a -o b", workload={"name": "job"}, arguments=["{input}"])
    (load,) = facts["verification"]["loads"]
    assert load["figures"]["output_tokens_per_s"]["mean"] == 30.0
    assert load["figures"]["success_share"]["mean"] == 0.9
    assert facts["model"] == {"name": "m", "digest": "d1", "num_layers": 2}
    assert facts["rerun"] == {"arguments": ["{input}"]}


def test_a_job_that_was_continued_cannot_be_verified() -> None:
    facts = from_job(SUMMARY | {"done_before": 5}, command="", workload={}, arguments=["{input}"])
    assert facts["rerun"] is None
    assert "earlier runs had finished 5 lines" in facts["warnings"][0]
