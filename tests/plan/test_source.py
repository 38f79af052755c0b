"""Models from paths, also those that the engine does not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.errors import ModelError, UnsupportedModelError
from headrace.plan.catalogue import find_entry
from headrace.plan.source import find_shape, shape_of_config

UNKNOWN: dict[str, Any] = {
    "architectures": ["BrandNewForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
}


def test_a_directory_and_its_config_file_give_the_built_in_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(find_entry("llama-3.2-1b").config))
    expected = find_shape("llama-3.2-1b").num_params
    assert find_shape(str(tmp_path)).num_params == expected
    assert find_shape(str(tmp_path / "config.json")).num_params == expected


def test_a_gguf_file_is_sized_by_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = find_shape(str(path))
    assert find_shape(str(tmp_path)).num_params == shape.num_params  # the only one in its directory
    assert (shape.num_layers, shape.vocab_size, shape.is_tied) == (2, 300, True)
    assert shape.kv_elements_per_token == 2 * 2 * 2 * 16


def test_latent_attention_caches_one_vector_per_token_and_layer() -> None:
    config = find_entry("deepseek-r1").config | {"quantization_config": {"quant_method": "modelopt"}}
    shape = shape_of_config("quantized", config)
    assert shape.kv_elements_per_token == 61 * (512 + 64)
    assert shape.active_params / 1e9 == pytest.approx(36.6, abs=0.5)
    assert "quantized (modelopt)" in (shape.why_not_run or "")


def test_latent_attention_that_the_engine_runs_has_the_same_cache() -> None:
    config = {key: value for key, value in find_entry("deepseek-r1").config.items() if key != "quantization_config"}
    shape, planned = shape_of_config("unquantized", config), find_entry("deepseek-r1")
    assert shape.why_not_run is None
    others = shape_of_config("quantized", planned.config)
    for name in ("kv_elements_per_token", "num_kv_heads", "attention_width", "kv_size", "q_size"):
        assert getattr(shape, name) == getattr(others, name)
    assert shape.num_params / 1e9 == pytest.approx(671.03, abs=0.01)


def test_an_unknown_architecture_is_sized_like_llama_and_said_not_to_run() -> None:
    shape = shape_of_config("new", UNKNOWN)
    as_llama = shape_of_config("llama", UNKNOWN | {"architectures": ["LlamaForCausalLM"]})
    assert shape.num_params == as_llama.num_params
    assert as_llama.why_not_run is None
    assert "BrandNewForCausalLM" in (shape.why_not_run or "")


def test_an_unknown_architecture_without_sizes_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no hidden_size"):
        shape_of_config("new", {"architectures": ["BrandNewForCausalLM"]})


@pytest.mark.parametrize(("text", "problem"), [("{", "cannot read"), ("[]", "no JSON object")])
def test_a_broken_config_file_is_an_error(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=problem):
        find_shape(str(tmp_path / "config.json"))


def test_a_path_that_does_not_exist_is_named_as_such() -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        find_shape("./nowhere/config.json")
