"""Every Triton kernel compiles for the architectures of today and fits them, which the interpreter does not show.

The launches are those of real starts: the runner starts on meta tensors, for a model of each kind (`compile_for.py`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHARED_KIB = {"8.0": 163, "8.9": 99, "9.0": 227, "10.0": 227}  # of one program: A100; L4, RTX 4090; H100, H200; B200
NEEDS_RANKS = {"_sum_over_peers"}  # over ranks that share memory: `test_peer_sum.py`


def kernels_of(capability: str, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    run = subprocess.run(
        [sys.executable, "tests/kernels/compile_for.py", capability],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.interpreted  # where there is a GPU, the kernels' own tests compile them
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_kernel_compiles_and_fits_without_a_gpu(tmp_path: Path, capability: str) -> None:
    kernels = kernels_of(capability, tmp_path)
    too_large = {
        (kernel["function"], kernel["shared_bytes"])
        for kernel in kernels
        if kernel["shared_bytes"] > SHARED_KIB[capability] * 1024
    }
    assert not too_large
    uses_pdl = any(kernel["options"].get("launch_pdl") for kernel in kernels)
    assert uses_pdl == (float(capability) >= 9.0)
    assert [kernel["function"] for kernel in kernels if kernel["breaks"]] == []  # the rules of dependent launches
    uses_fp8 = any("fp8" in str(kernel["types"]) for kernel in kernels)
    assert uses_fp8 == (float(capability) >= 8.9)
    if capability == "9.0":
        sources = [path.read_text() for path in (ROOT / "src/headrace/kernels/gpu").glob("*.py")]
        launched = {name for source in sources for name in re.findall(r"^\s*(_\w+)\[\(", source, re.MULTILINE)}
        assert launched - NEEDS_RANKS == {kernel["function"] for kernel in kernels}
