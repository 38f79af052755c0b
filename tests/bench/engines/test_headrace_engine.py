"""Headrace behind the interface of engines: in a worker, and as a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from headrace.bench.engines import EngineFailure, RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine, as_flags
from headrace.bench.engines.workers import offline_requests
from headrace.bench.workloads import BenchRequest, Workload, WorkloadSpec, build
from headrace.config import EngineConfig

SPEC = WorkloadSpec(name="random", num_requests=6, input_len=40, output_len=9, first_token_id=5, last_token_id=90)
SETTINGS = {
    "max_num_seqs": 4,
    "enable_prefix_caching": True,  # as the default: still given
    "num_gpu_blocks_override": 64,
    "num_threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def worker(tiny_directory: Path) -> Iterator[RunningEngine]:
    with HeadraceEngine(str(tiny_directory)).start(SETTINGS, serves=False) as running:
        yield running


@pytest.fixture(scope="module")
def server(tiny_directory: Path) -> Iterator[RunningEngine]:
    settings = {**SETTINGS, "max_num_queued_reqs": 77, "enable_chunked_prefill": False, "served_model_name": "tiny"}
    with HeadraceEngine(str(tiny_directory)).start(settings, serves=True) as running:
        yield running


@pytest.mark.processes
def test_a_worker_runs_a_workload(worker: RunningEngine) -> None:
    run = worker.run_offline(build(SPEC))
    assert run.output_lens == [9] * 6
    assert run.prompt_lens == [40] * 6
    assert run.seconds > 0
    assert run.counters["num_generated_tokens"] == 54
    assert run.counters["num_steps"] > 0 and run.counters["host_ms_per_step"] > 0
    assert run.counters["num_preemptions"] == 0


@pytest.mark.processes
def test_counters_of_a_worker_count_on_and_prefixes_can_be_forgotten(worker: RunningEngine) -> None:
    workload = build(SPEC)
    worker.run_offline(workload)
    before = worker.counters()
    assert worker.run_offline(workload).counters["prefix_hit_tokens"] > 0
    assert worker.counters()["num_generated_tokens"] == before["num_generated_tokens"] + 54
    assert worker.reset_prefix_cache()
    assert worker.run_offline(workload).counters["prefix_hit_tokens"] == 0


@pytest.mark.processes
def test_every_setting_in_force_has_a_source(worker: RunningEngine, tiny_directory: Path) -> None:
    found = worker.settings_in_force()
    assert set(EngineConfig.__dataclass_fields__) <= found.keys()
    assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (4, "given")
    assert found["enable_prefix_caching"].source == "given"
    assert (found["block_size"].value, found["block_size"].source) == (16, "default")
    assert (found["enable_chunked_prefill"].value, found["capacity_policy"].value) == (True, "max_utilization")
    assert found["max_num_batched_tokens"].source == "automatic" and found["max_num_batched_tokens"].reason
    assert (found["num_blocks"].value, found["num_blocks"].source) == (64, "given")
    assert found["kv_cache_size_tokens"].value == 64 * 16
    json.dumps({name: setting.value for name, setting in found.items()})
    assert worker.model_facts()["vocab_size"] > 90
    assert worker.model_facts()["digest"]
    assert worker.launch_command() is not None and "--max-num-seqs 4" in str(worker.launch_command())
    assert "torch" in worker.versions()


@pytest.mark.processes
def test_a_request_that_cannot_run_is_a_failure_and_the_worker_goes_on(worker: RunningEngine) -> None:
    too_long = Workload(SPEC, [BenchRequest(prompt=[5] * 3000, output_len=2)])
    with pytest.raises(EngineFailure, match=r"3,?000") as error:
        worker.run_offline(too_long)
    assert error.value.kind == "bad_setting"
    assert worker.run_offline(build(SPEC)).output_lens == [9] * 6


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"max_seqs": 4}, "bad_setting", "max_num_seqs"),
        pytest.param({"block_size": 0}, "bad_setting", "block_size must be", marks=pytest.mark.slow),
        ({"num_gpu_blocks_override": 2, "max_model_len": 512}, "oom", "room for 32"),
        # A setting of the server.
        pytest.param({"max_num_queued_reqs": 4}, "bad_setting", "max_num_queued_reqs", marks=pytest.mark.slow),
        ({"model": "/no/such/model"}, "bad_setting", "/no/such/model"),
    ],
)
def test_a_worker_that_does_not_start_says_why(
    tiny_directory: Path, settings: dict[str, object], kind: str, said: str
) -> None:
    with pytest.raises(EngineFailure, match=said) as error:
        HeadraceEngine(str(tiny_directory)).start({"device": "cpu", **settings}, serves=False)
    assert error.value.kind == kind


@pytest.mark.processes
def test_a_worker_that_is_killed_is_a_failure_of_its_run(tiny_directory: Path) -> None:
    with HeadraceEngine(str(tiny_directory)).start(SETTINGS, serves=False) as running:
        (pid, *_) = running.pids()
        psutil.Process(pid).kill()
        with pytest.raises(EngineFailure, match="SIGKILL") as error:
            running.run_offline(build(SPEC))
        assert error.value.kind == "oom"
        assert not running.is_alive()


@pytest.mark.processes
def test_a_worker_takes_other_settings_without_a_restart(worker: RunningEngine, tiny_directory: Path) -> None:
    pids, fresh = worker.pids(), worker.settings_in_force()
    other = {**SETTINGS, "max_num_seqs": 2, "enable_prefix_caching": False}
    assert worker.reconfigure(other)
    assert worker.start_s is None
    found = worker.settings_in_force()
    assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (2, "given")
    assert (found["enable_prefix_caching"].value, found["model"].value) == (False, str(tiny_directory))
    assert "--max-num-seqs 2 --no-enable-prefix-caching" in str(worker.launch_command())
    for _ in range(2):
        assert worker.run_offline(build(SPEC)).counters["prefix_hit_tokens"] == 0
    assert worker.reconfigure({**SETTINGS, "model": str(tiny_directory)})
    assert worker.settings_in_force() == fresh
    assert worker.pids() == pids

    with pytest.raises(EngineFailure, match="block_size must be") as error:
        worker.reconfigure({**SETTINGS, "block_size": 0})
    assert error.value.kind == "bad_setting"
    assert not worker.reconfigure({**SETTINGS, "model": "smollm2"})
    assert not worker.reconfigure({**SETTINGS, "load_format": "random"})
    assert worker.settings_in_force() == fresh
    assert worker.run_offline(build(SPEC)).output_lens == [9] * 6


@pytest.mark.processes
def test_a_server_needs_a_restart(server: RunningEngine) -> None:
    assert not server.reconfigure({**SETTINGS, "max_num_seqs": 2})
    assert server.settings_in_force()["max_num_seqs"].value == 4


@pytest.mark.processes
def test_a_server_tells_its_settings_and_counters(server: RunningEngine) -> None:
    assert server.address is not None and server.address.startswith("http://127.0.0.1:")
    assert server.model_name == "tiny"
    found = server.settings_in_force()
    assert set(EngineConfig.__dataclass_fields__) <= found.keys()
    assert (found["enable_chunked_prefill"].value, found["enable_chunked_prefill"].source) == (False, "given")
    assert found["enable_prefix_caching"].source == "given"
    assert (found["max_num_queued_reqs"].value, found["max_num_queued_reqs"].source) == (77, "given")
    assert found["max_num_queued_tokens"].source == "automatic"
    assert found["port"].source == "automatic"
    counters = server.counters()
    assert counters["num_preemptions"] == 0 and counters["num_generated_tokens"] == 0
    assert {"prefix_hit_tokens", "prefix_queried_tokens", "num_prompt_tokens", "num_steps"} <= counters.keys()
    assert {"host_seconds", "wait_seconds"} <= counters.keys()
    assert server.reset_prefix_cache()
    assert len(server.pids()) >= 2  # the front and its engine
    assert server.model_facts()["vocab_size"] > 90
    assert "--no-enable-chunked-prefill" in str(server.launch_command())


@pytest.mark.processes
def test_a_server_does_not_run_in_process(server: RunningEngine) -> None:
    with pytest.raises(EngineFailure) as error:
        server.run_offline(build(SPEC))
    assert error.value.kind == "unsupported"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"max_seqs": 4}, "bad_setting", "max-seqs"),
        ({"num_gpu_blocks_override": 2, "max_model_len": 512}, "oom", "room for 32"),
        ({"api_key": "secret"}, "unsupported", "api_key"),
    ],
)
def test_a_server_that_does_not_start_says_why(
    tiny_directory: Path, settings: dict[str, object], kind: str, said: str
) -> None:
    with pytest.raises(EngineFailure, match=said) as error:
        HeadraceEngine(str(tiny_directory)).start({"device": "cpu", **settings}, serves=True)
    assert error.value.kind == kind


@pytest.mark.slow
@pytest.mark.processes
def test_a_shape_runs_with_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.bench.engines import headrace_engine, shapes

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.SHAPES["llama-3.2-1b"] | small)
    assert headrace_engine.SHAPES is shapes.SHAPES
    with HeadraceEngine("small").start({"device": "cpu", "num_threads": 1}, serves=True) as running:
        assert running.model_name == "small"
        assert running.settings_in_force()["model"].value == "small"
        assert running.settings_in_force()["load_format"].value == "random"
        assert running.settings_in_force()["max_model_len"].value == shapes.MAX_MODEL_LEN
        facts = running.model_facts()
        assert (facts["weights"], facts["vocab_size"], facts["num_layers"]) == ("random", 512, 2)


def test_false_and_zero_are_values_of_flags() -> None:
    settings = {"enable_prefix_caching": False, "seed": 0, "tokenizer": None, "dtype": "auto", "a": {"b": 1}}
    expected = ["--no-enable-prefix-caching", "--seed", "0", "--dtype", "auto", "--a", '{"b": 1}']
    assert as_flags(settings) == expected


def test_answers_of_exact_length_do_not_ask_for_min_tokens() -> None:
    exact = offline_requests(build(SPEC))[0]["params"]
    assert exact == {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
    ended = offline_requests(build(WorkloadSpec(**{**SPEC.as_json(), "ends": "random"})))[0]["params"]
    assert ended["stop_token_ids"] and "ignore_eos" not in ended
