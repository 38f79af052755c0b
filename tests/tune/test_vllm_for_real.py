"""Tunes a real vLLM: `make vllm-test HEADRACE_VLLM_PYTHON=/path/to/python`. Takes about 12 minutes on two cores.

HEADRACE_VLLM_TUNE_RECORD=FILE keeps the record. Starts are in eager mode, since compiling takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from headrace.cli.tune import main

pytestmark = pytest.mark.vllm

PYTHON, RECORD = "HEADRACE_VLLM_PYTHON", "HEADRACE_VLLM_TUNE_RECORD"
MODEL = os.environ.get("HEADRACE_VLLM_MODEL", "smollm2")
WORKLOAD = ["--workload", "uniform", "--num-requests", "32", "--output-len", "16"]
FIXED = ["--max-model-len", "2048", "--set", "enforce_eager=true", "--set", "VLLM_CPU_KVCACHE_SPACE=1"]


def test_a_real_vllm_is_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if PYTHON not in os.environ:
        pytest.fail(f"set {PYTHON} to the interpreter of an environment with vLLM")
    output = tmp_path / "vllm.tune.json"
    engine = ["--engine", "vllm", "--vllm-python", os.environ[PYTHON]]
    search = ["--search", "max_num_seqs=0,4,32", "--search", "enable_chunked_prefill=true,false"]
    code = main([MODEL, *engine, *WORKLOAD, *FIXED, *search, "--budget", "10m", "-o", str(output)])
    record = json.loads(output.read_text())
    if RECORD in os.environ:
        shutil.copy(output, os.environ[RECORD])
    assert code == 0
    assert record["engine"]["name"] == "vllm" and record["engine"]["versions"]["vllm"]
    measured = {each["name"]: each for each in record["configs"] if each["trials"]}
    assert len(measured) >= 2 and "default" in measured
    assert record["decision"]["chosen"] in measured
    assert capsys.readouterr().out.splitlines()[0] == record["decision"]["text"]
    settings = yaml.safe_load(output.with_suffix(".yaml").read_text())
    chosen = measured[record["decision"]["chosen"]]["settings"]
    assert {name: settings[name.replace("_", "-")] for name in chosen} == chosen
    # Four sequences at a time are slower than the default on every machine: the order that was measured says so.
    few = next((each for each in measured.values() if each["settings"] == {"max_num_seqs": 4}), None)
    assert few is None or few["score"] < 1.0
    impossible = [each for each in record["configs"] if each["settings"].get("max_num_seqs") == 0]
    assert all(each["status"] in ("failed", "ruled out", "not run") for each in impossible)
