"""Quantized checkpoints: every layout is read as the numbers that it means, whole and in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.errors import UnsupportedModelError
from headrace.kernels import ops
from headrace.kernels.cpu.linear import Int8Linear, WeightOnlyLinear
from headrace.kernels.cpu.panels import IS_SUPPORTED
from headrace.kernels.quantized import (
    FP8,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    concatenate,
    dequantize,
    quantize,
    take_rows,
)
from headrace.models import load_decoder, open_checkpoint
from headrace.models.quantized import Kind, StoredQuantization, kept_in_16_bits, read_quantization
from headrace.models.weights.source import Slice
from headrace.quantize.evaluate import prefill, score
from tests.models.quantized_checkpoints import CONFIG, LAYOUTS, MIXTURE_CONFIG, compressed, write
from tests.tolerances import assert_same_but_for_rounded_inputs

CPU = torch.device("cpu")
Q, K, DOWN = (f"model.layers.1.{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "mlp.down"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_matrix_is_read_as_the_numbers_that_it_means(layout: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *LAYOUTS[layout])
    checkpoint = open_checkpoint(str(tmp_path))
    assert set(checkpoint.weights.names()) == set(expected)
    for name in (Q, DOWN, "model.norm.weight"):
        assert torch.allclose(checkpoint.tensor(name), expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_matrices_stay_quantized_when_they_are_joined_and_reordered(layout: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *LAYOUTS[layout])
    source = open_checkpoint(str(tmp_path)).weights
    joined = concatenate([source.quantized(name, CPU) for name in (Q, K)])
    assert torch.allclose(dequantize(joined), torch.cat([expected[Q], expected[K]]), rtol=1e-6, atol=1e-7)
    rows = torch.arange(256).view(-1, 2).flip(1).flatten()  # within blocks of rows
    moved = take_rows(source.quantized(Q, CPU), rows)
    assert torch.allclose(dequantize(moved), expected[Q][rows], rtol=1e-6, atol=1e-7)


def test_the_order_of_rows_is_decided_without_values() -> None:
    """As in a start without a GPU."""
    weight = Fp8Weight(torch.empty(256, 128, dtype=FP8, device="meta"), torch.empty(2, 1, device="meta"))
    moved = take_rows(weight, torch.arange(256).view(-1, 2).flip(1).flatten())
    assert moved is not None and moved.values.is_meta
    assert take_rows(weight, torch.arange(256).flip(0)) is None


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "gptq in activation order"])
def test_a_rank_reads_its_part_as_stored(layout: str, tmp_path: Path) -> None:
    expected = write(tmp_path, *LAYOUTS[layout])
    source = open_checkpoint(str(tmp_path)).weights
    for part in (Slice(range(128, 256)), Slice(range(256), range(128, 384))):
        found = source.quantized(DOWN, CPU, part)
        assert torch.allclose(dequantize(found), part.of(expected[DOWN]), rtol=1e-6, atol=1e-7)


def test_a_part_that_cuts_through_groups_is_dequantized(tmp_path: Path) -> None:
    expected = write(tmp_path, *LAYOUTS["gptq"])
    source = open_checkpoint(str(tmp_path)).weights
    part = Slice(range(256), range(16, 100))
    assert source.quantized(DOWN, CPU, part) is None
    out = torch.empty(256, 84)
    source.fill(DOWN, out, part)
    assert torch.allclose(out, part.of(expected[DOWN]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layout", ["compressed fp8 per channel", "gptq in activation order"])
def test_a_cpu_computes_with_the_dequantized_weights(layout: str, tmp_path: Path) -> None:
    write(tmp_path, *LAYOUTS[layout])
    decoder = load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.float32)
    assert score(decoder, torch.arange(64, dtype=torch.int32)[None]).perplexity > 1.0


@pytest.mark.skipif(not IS_SUPPORTED, reason="needs an x86 CPU with AVX2")
@pytest.mark.parametrize("is_stored", [True, False])
def test_a_cpu_keeps_int8_weights_and_agrees_with_the_dequantized_ones(
    is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *LAYOUTS["compressed int8"])
    checkpoint = open_checkpoint(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(StoredQuantization, "stays_packed_on", lambda self, device: False)
        exact = load_decoder(checkpoint, dtype=torch.float32)
    if not is_stored:  # rounds the numbers of the same checkpoint again, which leaves them as they are
        checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, quantization=None))
    found = load_decoder(checkpoint, dtype=torch.float32, quantization="int8")
    assert isinstance(found.layers[0].mlp.down, Int8Linear)
    assert found.num_bytes < exact.num_bytes * 0.4
    ids = torch.arange(64, dtype=torch.int32)
    expected = exact.logits(prefill(exact, ids))
    assert float((found.logits(prefill(found, ids)) - expected).norm() / expected.norm()) < 0.05


@pytest.mark.skipif(not IS_SUPPORTED, reason="needs an x86 CPU with AVX2")
@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq in activation order", "compressed int4"])
def test_a_cpu_keeps_weights_in_four_bits_and_computes_what_they_mean(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *LAYOUTS[layout])
    checkpoint = open_checkpoint(str(tmp_path))
    found = load_decoder(checkpoint, dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(StoredQuantization, "stays_packed_on", lambda self, device: False)
        exact = load_decoder(checkpoint, dtype=torch.float32)
    assert isinstance(found.layers[0].mlp.down, WeightOnlyLinear)
    assert found.num_bytes < exact.num_bytes * 0.3
    for num_tokens in (3, 64):
        ids = torch.arange(num_tokens, dtype=torch.int32)
        expected = exact.logits(prefill(exact, ids))
        assert_same_but_for_rounded_inputs(found.logits(prefill(found, ids)), expected)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "int8" not in name])
def test_experts_in_fp8_and_four_bits_are_read_as_one_matrix_as_stored(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, which multiplies by them so."""
    expected = write(tmp_path, *LAYOUTS[layout], MIXTURE_CONFIG)
    checkpoint = open_checkpoint(str(tmp_path))
    found: list[Fp8Weight | Int4Weight] = []
    monkeypatch.setattr(StoredQuantization, "stays_packed_on", lambda self, device: True)
    monkeypatch.setattr(ops, "takes_groups", lambda device, dtype: False)
    # No kernel takes them, so they are dequantized after that.
    monkeypatch.setattr(ops, "pack_quantized_experts", lambda weight, num_experts, dtype: found.append(weight))
    monkeypatch.setattr(ops, "pack_quantized", lambda weight, bias, dtype: ops.pack_linear(dequantize(weight), bias))
    load_decoder(checkpoint, dtype=torch.float32)
    names = [f"model.layers.1.mlp.experts.{expert}." for expert in range(4)]
    ups = torch.cat([expected[f"{name}{part}_proj.weight"] for name in names for part in ("gate", "up")])
    downs = torch.cat([expected[f"{name}down_proj.weight"] for name in names])
    assert len(found) == 4  # two layers
    assert torch.allclose(dequantize(found[2]), ups, rtol=1e-6, atol=1e-7)
    assert torch.allclose(dequantize(found[3]), downs, rtol=1e-6, atol=1e-7)


