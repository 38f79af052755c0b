"""Opening and loading directories: what is missing, misshapen, unused or unsafe is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import ConfigError, ModelError, UnsupportedModelError
from headrace.models import load_decoder, open_checkpoint
from headrace.models.hub_config import spec_from_config
from headrace.models.weights.random_weights import RandomWeights

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    shapes = spec_from_config(CONFIG | changes).tensor_shapes()
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def write(directory: Path, weights: dict[str, torch.Tensor] | None, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    if weights is not None:
        save_file(weights, directory / "model.safetensors")
    return str(directory)


def load(model: str, **options: Any) -> Any:
    return load_decoder(open_checkpoint(model, **options), dtype=torch.float32, **options)


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    weights = tensors()
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.up_proj.weight'.*\[48, 32\]"):
        load(write(tmp_path, weights))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    weights = tensors() | {"model.norm.weight": torch.ones(31)}
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \[31\], its config implies \[32\]"):
        load(write(tmp_path, weights))


def test_a_tensor_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.q_proj.bias' .*ignored"):
        load(write(tmp_path, weights))


def test_old_rotary_tables_and_a_second_copy_of_tied_embeddings_are_left_alone(tmp_path: Path) -> None:
    weights = tensors(tie_word_embeddings=True)
    weights |= {"lm_head.weight": torch.ones(64, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    decoder = load(write(tmp_path, weights, tie_word_embeddings=True))
    torch.testing.assert_close(
        decoder.embeddings(torch.arange(decoder.spec.vocab_size)), weights["model.embed_tokens.weight"]
    )


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = tensors() | {"model.norm.weight": torch.ones(32, dtype=torch.int8)}
    with pytest.raises(UnsupportedModelError, match=r"'model.norm.weight' is stored as torch.int8"):
        load(write(tmp_path, weights))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = write(tmp_path, tensors())
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-00002-of-00002.safetensors, which does not exist"):
        load(model)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    model = write(tmp_path, None)
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 100)
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_way_to_convert_them(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=rf"{name}.*save_pretrained.*safetensors"):
        open_checkpoint(model)


def test_a_directory_without_weights_or_config_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json and no GGUF file"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(ModelError, match=r"no \*.safetensors.*random"):
        open_checkpoint(write(tmp_path, None))


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        open_checkpoint(str(tmp_path))


def test_end_ids_of_generation_config_are_read(tmp_path: Path) -> None:
    model = write(tmp_path, tensors(), eos_token_id=3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    checkpoint = open_checkpoint(model)
    assert checkpoint.spec.eos_token_ids == (3, 9)
    assert checkpoint.text.directory == tmp_path


def test_random_weights_need_only_a_config(tmp_path: Path) -> None:
    model = write(tmp_path, None, attention_bias=True, max_position_embeddings=4096)
    decoder = load(model, load_format="random")
    assert decoder.num_bytes == 4 * decoder.spec.num_params
    assert decoder.embeddings(torch.arange(decoder.spec.vocab_size)).std().item() == pytest.approx(0.02, rel=0.1)
    assert (decoder.norm.weight == 1).all()


def test_random_norm_weights_are_one_after_the_norm_offset(tmp_path: Path) -> None:
    model = write(tmp_path, None, architectures=["Gemma2ForCausalLM"])
    decoder = load(model, load_format="random")
    assert (decoder.norm.weight == 1).all()
    assert all((layer.mlp_post_norm.weight == 1).all() for layer in decoder.layers)


def test_random_weights_depend_on_the_seed_and_the_name_only() -> None:
    spec = spec_from_config(CONFIG)

    def filled(name: str, seed: int) -> torch.Tensor:
        out = torch.empty(spec.tensor_shapes()[name])
        RandomWeights(spec, seed=seed).fill(name, out)
        return out

    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(filled(gate, 0), filled(gate, 0))
    assert not torch.equal(filled(gate, 0), filled(gate, 1))
    assert not torch.equal(filled(gate, 0), filled(up, 0))


def test_random_weights_longer_than_their_pool_do_not_repeat_rows() -> None:
    config = CONFIG | {"vocab_size": 5000, "hidden_size": 1024}
    out = torch.empty(5000, 1024)
    RandomWeights(spec_from_config(config), seed=0).fill("model.embed_tokens.weight", out)
    assert len(torch.unique(out[:, 0])) > 4900
    assert out.std().item() == pytest.approx(0.02, rel=0.01)


def test_a_checkpoint_opened_without_weights_says_how_to_load_it(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, None), load_format="random")
    with pytest.raises(ModelError, match="load_format='random'"):
        load_decoder(checkpoint, dtype=torch.float32)


def test_the_rotary_table_is_no_longer_than_the_engine_needs(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, None), load_format="random")
    decoder = load_decoder(checkpoint, dtype=torch.float32, load_format="random", max_len=20)
    assert decoder.max_len == 20
    assert all(layer.mixer.cos_sin.shape == (20, 8) for layer in decoder.layers)


def test_a_load_format_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="safetensors"):
        open_checkpoint(str(path), load_format="safetensors")


def test_a_directory_with_several_gguf_files_asks_for_one(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a.gguf, b.gguf\); give the path of one"):
        open_checkpoint(str(tmp_path))


def test_opening_a_checkpoint_imports_no_torch(tmp_path: Path) -> None:
    model = write(tmp_path, tensors())
    program = (
        "import sys; from headrace.models import open_checkpoint, cached_models, remove, fetch;"
        f"open_checkpoint({model!r}); cached_models(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_loading_a_checkpoint_imports_neither_sympy_nor_dynamo(tmp_path: Path) -> None:
    """They would take most of a second of each start: see `weights/key_units.py`."""
    program = (
        "import sys, torch; from headrace.models import load_decoder, open_checkpoint;"
        f"load_decoder(open_checkpoint({write(tmp_path, tensors())!r}), dtype=torch.float32);"
        "sys.exit(len({'sympy', 'torch._dynamo'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
