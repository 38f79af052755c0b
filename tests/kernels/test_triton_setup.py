"""Triton's work before the first kernel is done on a thread, and what fails there is left to the first kernel."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia
from triton.runtime import cache

from headrace.kernels import triton_setup


def test_triton_is_hashed_and_its_driver_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: calls.append("hash"))
    monkeypatch.setattr(nvidia, "CudaUtils", lambda: calls.append("module"))
    thread = triton_setup.set_up_meanwhile(lambda name: None)
    assert thread is not None
    thread.join()
    assert calls == ["hash", "module"]


def test_without_a_driver_the_start_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("libcuda.so cannot found!")

    done: list[str] = []
    monkeypatch.setattr(cache, "triton_key", lambda: None)
    monkeypatch.setattr(nvidia, "CudaUtils", fail)
    thread = triton_setup.set_up_meanwhile(done.append)
    assert thread is not None
    thread.join()
    assert len(done) == 2