@pytest.mark.skipif(not IS_SUPPORTED, reason="needs an x86 CPU with AVX2")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_cpu_quantizes_experts_at_load(kind: Kind, tmp_path: Path) -> None:
    def rounded(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        matrix = dequantize(quantize(matrix, kind))
        return {f"{stem}.weight": matrix}, matrix

    def as_it_is(stem: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {f"{stem}.weight": matrix}, matrix

    decoders = {}
    for pack, quantization in ((rounded, None), (as_it_is, kind)):
        directory = tmp_path / pack.__name__
        directory.mkdir()
        torch.manual_seed(5)
        write(directory, {}, pack, MIXTURE_CONFIG)
        checkpoint = open_checkpoint(str(directory))
        decoders[pack] = load_decoder(checkpoint, dtype=torch.float32, quantization=quantization)
    exact, found = decoders[rounded], decoders[as_it_is]
    assert found.num_bytes < exact.num_bytes * 0.4
    ids = torch.arange(64, dtype=torch.int32)
    expected, logits = (each.logits(prefill(each, ids)) for each in (exact, found))
    assert float((logits - expected).norm() / expected.norm()) < (0.05 if kind == "int8" else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CONFIG, MIXTURE_CONFIG], ids=["dense", "mixture"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_keeps_the_weights_quantized_and_agrees_with_the_cpu(
    layout: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *LAYOUTS[layout], config)
    checkpoint = open_checkpoint(str(tmp_path))
    ids = torch.arange(64, dtype=torch.int32)
    with monkeypatch.context() as patched:
        patched.setattr(StoredQuantization, "stays_packed_on", lambda self, device: False)
        exact = load_decoder(checkpoint, dtype=torch.float32)
    found = load_decoder(checkpoint, dtype=torch.bfloat16, device="cuda")
    kind = checkpoint.spec.quantization.kind
    if config is CONFIG or kind != "int8":  # such experts are dequantized
        assert found.num_bytes < exact.num_bytes * {"fp8": 0.45, "int8": 0.45, "int4": 0.35}[kind]
    with torch.inference_mode():
        expected = exact.logits(prefill(exact, ids))
        logits = found.logits(prefill(found, ids.cuda())).float().cpu()
    assert float((logits - expected).norm() / expected.norm()) < (0.02 if kind == "int4" else 0.1)


@pytest.mark.parametrize("kind", [Fp8Weight, Int8Weight, Int4Weight])
def test_the_kind_of_a_layout_is_one_of_three(kind: type, tmp_path: Path) -> None:
    layouts = {Fp8Weight: "fp8 per block", Int8Weight: "compressed int8", Int4Weight: "awq"}
    write(tmp_path, *LAYOUTS[layouts[kind]])
    assert isinstance(open_checkpoint(str(tmp_path)).weights.quantized(Q, CPU), kind)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "its method is none of"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "packing is 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "have 3 bits"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        (compressed(2, "int", "group", inputs=False), "weights of 2 bits"),
        (compressed(4, "int", "group", inputs=True), "activations of four bits"),
        (compressed(8, "int", "channel", inputs=True) | {"format": "marlin-24"}, "marlin-24"),
        (compressed(8, "int", "channel", inputs=True) | {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_with_its_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read_quantization(config)


def test_weights_alone_in_eight_bits_are_dequantized(tmp_path: Path) -> None:
    _, pack = LAYOUTS["compressed fp8 per channel"]
    write(tmp_path, compressed(8, "float", "channel", inputs=False), pack)
    assert open_checkpoint(str(tmp_path)).weights.quantized(Q, CPU) is None


def test_quantizing_keeps_the_down_projections_that_cost_most() -> None:
    layers = {count: sorted(int(name.split(".")[2]) for name in kept_in_16_bits(count)) for count in (2, 16, 30, 80)}
    assert layers == {2: [1], 16: [0, 15], 30: [0, 1, 2, 29], 80: [0, 1, 2, 79]}
