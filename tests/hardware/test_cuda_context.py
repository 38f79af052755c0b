"""The context of a GPU is created through CUDA's driver, if there is one; nothing that fails here ends a start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.hardware import cuda_context, facts
from headrace.hardware.cuda_context import create_context_meanwhile


class Function:
    """Of the driver."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[Any, ...]] = []
        self.argtypes: list[Any] = []

    def __call__(self, *args: Any) -> int:
        self.calls.append(args)
        return self.status


def created(driver: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def load(name: str) -> Any:
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(cuda_context.ctypes, "CDLL", load)
    done: list[str] = []
    create_context_meanwhile(done.append).join()
    return done


def test_the_primary_context_of_the_first_gpu_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SimpleNamespace(cuInit=Function(0), cuDevicePrimaryCtxRetain=Function(0))
    assert created(driver, monkeypatch) == ["CUDA context created"]
    assert driver.cuInit.calls == [(0,)]
    assert [number for _, number in driver.cuDevicePrimaryCtxRetain.calls] == [0]


def test_without_a_driver_or_a_gpu_there_is_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    no_device = 100
    driver = SimpleNamespace(cuInit=Function(no_device), cuDevicePrimaryCtxRetain=Function(0))
    assert created(driver, monkeypatch) == [] == driver.cuDevicePrimaryCtxRetain.calls
    assert created(SimpleNamespace(), monkeypatch) == []
    assert created(None, monkeypatch) == []


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, True), ("0", True), ("GPU-1,2", True), ("", False), ("-1", False)]
)
def test_a_driver_counts_unless_all_gpus_are_hidden(
    visible: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "_DRIVER_FILES", ("/no/such/file", "/dev/null"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert facts.has_gpu_driver() == expected
    monkeypatch.setattr(facts, "_DRIVER_FILES", ("/no/such/file",))
    assert not facts.has_gpu_driver()
