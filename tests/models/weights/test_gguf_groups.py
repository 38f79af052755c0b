"""Matrices of GGUF files that a CPU multiplies as they are stored: the same weights as if they were dequantized."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.dist.mesh import Mesh
from headrace.kernels import ops
from headrace.kernels.cpu.linear import WeightOnlyLinear
from headrace.kernels.cpu.panels import IS_SUPPORTED
from headrace.kernels.quantized import GroupedWeight, dequantize
from headrace.models import load_decoder, open_checkpoint
from headrace.models.decoder import Decoder
from headrace.models.embeddings import QuantizedEmbeddings
from headrace.models.shards import Shards
from headrace.models.weight_sizes import weight_sizes
from headrace.models.weights.gguf_groups import TYPES
from headrace.models.weights.source import Slice, slice_of
from tests.models import test_gguf_hybrids as hybrids
from tests.models import test_gguf_mixtures as mixtures
from tests.models.test_gguf import Types, logits, make, random_blocks, tensors_of, write
from tests.tolerances import assert_same_but_for_rounded_inputs

CPU = torch.device("cpu")
needs_panels = pytest.mark.skipif(not IS_SUPPORTED, reason="needs an x86 CPU with AVX2")


@pytest.mark.parametrize("name", TYPES)
def test_groups_are_the_weights_that_the_gguf_package_reads(name: str) -> None:
    kind, raw = TYPES[name], random_blocks(Types[name], num_rows=6)
    found = kind.unpack(raw.reshape(-1, kind.block_bytes))
    shape = (6, -1, found.scales.shape[1])  # an outer number is that of all groups of a block
    per_group = [np.broadcast_to(each, (len(each), shape[2])) for each in found[1:] if each is not None]
    scales, minima, *outer = (torch.from_numpy(each.reshape(shape).copy()).flatten(1) for each in per_group)
    weight = GroupedWeight(torch.from_numpy(found.values.reshape(6, -1)), scales, minima, kind.bits, *outer)
    assert weight.group_len == kind.group_len
    assert weight.num_bytes <= weight.values.numel() * kind.bits_per_weight / 8
    assert torch.equal(dequantize(weight), torch.from_numpy(gguf.quants.dequantize(raw, Types[name])))


def llama(path: Path, kind: Types) -> str:
    tensors = tensors_of(make("llama, biased"), "llama")
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    return str(write(path / "model.gguf", tensors, kinds=kinds))


def test_ranks_and_gpus_get_what_they_multiply(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(llama(tmp_path, Types.Q8_0))
    source, name = checkpoint.weights, "model.layers.1.mlp.down_proj.weight"
    assert source is not None
    whole = checkpoint.tensor(name)
    for rank in range(3):
        part = slice_of(Shards(checkpoint.spec, Mesh(rank, 3)).part(name), (64, 96))
        found = source.quantized(name, CPU, part)
        assert found is not None and part is not None
        assert torch.equal(dequantize(found), part.of(whole))
    assert source.quantized(name, CPU, Slice(range(64), range(16, 48))) is None  # cuts through groups
    assert source.quantized("model.norm.weight", CPU) is None
    assert source.quantized(name, torch.device("cuda")) is None


def both(path: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, Decoder]:
    """The model with packed weights, and with weights that are dequantized at load."""
    found = load_decoder(open_checkpoint(path), dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(ops, "takes_groups", lambda device, dtype: False)
        return found, load_decoder(open_checkpoint(path), dtype=torch.float32)


def assert_same(found: Decoder, expected: Decoder) -> None:
    for text in (torch.arange(40), torch.arange(3)):
        assert_same_but_for_rounded_inputs(logits(found, text), logits(expected, text))


@needs_panels
@pytest.mark.parametrize("kind", [Types.Q4_0, Types.Q4_1, Types.Q5_1, Types.Q8_0], ids=lambda kind: kind.name)
def test_logits_are_those_of_dequantized_weights(kind: Types, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llama(tmp_path, kind)
    found, expected = both(path, monkeypatch)
    assert_same(found, expected)
    linears = (found.layers[0].mixer.qkv, found.layers[1].mlp.down, found.head)
    assert all(isinstance(linear, WeightOnlyLinear) for linear in linears)
    assert found.num_bytes < expected.num_bytes * (0.5 if TYPES[kind.name].bits == 8 else 0.4)
    counted = weight_sizes(Shards(open_checkpoint(path).spec, Mesh()), element_bytes=4).total
    stored = found.embeddings.num_bytes if isinstance(found.embeddings, QuantizedEmbeddings) else 0
    assert found.num_bytes + stored == pytest.approx(counted, rel=0.02)


@needs_panels
def test_matrices_of_several_types_that_share_their_input_are_one_gemm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in files of mixed types, such as Q4_K_M: here values in eight bits beside keys in four."""
    tensors = tensors_of(make("llama"), "llama")
    kinds = {"attn_q": Types.Q4_0, "attn_k": Types.Q4_1, "attn_v": Types.Q8_0, "ffn_gate": Types.Q8_0}
    of_layers = {f"blk.{i}.{stem}.weight": kind for i in range(2) for stem, kind in kinds.items()}
    found, expected = both(str(write(tmp_path / "model.gguf", tensors, kinds=of_layers)), monkeypatch)
    assert isinstance(found.layers[0].mixer.qkv, WeightOnlyLinear)
    assert not isinstance(found.layers[0].mlp.up, WeightOnlyLinear)  # up is not quantized
    assert_same(found, expected)


@needs_panels
@pytest.mark.parametrize("name", ["qwen3 moe", "mixtral", "llama 4"])
def test_experts_stay_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = mixtures.CASES[name]
    path = mixtures.save(case, mixtures.tensors_of(case, mixtures.make(case)), tmp_path, kind=Types.Q8_0)
    found, expected = both(str(path), monkeypatch)
    assert found.num_bytes < expected.num_bytes * 0.5
    assert_same(found, expected)


@needs_panels
@pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3", "qwen3-next"])
def test_rows_are_in_the_order_of_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of latent attention that rotate, and fused tensors whose rows are taken apart."""
    case = hybrids.CASES[name]
    model = hybrids.make(case)
    kinds = {
        stored: Types.Q8_0
        for stored, tensor in hybrids.tensors_of(case, model).items()
        if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "conv" not in stored and "ffn_gate_inp" not in stored
    }
    found, expected = both(hybrids.save(case, model, tmp_path, kinds=kinds), monkeypatch)
    assert found.num_bytes < expected.num_bytes
    assert_same(found, expected)


def test_a_machine_without_the_kernels_dequantizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "takes_groups", lambda device, dtype: False)
    found = load_decoder(open_checkpoint(llama(tmp_path, Types.Q8_0)), dtype=torch.float32)
    assert not isinstance(found.head, WeightOnlyLinear)
    text: Tensor = logits(found, torch.arange(8))
    assert text.isfinite().all()
