"""What `headrace quantize` writes is the same model for transformers. Needs the package compressed-tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.quantized import FP8, FP8_MAX, Kind, QuantizedWeight, dequantize
from headrace.models import load_decoder, open_checkpoint
from headrace.models.quantized import StoredQuantization
from headrace.quantize.evaluate import prefill
from headrace.quantize.quantize import Request, quantize_checkpoint
from tests.engine.tiny import save_model

pytestmark = pytest.mark.slow
IDS = torch.arange(1, 60, dtype=torch.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixture")
    save_model(directory, "mixtral")
    return directory


@dataclass(frozen=True)
class TheirLinear:
    """Multiplies Headrace's weights by activations that are rounded as compressed-tensors rounds them."""

    weight: Tensor
    kind: Kind

    def prefers_fp8(self, num_rows: int) -> bool:
        return False

    def __call__(self, x: Tensor) -> Tensor:
        return self._rounded(x) @ self.weight.t()

    def _rounded(self, x: Tensor) -> Tensor:
        if self.kind == "int4":
            return x
        scales = x.abs().amax(1, keepdim=True) / (FP8_MAX if self.kind == "fp8" else 127.5)
        values = x / scales
        return scales * (values.to(FP8).float() if self.kind == "fp8" else values.round().clamp(-128, 127))


@pytest.mark.parametrize("with_data", [False, True])
@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_transformers_computes_the_same_logits(
    kind: Kind, with_data: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    data = [f"line {number} of a text to calibrate with" for number in range(200)] if with_data else None
    quantize_checkpoint(Request(str(model), kind, tmp_path / "out", data=data, evaluates=False))
    assert_same_logits(kind, tmp_path / "out", monkeypatch, least_agreement=0.99 if kind == "int4" else 0.5)


def test_transformers_computes_the_same_logits_of_a_mixture(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8: it does not read experts in INT8 and in four bits. It does not round activations of experts."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    experts_of = ops.experts_of

    def without_rounding(linears: Sequence[TheirLinear], num_columns: int, dtype: torch.dtype) -> ops.PackedExperts:
        exact = [replace(each, kind="int4") if isinstance(each, TheirLinear) else each for each in linears]
        return experts_of(exact, num_columns, dtype)

    monkeypatch.setattr(ops, "experts_of", without_rounding)
    quantize_checkpoint(Request(str(mixture), "fp8", tmp_path / "out", evaluates=False))
    assert_same_logits("fp8", tmp_path / "out", monkeypatch, least_agreement=0.3)  # rounding changes routes too


def assert_same_logits(kind: Kind, directory: Path, monkeypatch: pytest.MonkeyPatch, *, least_agreement: float) -> None:
    """`least_agreement`: with activations as Headrace rounds them."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(IDS[None].long()).logits[0]
    ours = logits(directory)
    assert (ours.argmax(-1) == expected.argmax(-1)).float().mean() > least_agreement

    def as_theirs(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> TheirLinear:
        assert bias is None
        return TheirLinear(dequantize(weight), kind)

    monkeypatch.setattr(ops, "pack_quantized", as_theirs)
    monkeypatch.setattr(StoredQuantization, "stays_packed_on", lambda self, device: True)
    errors = (logits(directory) - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors[0] < 1e-4 and errors.median() < 0.01  # a sum that differs in its last digit may round to another INT8


def logits(directory: Path) -> Tensor:
    decoder = load_decoder(open_checkpoint(str(directory)), dtype=torch.float32)
    with torch.inference_mode():
        return decoder.logits(prefill(decoder, IDS))
