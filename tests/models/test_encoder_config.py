"""Configs of encoders: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UnsupportedModelError
from headrace.models import open_checkpoint
from headrace.models.encoder_config import encoder_of_config, encoder_spec
from headrace.models.encoder_spec import EncoderSpec
from headrace.models.spec import ModelSpec

# With the keys that the config.json of published models of these kinds have.
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "directionality": "bidi",
    "hidden_act": "gelu",
    "hidden_size": 768,
    "id2label": {"0": "LABEL_0"},
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "pooler_num_attention_heads": 12,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "vocab_size": 21128,
}
XLM_R = BERT | {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "model_type": "xlm-roberta",
    "max_position_embeddings": 8194,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "position_embedding_type": "absolute",
    "vocab_size": 50368,
}


def spec_of(config: dict[str, Any]) -> EncoderSpec:
    family = encoder_of_config(config)
    assert family is not None
    return encoder_spec(family, config)


def pooler_of(directory: Path, config: dict[str, Any], **files: Any) -> Any:
    for name, content in {"config": config, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    spec: ModelSpec = open_checkpoint(str(directory), load_format="random").spec
    assert spec.pooler is not None
    return spec.pooler


def test_sizes_positions_windows_and_ropes_are_read() -> None:
    bert, xlm_r, modern = map(spec_of, (BERT, XLM_R, MODERN))
    assert (bert.max_model_len, bert.num_types, bert.num_params) == (512, 2, 101_677_056)
    assert (xlm_r.max_model_len, xlm_r.position_offset, xlm_r.num_types) == (8192, 2, 1)
    assert modern.windows[:4] == (None, 64, 64, None) and len(modern.windows) == 22
    assert (modern.rope_of(0).theta, modern.rope_of(1).theta) == (160_000.0, 10_000.0)
    assert modern.kv_elements_per_token == 0 and modern.is_encoder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        (BERT | {"hidden_act": "silu"}, "hidden_act 'silu' is not supported for encoders"),
        (BERT | {"attention_window": 512}, "sets attention_window=512"),
        (MODERN | {"layer_types": ["other"] * 22}, "layer type 'other'"),
        (BERT | {"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        spec_of(config)


def test_the_activation_of_a_classifier_is_the_one_that_its_files_name(tmp_path: Path) -> None:
    assert pooler_of(tmp_path, XLM_R).activation == "sigmoid"
    assert pooler_of(tmp_path, XLM_R | {"id2label": {"0": "a", "1": "b"}}).labels == ("a", "b")
    assert pooler_of(tmp_path, XLM_R | {"problem_type": "regression"}).activation == "none"
    identity = "torch.nn.modules.linear.Identity"
    assert pooler_of(tmp_path, XLM_R | {"sentence_transformers": {"activation_fn": identity}}).activation == "none"
    named = pooler_of(tmp_path, XLM_R, config_sentence_transformers={"activation_fn": identity})
    assert named.activation == "none"


def test_poolings_and_modules_that_are_not_known_are_refused(tmp_path: Path) -> None:
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    for config, message in (
        ({"pooling_mode_max_tokens": True}, "pooling max is not supported"),
        ({"pooling_mode": ["cls", "mean"]}, r"pooling cls \+ mean is not supported"),
    ):
        pooling.write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=message):
            pooler_of(tmp_path, BERT, modules=modules)
    pooling.write_text(json.dumps({"pooling_mode": "mean"}))
    assert pooler_of(tmp_path, BERT, modules=modules).pooling == "mean"
    with pytest.raises(UnsupportedModelError, match="Transformer -> Pooling -> WordWeights"):
        pooler_of(tmp_path, BERT, modules=[*modules, {"path": "", "type": "x.WordWeights"}])
