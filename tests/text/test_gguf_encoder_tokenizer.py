"""Tokenizers of encoders from GGUF metadata, against the tokenizers that they were made from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from headrace.errors import ModelError
from headrace.text import TextSource, load_tokenizer

CORPUS = ["The river runs past the old mill, 1234 times!", "Café au lait: don't stop.", "Über alles 你好 rivers"] * 30
TEXTS = ["The river stops", "CAFÉ du moulin, 12 rivers?", "über 你好!", "xyzzy \u2603", "  two   spaces "]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTROL, NORMAL = 3, 1


def word_piece(*, lowercase: bool) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    alphabet = [] if lowercase else [chr(ord("A") + index) for index in range(26)]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def phantom(token: str) -> str:
    """As llama.cpp's converter writes it."""
    if token in SPECIAL:
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def bert_metadata(made: Tokenizer) -> dict[str, Any]:
    tokens = [made.id_to_token(index) for index in range(made.get_vocab_size())]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": [phantom(token) for token in tokens],
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    }


@pytest.mark.parametrize("lowercase", [True, False])
def test_words_are_split_as_by_the_tokenizer_of_a_bert(lowercase: bool) -> None:
    made = word_piece(lowercase=lowercase)
    ours = load_tokenizer(TextSource(gguf_metadata=bert_metadata(made)))
    for text in TEXTS:
        assert ours.encode(text) == made.encode(text).ids
    (pair,) = ours.encode_pairs([TEXTS[0]], [TEXTS[1]])
    expected = made.encode(TEXTS[0], TEXTS[1])
    assert (pair.token_ids, pair.second_start) == (expected.ids, expected.type_ids.index(1))


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(CORPUS, trainer)
    ends = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=ends
    )
    return made


def unigram_metadata(made: Tokenizer) -> dict[str, Any]:
    pairs = json.loads(made.to_str())["model"]["vocab"]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [token for token, _ in pairs],
        "tokenizer.ggml.scores": [score for _, score in pairs],
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [2] + [NORMAL] * (len(pairs) - 4),
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
    }


def test_text_is_split_as_by_the_tokenizer_of_an_xlm_roberta() -> None:
    made = unigram()
    ours = load_tokenizer(TextSource(gguf_metadata=unigram_metadata(made)))
    for text in TEXTS[:3]:
        assert ours.encode(text) == made.encode(text).ids
    (pair,) = ours.encode_pairs([TEXTS[0]], [TEXTS[1]])
    assert (pair.token_ids, pair.second_start) == (made.encode(TEXTS[0], TEXTS[1]).ids, None)


def test_a_missing_score_or_token_is_named() -> None:
    metadata = unigram_metadata(unigram())
    with pytest.raises(ModelError, match="no score for each token"):
        load_tokenizer(TextSource(gguf_metadata=metadata | {"tokenizer.ggml.scores": [0.0]}))
    metadata = bert_metadata(word_piece(lowercase=True))
    tokens = [token.strip("[]") for token in metadata["tokenizer.ggml.tokens"]]
    unnamed = {key: value for key, value in metadata.items() if "cls" not in key}
    with pytest.raises(ModelError, match=r"no token '\[CLS\]'"):
        load_tokenizer(TextSource(gguf_metadata=unnamed | {"tokenizer.ggml.tokens": tokens}))


def test_decoding_joins_the_pieces_of_words() -> None:
    ours = load_tokenizer(TextSource(gguf_metadata=bert_metadata(word_piece(lowercase=True))))
    assert ours.decode(ours.encode("the river stops")) == "the river stops"
