"""Checkpoints of tunes: made of a record, verified, and found before others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench.load.null_server import Behaviour, null_server
from headrace.bench.record import write_record
from headrace.checkpoint import find_checkpoint
from headrace.checkpoint.create import from_records
from headrace.checkpoint.document import CheckpointError, read_checkpoint, write_checkpoint
from headrace.checkpoint.rerun import Options, settings_given
from headrace.checkpoint.verify import verify
from headrace.checkpoint.views import show_report
from headrace.cli.main import main
from tests.bench.engines_for_tests import FakeEngine
from tests.bench.records import offline_record
from tests.checkpoint.made import WORKLOAD, sweep_record
from tests.tune.report_builders import (
    BEST,
    batch_record,
    interrupted_record,
    no_difference_record,
    nothing_measured_record,
    serve_record,
    single_record,
)

MACHINE: dict[str, Any] = {"cpu": "A CPU", "num_cores": 8, "gpus": []}
DIGEST = "d1" * 8


def test_the_choice_is_recorded_against_the_default_and_the_other_finalists() -> None:
    record = batch_record()
    facts = from_records([record])
    decision = facts["decision"]
    assert facts["kind"] == "tune"
    assert decision["text"] == record["decision"]["text"]
    assert decision["chosen"] == record["decision"]["chosen"]
    default, finalist = decision["alternatives"]
    assert (default["name"], default["role"], default["is_shown"]) == ("default", "default", True)
    assert default["interval"] == [record["decision"]["low"], record["decision"]["high"]]
    assert finalist["role"] == "finalist" and finalist["interval"][0] < finalist["ratio"] < finalist["interval"][1]
    assert decision["failed"] == ["max_num_seqs=256", "block_size=8"]
    assert decision["noise"] == record["noise"]
    assert "noise floor" in decision["reason"]


def test_its_rounds_are_those_of_the_confirmation() -> None:
    record = batch_record()
    (load,) = from_records([record])["verification"]["loads"]
    chosen = next(row for row in record["configs"] if row["settings"] == BEST)
    values = [trial["value"] for trial in chosen["trials"] if trial["phase"] == "confirm"]
    assert [each["output_tokens_per_s"] for each in load["rounds"]] == values
    assert load["figures"]["output_tokens_per_s"]["interval"] is not None


def test_settings_that_were_fixed_or_chosen_are_given_again(tmp_path: Path) -> None:
    record = batch_record(common_settings={"model": "tiny", "num_threads": 2, "seed": None})
    made = write_checkpoint(from_records([record]), tmp_path / "a")
    assert settings_given(made) == {**BEST, "num_threads": 2}
    assert made.at("engine", "launch_command").endswith("--max-num-batched-tokens 2048")


def test_a_batch_and_a_server_are_different_kinds_of_workload(tmp_path: Path) -> None:
    assert write_checkpoint(from_records([batch_record()]), tmp_path / "a").workload_kind == "batch"
    serve = write_checkpoint(from_records([serve_record()]), tmp_path / "b")
    assert serve.workload_kind == "serve"
    assert serve.at("load", "levels") == [{"kind": "closed_loop", "concurrency": 16, "num_requests": 288}]
    assert {"goodput_requests_per_s", "ttft_p50"} <= set(serve.at("verification", "judged"))
    (load,) = serve.at("verification", "loads")
    assert (len(load["rounds"]), load["slo"]) == (6, "met")
    assert serve.at("slo") == "ttft:p95<300ms;tpot:p95<40ms"


def test_a_default_that_was_kept_has_no_given_settings(tmp_path: Path) -> None:
    made = write_checkpoint(from_records([no_difference_record()]), tmp_path / "a")
    assert settings_given(made) == {}
    (finalist,) = made.at("decision", "alternatives")
    assert (finalist["role"], finalist["is_shown"]) == ("finalist", False)
    assert made.at("decision", "verdict") == "no difference shown"
    assert write_checkpoint(from_records([single_record()]), tmp_path / "b").at("decision", "alternatives") == []


def test_a_choice_that_was_not_confirmed_says_so_and_has_the_longest_rounds() -> None:
    facts = from_records([interrupted_record()])
    assert any("not confirmed" in warning for warning in facts["warnings"])
    assert any("ended early" in warning for warning in facts["warnings"])
    assert facts["verification"]["num_rounds"] == 1
    assert facts["load"] == {"kind": "offline", "num_requests": 288}


def test_a_tune_that_measured_nothing_decides_nothing() -> None:
    with pytest.raises(CheckpointError, match="decided nothing: the default does not start"):
        from_records([nothing_measured_record()])
    with pytest.raises(CheckpointError, match="one tune, and there are 2"):
        from_records([batch_record(), batch_record()])


def measured_by(record: dict[str, Any], tokens_per_s: float, num_requests: int) -> dict[str, Any]:
    """The record as if this workload had been measured at this speed."""
    for row in record["configs"]:
        for number, trial in enumerate(row["trials"]):
            value = tokens_per_s * (1 + 0.002 * (number % 3))
            trial |= {"value": value, "figures": {"output_tokens_per_s": value}, "num_requests": num_requests}
    return record | {"workload": WORKLOAD.facts}


@pytest.mark.parametrize(("seconds", "outcome"), [(1.0, "holds"), (2.0, "does not hold")])
def test_the_choice_is_measured_again_with_as_many_requests(tmp_path: Path, seconds: float, outcome: str) -> None:
    """Two requests of four tokens in a second: 8 output tokens/s."""
    engine = FakeEngine(lambda settings, workload: seconds)
    made = write_checkpoint(from_records([measured_by(batch_record(), 8.0, 2)]), tmp_path / "a")
    assert made.at("load") == {"kind": "offline", "num_requests": 2}
    result = verify(made, engine=engine)
    assert result.outcome == outcome
    (running,) = engine.started
    assert [len(run.requests) for run in running.runs[1:]] == [2] * 6
    assert {name: each.value for name, each in running.settings_in_force().items()} == BEST
    assert not [each for each in result.differences if each.group in ("workload", "load")]


def test_a_server_is_measured_again_at_its_load(tmp_path: Path) -> None:
    with null_server() as server:
        record = serve_record(
            workload=WORKLOAD.facts,
            slo="ttft:p50<60s",
            engine={"name": "openai", "address": server.address, "versions": {}},
            model={"name": "null", "digest": None},
            common_settings={},
            settings_in_force={},
        )
        record["decision"] |= {"chosen": "default"}
        for trial in record["configs"][0]["trials"]:
            trial["load"] = {"kind": "closed_loop", "concurrency": 2, "num_requests": 4}
            trial["figures"] = {"goodput_requests_per_s": 0.01, "success_share": 1.0}
        made = write_checkpoint(from_records([record]), tmp_path / "a")
        result = verify(made, Options(num_rounds=2))
    assert result.outcome == "holds", result.reasons
    assert {(each.load, each.figure.name) for each in result.judgements} == {
        ("2 concurrent", "goodput_requests_per_s"),
        ("2 concurrent", "success_share"),
    }
    with null_server(Behaviour(refused_share=0.5)) as server:
        result = verify(made, Options(url=server.address, num_rounds=1))
    assert result.outcome == "does not hold"


def test_the_command_makes_one_and_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, path = tmp_path / "a.tune.json", tmp_path / "a.checkpoint"
    write_record(batch_record(), record)
    assert main(["checkpoint", "create", str(record), "-o", str(path)]) == 0
    assert "tuned against default: 1.3" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "finalist" in shown and "max_num_batched_tokens" in shown
    assert show_report(read_checkpoint(path), "a").headline.startswith("tuned against default")


def test_a_tune_is_preferred_to_a_sweep_and_that_to_a_benchmark(tmp_path: Path) -> None:
    def found() -> str:
        found = find_checkpoint(tmp_path, model_digest=DIGEST, machine=MACHINE, workload_kind="batch")
        assert found is not None
        return found.path.stem

    def save(name: str, facts: dict[str, Any], created_at: str) -> None:
        same = {key: offline_record()[key] for key in ("model", "machine")}
        engine = facts["engine"] | {"name": "headrace"}
        write_checkpoint(facts | same | {"engine": engine, "created_at": created_at}, tmp_path / f"{name}.checkpoint")

    save("bench", from_records([offline_record()]), "2026-05-01")
    sweep = sweep_record(tmp_path, [{"max_num_seqs": 4}, {}], {4: (1.0, 1.0, 1.0), None: (2.0, 2.0, 2.0)})
    assert found() == "bench"
    save("unconfirmed", from_records([interrupted_record()]), "2026-04-01")
    assert found() == "unconfirmed"
    save("sweep", from_records([sweep]), "2026-03-01")
    assert found() == "sweep"
    save("tune", from_records([batch_record()]), "2026-02-01")
    assert found() == "tune"
    save("newer", from_records([batch_record()]), "2026-02-02")
    assert found() == "newer"
