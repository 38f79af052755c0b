"""GEMM kernels are loaded once for each shape of weights, and leave no memory behind."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.gpu.few_rows import Linear
from headrace.runner.gpu import gemm_warmup


@dataclass(frozen=True, slots=True)
class Part:
    first: Linear
    second: Linear
    name: str = ""


def linear(num_columns: int, width: int, *, has_bias: bool = False) -> Linear:
    return Linear(torch.zeros(num_columns, width), torch.zeros(num_columns) if has_bias else None)


def run(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the GEMMs, and the end."""
    calls: list[tuple[int, ...]] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        calls.append((*x.shape, *weight.shape))

    monkeypatch.setattr(gemm_warmup.F, "linear", multiply)
    monkeypatch.setattr(gemm_warmup, "release", lambda device: calls.append(()))
    gemm_warmup.load_library_kernels(decoder, 16)
    return calls


def test_each_shape_is_multiplied_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, mlp = Part(linear(8, 4), linear(4, 8)), Part(linear(8, 4), linear(8, 4, has_bias=True))
    layer = SimpleNamespace(mixer=mixer, mlp=mlp)
    other = SimpleNamespace(mixer=None, mlp=object())  # of a kind that has no such weights
    decoder = SimpleNamespace(stream=None, layers=[layer, other, layer], device=torch.device("cpu"))
    large = [(16, 4, 8, 4), (16, 8, 4, 8), (16, 4, 8, 4)]
    small = [(8, 4, 8, 4), (8, 8, 4, 8), (8, 4, 8, 4)]
    found = run(decoder, monkeypatch)
    assert sorted(found[:-1]) == sorted(large + small) and found[-1] == ()


def test_weights_that_are_streamed_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(SimpleNamespace(stream=object()), monkeypatch) == []
