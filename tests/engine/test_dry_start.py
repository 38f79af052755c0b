"""Every supported model starts on a GPU, as far as that can be known without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.interpreted  # where there is a GPU, models start on it
def test_every_published_config_starts_between_two_graph_sizes() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "tests/engine/dry_starts.py"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) > 80


@pytest.mark.processes
@pytest.mark.interpreted
@pytest.mark.parametrize(
    "settings",
    ["{}", '{"max_num_seqs": 1}', '{"enable_lora": true}', '{"kv_cache_dtype": "fp8", "max_model_len": 8000}'],
)
def test_no_request_after_a_start_needs_another_kernel(settings: str) -> None:
    """Compiling a kernel takes half a second, in which all requests of the engine wait."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "tests/engine/steps_after_start.py", settings]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == []
