"""Small encoders and classifiers with random weights, saved by transformers, and a word tokenizer with pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{i}" for i in range(60)))
HIDDEN = 48
SHAPE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}
MODERN = SHAPE | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "bert": (transformers.BertConfig, "Bert", SHAPE),
    "xlm-roberta": (transformers.XLMRobertaConfig, "XLMRoberta", SHAPE | {"type_vocab_size": 1}),
    "roberta": (transformers.RobertaConfig, "Roberta", SHAPE | {"type_vocab_size": 1}),
    "modernbert": (transformers.ModernBertConfig, "ModernBert", MODERN),
}


def save_encoder(directory: Path, kind: str, ending: str = "Model", **more: Any) -> transformers.PreTrainedModel:
    config_class, base, shape = KINDS[kind]
    torch.manual_seed(5)
    model = getattr(transformers, base + ending)(config_class(**shape | more)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name.lower() and "bias" not in name else 0.0, 0.2)
    model.save_pretrained(directory)
    save_pair_tokenizer(directory)
    return model


def save_pair_tokenizer(directory: Path) -> None:
    """`[CLS] a [SEP]` and `[CLS] a [SEP] b [SEP]`, with types."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(WORDS[:4]))
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def save_modules(
    directory: Path,
    pooling: str,
    *,
    normalize: bool = True,
    dense: tuple[int, int] | None = None,
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
) -> torch.nn.Linear | None:
    """The files of sentence-transformers. `pooling` is `cls_token`, `mean_tokens` or `lasttoken`."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    if max_seq_length is not None:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    if prompts is not None:
        (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return _save_dense(directory / "2_Dense", *dense) if dense else None


def _save_dense(folder: Path, in_size: int, out_size: int) -> torch.nn.Linear:
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"in_features": in_size, "out_features": out_size, "bias": True}
    (folder / "config.json").write_text(
        json.dumps(config | {"activation_function": "torch.nn.modules.activation.Tanh"})
    )
    linear = torch.nn.Linear(in_size, out_size)
    save_file(
        {"linear.weight": linear.weight.detach(), "linear.bias": linear.bias.detach()}, folder / "model.safetensors"
    )
    return linear


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)
