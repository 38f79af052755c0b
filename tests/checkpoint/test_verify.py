"""Verification with fake engines: what holds, what does not, and what is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines import EngineFailure
from headrace.bench.load.null_server import Behaviour, null_server
from headrace.checkpoint.create import from_records
from headrace.checkpoint.document import Checkpoint, CheckpointError, read_checkpoint, write_checkpoint
from headrace.checkpoint.facts import sentence
from headrace.checkpoint.rerun import Options, engine_of, present_model, settings_given, workload_of
from headrace.checkpoint.verify import verify
from tests.bench.engines_for_tests import FakeEngine
from tests.checkpoint.made import STEADY, WORKLOAD, checkpoint, engine, offline_facts, sweep_record


def test_the_same_speed_holds(tmp_path: Path) -> None:
    lines: list[str] = []
    result = verify(checkpoint(tmp_path / "a", max_num_seqs=4), engine=engine(), say=lines.append)
    assert result.outcome == "holds"
    assert result.reasons == []
    assert result.differences == []
    assert "3 rounds" in lines[0]


def test_a_slower_engine_does_not_hold_and_the_loss_is_named(tmp_path: Path) -> None:
    result = verify(checkpoint(tmp_path / "a"), engine=engine([2.0, 2.0, 2.0]))
    assert result.outcome == "does not hold"
    assert "output tokens/s is 50.0 % worse, and the tolerance is 5.0 %" in result.reasons[0]


def test_a_faster_engine_holds(tmp_path: Path) -> None:
    result = verify(checkpoint(tmp_path / "a"), engine=engine([0.5, 0.5, 0.5]))
    assert result.outcome == "holds"
    assert result.judgements[0].verdict == "better"


def test_rounds_can_be_fewer(tmp_path: Path) -> None:
    result = verify(checkpoint(tmp_path / "a"), Options(num_rounds=1), engine=engine([1.0]))
    assert result.outcome == "holds"
    assert result.facts["verification"]["num_rounds"] == 1


def test_recorded_noise_that_hides_everything_is_not_verified(tmp_path: Path) -> None:
    result = verify(checkpoint(tmp_path / "a", [1.0, 3.0]), engine=engine([2.0, 2.0]))
    assert result.outcome == "not verified"
    assert "more rounds" in result.reasons[0]


def test_the_settings_that_were_given_are_given_again(tmp_path: Path) -> None:
    facts = offline_facts(max_num_seqs=4, enable_prefix_caching=False)
    facts["engine"]["settings"] |= {
        "block_size": {"value": 16, "source": "default", "reason": ""},
        "port": {"value": 8000, "source": "given", "reason": ""},
        "num_blocks": {"value": 9, "source": "given", "reason": "as set"},
    }
    fake = engine()
    verify(write_checkpoint(facts, tmp_path / "a"), engine=fake)
    (running,) = fake.started
    assert {name: each.value for name, each in running.settings_in_force().items()} == {
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
    }


def test_another_machine_driver_package_and_model_are_named(tmp_path: Path) -> None:
    facts = offline_facts(max_num_seqs=4)
    gpu = {"name": "H200", "driver_version": "570.1", "memory.total": "1 MiB"}
    facts["machine"] |= {"cpu": "Another CPU", "gpus": [gpu]}
    facts["versions"] |= {"torch": "0.0.1"}
    facts["model"] |= {"digest": "d2"}
    facts["engine"]["settings"] |= {"block_size": {"value": 16, "source": "default", "reason": ""}}
    result = verify(write_checkpoint(facts, tmp_path / "a"), engine=engine())
    assert result.outcome == "holds"
    named = {(each.group, each.name) for each in result.differences}
    assert named >= {
        ("machine", "cpu"),
        ("machine", "gpus"),
        ("driver", "driver"),
        ("package", "torch"),
        ("model", "digest"),
        ("setting", "block_size"),
    }
    assert any(sentence(each).startswith("package, torch: recorded 0.0.1, now ") for each in result.differences)


def test_an_edited_file_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a"
    checkpoint(path)
    path.write_text(path.read_text().replace('"warnings"', '"note": 1, "warnings"'))
    result = verify(read_checkpoint(path), engine=engine())
    assert result.outcome == "holds"
    assert "was edited" in result.warnings[0]


def test_another_workload_is_refused(tmp_path: Path) -> None:
    facts = offline_facts()
    facts["workload"] |= {"output_len": 5}
    with pytest.raises(CheckpointError, match="the workload is not the recorded one"):
        verify(write_checkpoint(facts, tmp_path / "a"), engine=engine())


def test_an_engine_that_does_not_start_is_an_error_and_one_that_dies_does_not_hold(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "a")
    with pytest.raises(EngineFailure, match="out of memory"):
        verify(made, engine=FakeEngine(lambda settings, workload: 1.0, refuses=lambda settings: True))
    runs = iter([1.0, 1.0])

    def dies(settings: Any, workload: Any) -> float:
        for seconds in runs:
            return seconds
        raise EngineFailure("oom", "out of memory")

    result = verify(made, engine=FakeEngine(dies))
    assert result.outcome == "does not hold"
    assert result.reasons == ["the engine failed under the recorded load: out of memory"]


def test_the_best_config_of_a_sweep_is_verified(tmp_path: Path) -> None:
    configs = [{"name": "four", "max_num_seqs": 4}, {"name": "eight", "max_num_seqs": 8}]
    record = sweep_record(tmp_path, configs, {4: STEADY, 8: (0.5, 0.51, 0.49)})
    made = write_checkpoint(from_records([record]), tmp_path / "a")
    assert settings_given(made) == {"max_num_seqs": 8}
    assert verify(made, engine=engine([0.5, 0.5, 0.5])).outcome == "holds"
    assert verify(made, engine=engine(STEADY)).outcome == "does not hold"


def recorded(tmp_path: Path, **changes: Any) -> Checkpoint:
    facts = offline_facts()
    for name, value in changes.items():
        facts[name] = value if name == "workload" else facts[name] | value
    return write_checkpoint(facts, tmp_path / "a")


def test_a_dtype_is_given_as_a_user_writes_it(tmp_path: Path) -> None:
    made = recorded(
        tmp_path, engine={"settings": {"dtype": {"value": "torch.float32", "source": "given", "reason": ""}}}
    )
    assert settings_given(made) == {"dtype": "float32"}


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"unknown engine 'fake' \(known: headrace, vllm, openai\)"):
        engine_of(recorded(tmp_path), Options())


def test_a_missing_model_is_an_error_that_says_how_to_get_it(tmp_path: Path) -> None:
    missing = recorded(tmp_path, model={"name": "/no/such/model", "digest": "d1"}, engine={"name": "headrace"})
    with pytest.raises(CheckpointError, match=r"copy it there, or give its place with --model \(digest .*: d1\)"):
        engine_of(missing, Options())
    hub = recorded(tmp_path, model={"name": "nobody/nothing"})
    with pytest.raises(CheckpointError, match="headrace models fetch nobody/nothing"):
        present_model(hub, Options())
    assert present_model(missing, Options(model=str(tmp_path))) == str(tmp_path)


def test_a_file_of_the_user_is_found_by_the_command_or_given(tmp_path: Path) -> None:
    from headrace.bench.workloads import WorkloadSpec, read_workload

    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b", "max_tokens": 3}\n')
    workload, _ = read_workload(str(path), WorkloadSpec(name="data"))
    made = recorded(tmp_path, workload=workload.facts, engine={"name": "openai"})
    with pytest.raises(CheckpointError, match="give its place with --data"):
        workload_of(made, Options())
    assert workload_of(made, Options(data=str(path))).requests == workload.requests
    command = Checkpoint({**made.facts, "command": f"headrace bench --data {path}"})
    assert workload_of(command, Options()).spec.hash == workload.spec.hash
    path.write_text('{"prompt": "a", "max_tokens": 4}\n{"prompt": "b", "max_tokens": 3}\n')
    with pytest.raises(CheckpointError, match="the file has other content"):
        workload_of(command, Options())


def test_a_server_at_an_address_is_measured_again_with_the_same_load(tmp_path: Path) -> None:
    from headrace.bench.engines.openai_engine import OpenAIEngine
    from headrace.bench.load import ClosedLoop
    from headrace.bench.online import measure_online

    with null_server() as server:
        with OpenAIEngine(server.address).start({}, serves=True) as running:
            load = ClosedLoop(concurrency=2, num_requests=4)
            record = measure_online(running, WORKLOAD, [load], warms_up=False).record
        facts = from_records([record])
        facts["verification"]["judged"] = ["success_share"]  # the null server's speed is not the subject
        made = write_checkpoint(facts, tmp_path / "a")
        assert made.at("load", "warms_up") is False
        assert verify(made).outcome == "holds"
    with null_server(Behaviour(refused_share=0.5)) as server:
        result = verify(made, Options(url=server.address))
    assert result.outcome == "does not hold"
    assert "2 concurrent: share answered is 50.0 % worse" in result.reasons[0]


def test_a_missed_slo_does_not_hold(tmp_path: Path) -> None:
    from headrace.checkpoint.verify import compared

    made = checkpoint(tmp_path / "a")
    (load,) = made.facts["verification"]["loads"]

    def with_slo(verdict: str) -> dict[str, Any]:
        return {**made.facts, "verification": {**made.facts["verification"], "loads": [load | {"slo": verdict}]}}

    before = replace(made, facts=with_slo("met"))
    assert compared(before, with_slo("met")).outcome == "holds"
    assert compared(before, with_slo("unresolved")).outcome == "holds"
    assert compared(before, with_slo("missed")).outcome == "does not hold"
