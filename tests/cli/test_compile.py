"""`headrace compile`: for which GPU, into which directory, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.engine import compile_ahead


def test_kernels_are_compiled_into_the_directory_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Any] = []

    def compile_start(config: Any, gpu: Any, *, num_processes: int, progress: Any) -> int:
        asked.append((config.model, config.max_num_seqs, gpu.capability, num_processes))
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path)
        (tmp_path / "kernel").write_bytes(b"12")
        return 3

    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(compile_ahead, "compile_start", compile_start)
    flags = ["--gpu", "a100", "--max-num-seqs", "8", "--processes", "2"]
    assert main(["compile", "m", "-o", str(tmp_path), *flags]) == 0
    assert asked == [("m", 8, (8, 0), 2)]
    out = capsys.readouterr().out
    assert "3 kernels for a100" in out and f"TRITON_CACHE_DIR={tmp_path} headrace serve m" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu", "H201"], "unknown GPU 'H201'"),
        (["--gpu", "MI300X"], "Headrace runs on NVIDIA GPUs"),
        (["--gpu", "H200", "-tp", "2"], "for one GPU"),
        (["--gpu", "H200", "--device", "cpu"], "for one GPU"),
    ],
)
def test_what_cannot_be_compiled_for_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    assert main(["compile", "m", "-o", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
