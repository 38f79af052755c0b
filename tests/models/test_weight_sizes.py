"""Bytes of weights before they are loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.dist.mesh import Mesh
from headrace.errors import UnsupportedModelError
from headrace.models.hub_config import spec_from_config
from headrace.models.quantized import Kind, StoredQuantization, kept_in_16_bits, read_quantization
from headrace.models.shards import Shards
from headrace.models.spec import ModelSpec
from headrace.models.weight_sizes import COPY_ROWS, WeightSizes, weight_sizes
from tests.models.quantized_checkpoints import CONFIG, MIXTURE_CONFIG, compressed
from tests.models.test_published_configs import CONFIGS

SPEC = replace(spec_from_config(CONFIG), num_layers=2)


def sizes(spec: ModelSpec, kind: Kind, *, at_load: bool = False) -> WeightSizes:
    return weight_sizes(Shards(spec, Mesh()), element_bytes=2, kind=kind, at_load=at_load)


def stored(kind: Kind, *ignored: str) -> ModelSpec:
    return replace(SPEC, quantization=StoredQuantization("compressed-tensors", kind, ignored=ignored))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_checkpoint_that_keeps_what_quantizing_keeps_takes_the_same_bytes(kind: Kind) -> None:
    """As `headrace quantize` writes them: with matrices in 16 bits, and their copies."""
    kept = sorted(name.removesuffix(".weight") for name in kept_in_16_bits(SPEC.num_layers))
    found = sizes(stored(kind, "lm_head", *kept), kind)
    assert found == sizes(SPEC, kind, at_load=True)
    assert found.copies > 0
    assert sizes(stored(kind, "re:.*lm_head", r"re:model\.layers\.1\.mlp\.down_proj$"), kind) == found
    without = sizes(stored(kind, "lm_head"), kind)
    assert without.copies == 0
    assert without.layers[1] < found.layers[1] and without.layers[0] == found.layers[0]


def test_a_gpu_keeps_experts_in_int8_in_16_bits() -> None:
    spec = replace(spec_from_config(MIXTURE_CONFIG), num_layers=1)
    as_they_are = weight_sizes(Shards(spec, Mesh()), element_bytes=2).layers[0]
    num_weights = 3 * 4 * 256 * 128  # of four experts
    num_others = 2 * 256 * 256 + 2 * 128 * 256  # queries and output, keys and values
    kinds: tuple[Kind, ...] = ("fp8", "int8", "int4")
    saved = {
        kind: as_they_are - sizes(replace(spec, quantization=StoredQuantization("fp8", kind)), kind).layers[0]
        for kind in kinds
    }
    assert num_others * 0.9 < saved["int8"] < num_others  # what is not saved are scales
    assert (num_weights + num_others) * 0.9 < saved["fp8"] < num_weights + num_others
    assert (num_weights + num_others) * 1.4 < saved["int4"] < (num_weights + num_others) * 1.5
    on_cpu = [weight_sizes(Shards(spec, Mesh()), element_bytes=4, kind=kind).layers[0] for kind in ("int8", None)]
    assert on_cpu[0] < on_cpu[1] * 0.3


def test_a_cpu_keeps_interleaved_gates_as_they_are() -> None:
    spec = replace(spec_from_config(CONFIGS["openai/gpt-oss-20b"]), num_layers=1)
    gates = 32 * 2 * 2880 * 2880  # of 32 experts
    on_gpu, on_cpu = (weight_sizes(Shards(spec, Mesh()), element_bytes=size, kind="int4").layers[0] for size in (2, 4))
    assert on_gpu < gates < 4 * gates < on_cpu


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert"])
def test_a_config_names_the_modules_that_it_leaves(key: str) -> None:
    config = compressed(8, "int", "channel", inputs=True) if key == "ignore" else {"quant_method": "fp8"}
    ignores = read_quantization(config | {key: ["lm_head", "re:.*gate$"]}).ignoring()
    assert ignores("lm_head.weight") and ignores("model.layers.3.mlp.gate.weight")
    assert not ignores("model.layers.3.mlp.gate_proj.weight")
    for nothing in (None, [], 3):
        assert not read_quantization(config | {key: nothing}).ignoring()("lm_head.weight")
    with pytest.raises(UnsupportedModelError, match=r"pattern 're:\(' of what is not quantized is wrong"):
        read_quantization(config | {key: ["re:("]})


@pytest.mark.interpreted
def test_copies_are_read_by_the_steps_that_the_kernels_for_few_rows_take() -> None:
    from headrace.kernels.gpu.few_rows import MAX_ROWS

    assert COPY_ROWS == MAX_ROWS
