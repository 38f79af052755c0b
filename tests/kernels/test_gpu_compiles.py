"""Every Triton kernel compiles for a Hopper GPU, which the interpreter does not show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.interpreted  # where there is a GPU, the kernels' own tests compile them
def test_every_kernel_compiles_without_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, "tests/kernels/compile_for_hopper.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    sources = [path.read_text() for path in (ROOT / "src/headrace/kernels/gpu").glob("*.py")]
    launched = {name for source in sources for name in re.findall(r"^\s*(_\w+)\[\(", source, re.MULTILINE)}
    assert launched and set(run.stdout.split()) == launched
    assert len(list(tmp_path.rglob("*.cubin"))) >= len(launched)
