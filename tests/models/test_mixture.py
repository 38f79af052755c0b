"""A mixture of experts as a single layer; test_parity compares whole models with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.config import Quantization
from headrace.kernels import ops
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.models.mixture import Mixture
from tests.engine.tiny import MIXTURES, save_model


def load(
    directory: Path, family: str, dtype: torch.dtype = torch.float32, quantization: Quantization | None = None
) -> Decoder:
    save_model(directory, family)
    return load_decoder(open_checkpoint(str(directory)), dtype=dtype, quantization=quantization)


def mixture_of(decoder: Decoder) -> Mixture:
    return next(layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Mixture))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_tokens_output_does_not_depend_on_the_batch(family: str, tmp_path: Path) -> None:
    decoder = load(tmp_path, family)
    mixture = mixture_of(decoder)
    x = torch.randn(30, decoder.spec.hidden_size)
    together = mixture(x)
    assert together.std() > 0.1
    for token in (0, 7, 29):
        torch.testing.assert_close(mixture(x[token : token + 1])[0], together[token], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama4", "qwen3_moe"])
def test_no_tokens_give_an_empty_output(family: str, tmp_path: Path) -> None:
    decoder = load(tmp_path, family)
    empty = torch.empty(0, decoder.spec.hidden_size)
    assert mixture_of(decoder)(empty).shape == empty.shape


@pytest.mark.parametrize("family", ["llama4", "qwen3_moe"])
def test_experts_in_fp8_give_nearly_the_same_in_half_the_memory(family: str, tmp_path: Path) -> None:
    exact = load(tmp_path, family, torch.bfloat16)
    narrow = load(tmp_path, family, torch.bfloat16, "fp8")
    assert narrow.num_bytes == exact.num_bytes - exact.spec.num_linear_params
    assert mixture_of(narrow).up.takes_fp8 and mixture_of(narrow).down.takes_fp8
    x = torch.randn(30, exact.spec.hidden_size).bfloat16()
    found, expected = mixture_of(narrow)(x).float(), mixture_of(exact)(x).float()
    assert (found - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("family", MIXTURES)
def test_only_a_sum_to_which_nothing_is_added_is_left_to_the_norm(family: str, tmp_path: Path) -> None:
    decoder = load(tmp_path, family)
    mixture = mixture_of(decoder)
    x = torch.randn(5, decoder.spec.hidden_size)
    found = mixture.unsummed(x)
    assert isinstance(found, ops.RouteRows) == (mixture.shared is None and mixture.num_chosen > 1)
    assert torch.equal(ops.sum_routes(found), mixture(x))
