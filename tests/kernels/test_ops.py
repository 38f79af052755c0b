"""Which kernels the operations choose, and what that choice costs at start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.kernels import ops, reference
from headrace.kernels.cpu import disk_cache, launch, norms
from headrace.kernels.ops import dispatch


@pytest.fixture
def _no_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "has_numba", lambda: False)
    ops.kernels_for.cache_clear()
    yield
    ops.kernels_for.cache_clear()


@pytest.fixture
def _two_threads() -> Iterator[None]:
    """With one thread, kernels run without a team."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.processes
def test_importing_the_operations_does_not_import_numba() -> None:
    code = "import sys, headrace.kernels.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_float32_on_the_cpu_runs_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "rms_norm", _refuse)
    assert ops.rms_norm(torch.randn(2, 8), torch.ones(8), 1e-6).shape == (2, 8)  # and the reference was not called


def test_other_types_run_the_reference() -> None:
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal(ops.rms_norm(x, torch.ones(8).bfloat16(), 1e-6), reference.rms_norm(x, torch.ones(8), 1e-6))


@pytest.mark.usefixtures("_no_numba")
def test_without_numba_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "rms_norm", _refuse)
    x = torch.randn(2, 8)
    assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-6), reference.rms_norm(x, torch.ones(8), 1e-6))
    assert isinstance(ops.pack_linear(torch.randn(3, 8)), reference.PackedLinear)
    ops.warm_up(torch.device("cpu"), torch.float32)


@pytest.mark.usefixtures("_two_threads")
def test_kernels_run_on_threads_of_a_pool_where_no_team_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "can_have_helpers", lambda: False)
    x, weight = torch.randn(500, 576), torch.randn(576)
    torch.testing.assert_close(norms.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    launch._pool().shutdown()
    launch._pool.cache_clear()


def test_compiled_kernels_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    disk_cache.choose_directory()
    chosen = disk_cache.os.environ["NUMBA_CACHE_DIR"]
    assert Path(chosen).parent == tmp_path / "headrace" / "numba"


def test_a_cache_directory_that_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/somewhere")
    disk_cache.choose_directory()
    assert disk_cache.os.environ["NUMBA_CACHE_DIR"] == "/somewhere"


def test_an_unusable_cache_home_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(disk_cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    disk_cache.choose_directory()
    assert Path(disk_cache.os.environ["NUMBA_CACHE_DIR"]).parents[1] == tmp_path


def _refuse(*args: object) -> None:
    raise AssertionError("the wrong kernel was chosen")
