"""Tokenizers built from GGUF metadata, against the library's own parts, SentencePiece's rule and the real file."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from headrace.errors import ModelError, UnsupportedModelError
from headrace.text import TextSource, load_tokenizer

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
PUBLISHED_PATTERNS = {  # as in the tokenizer.json files of Llama 3, Qwen2, Mistral Nemo and Llama 4
    "llama-bpe": CONTRACTIONS
    + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "llama4": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
PRE_TOKENIZERS = {
    "default": pre.ByteLevel(add_prefix_space=False),
    "deepseek-v3": pre.Sequence(
        [*(pre.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK3), pre.ByteLevel(False, use_regex=False)]
    ),
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]),
    **{
        name: pre.Sequence([pre.Split(Regex(pattern), "isolated"), pre.ByteLevel(False, use_regex=False)])
        for name, pattern in PUBLISHED_PATTERNS.items()
    },
}
CORPUS = [
    "It's 12345 o'clock:  we'll GO  to\n\n the ünïcode café, don't you?",
    "    def f(x):\n        return x ** 2  # 1234567\n",
    "HELLO World helloWorld iOS iOS iOS iOS \t\t 日本語 日本 🙂🙂 3.14 // end\r\n",
    "x\u0302y\u0302 -x\u0302 1x\u0302",
]


def train_byte_level() -> Tokenizer:
    """Merges learned across words, digits and spaces, so that a wrong splitting gives other tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    pieces = [text[start : start + 7] for text in CORPUS for start in range(len(text))]
    backend.train_from_iterator([piece for piece in pieces for _ in range(2)], trainer)
    return backend


TRAINED = train_byte_level()


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """The trained vocabulary, then a control token for the end and a user-defined one."""
    vocab = TRAINED.get_vocab()
    state = TRAINED.model.__getstate__().decode()
    merges = [" ".join(pair) for pair in json.loads(state)["merges"]]
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "<|end|>", "<think>", "<|start|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(vocab) + [3, 4, 3],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(vocab),
        "tokenizer.ggml.bos_token_id": len(vocab) + 2,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def load(metadata: dict[str, Any]) -> Any:
    return load_tokenizer(TextSource(gguf_metadata=metadata))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(
    extra=st.lists(st.sampled_from([*"aA1 \n'\té日🙂/", "  ", "12", "'s", "\r\n", "e\u0301"]), max_size=12).map("".join)
)
def test_text_is_split_as_in_the_published_tokenizer(name: str, extra: str) -> None:
    merges = [tuple(merge.split(" ")) for merge in byte_level_metadata()["tokenizer.ggml.merges"]]
    ignores_merges = name in ("llama-bpe", "tekken", "llama4")
    expected = Tokenizer(models.BPE(vocab=TRAINED.get_vocab(), merges=merges, ignore_merges=ignores_merges))
    expected.pre_tokenizer = PRE_TOKENIZERS[name]
    if name.startswith("qwen"):
        expected.normalizer = normalizers.NFC()
    tokenizer = load(byte_level_metadata(pre=name, add_bos_token=False))
    for text in (*CORPUS, extra):
        assert tokenizer.encode(text) == expected.encode(text).ids
        if not name.startswith("qwen"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_splittings_do_differ_on_this_vocabulary() -> None:
    text = "".join(CORPUS)
    encodings = {name: tuple(load(byte_level_metadata(pre=name)).encode(text, False)) for name in PRE_TOKENIZERS}
    assert len(set(encodings.values())) == len(PRE_TOKENIZERS)


def test_an_unknown_splitting_is_refused_and_the_nearest_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'llama-bpx'.*did you mean 'llama-bpe'.*--tokenizer"):
        load(byte_level_metadata(pre="llama-bpx"))


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = load(byte_level_metadata())
    end, think = tokenizer.eos_token_id, tokenizer.eos_token_id + 1
    ids = tokenizer.encode("a<|end|><think>")
    assert ids[-2:] == [end, think]
    assert tokenizer.special_ids == {end, tokenizer.bos_token_id}
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|end|><think>"


@pytest.mark.parametrize("with_bos, with_eos", [(False, False), (True, False), (False, True), (True, True)])
def test_the_file_says_which_tokens_go_around_a_prompt(with_bos: bool, with_eos: bool) -> None:
    tokenizer = load(byte_level_metadata(add_bos_token=with_bos, add_eos_token=with_eos))
    plain = tokenizer.encode("a", add_special_tokens=False)
    before = [tokenizer.bos_token_id] if with_bos else []
    after = [tokenizer.eos_token_id] if with_eos else []
    assert tokenizer.encode("a") == [*before, *plain, *after]


def test_llama3_begins_with_its_first_token_unless_told_otherwise() -> None:
    assert load(byte_level_metadata(pre="llama-bpe")).encode("a")[0] == load(byte_level_metadata()).bos_token_id
    assert load(byte_level_metadata(pre="qwen2")).encode("a") == load(byte_level_metadata()).encode("a", False)


def test_llama3_takes_a_word_of_the_vocabulary_whole_even_without_merges() -> None:
    metadata = byte_level_metadata(merges=[])
    assert len(load(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("World", False)) == 1
    assert len(load(metadata | {"tokenizer.ggml.pre": "dbrx"}).encode("World", False)) == 5


def test_further_ends_of_the_file_are_known() -> None:
    tokenizer = load(byte_level_metadata(eot_token_id=5))
    assert tokenizer.eos_token_ids == (tokenizer.eos_token_id, 5)


def test_templates_of_the_file_are_rendered_with_its_tokens() -> None:
    metadata = byte_level_metadata() | {
        "tokenizer.chat_template": "{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "tools",
    }
    template = load(metadata).chat_template
    assert template.render([{"role": "user", "content": ""}]) == "<|end|>"
    assert template.render([{"role": "user", "content": ""}], tools=[{}]) == "tools"
    assert load(byte_level_metadata()).chat_template is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "rwkv"}, "of kind 'rwkv'"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"no tokenizer\.ggml\.merges"),
        ({"token_type": [1]}, "1 token types"),
        ({"bos_token_id": 10**6}, r"bos_token_id is 1,000,000"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_is_missing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(byte_level_metadata(**changes))


# SentencePiece

# Not in the order of the scores, and not every way of joining leads to the same pieces.
PIECES = {letter: -100.0 - index for index, letter in enumerate("▁abcdehlo")} | {
    "ell": -12.0,
    "ab": -2.0,
    "▁a": -1.0,
    "▁ab": -3.5,
    "hello": -9.5,
    "llo": -6.0,
    "▁he": -7.0,
    "he": -4.0,
    "▁hello": -9.0,
    "hell": -8.0,
    "▁▁": -11.0,
    "bc": -0.5,
    "ll": -5.0,
    "lo": -4.5,
}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """Three special tokens, the bytes, then pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


def sentencepiece_encode(text: str, *, add_space_prefix: bool) -> list[int]:
    """The specification: merge the neighbours whose union scores best, the leftmost first, until none is a piece."""
    text = ("▁" if add_space_prefix and text else "") + text.replace(" ", "▁")
    symbols = list(text)
    while True:
        unions = [left + right for left, right in itertools.pairwise(symbols)]
        scored = [(-PIECES[union], index) for index, union in enumerate(unions) if union in PIECES]
        if not scored:
            break
        index = min(scored)[1]
        symbols[index : index + 2] = [unions[index]]
    ids = {piece: 259 + index for index, piece in enumerate(PIECES)}
    return [token for symbol in symbols for token in ([ids[symbol]] if symbol in ids else _bytes_of(symbol))]


def _bytes_of(symbol: str) -> list[int]:
    return [3 + byte for byte in symbol.encode()]


@pytest.mark.parametrize("add_space_prefix", [True, False])
@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from([*"ab lo", "abc", " abc", "hello", " hello", "ello", "é", "🙂"]), max_size=15).map(
        "".join
    )
)
def test_pieces_are_joined_as_sentencepiece_joins_them(add_space_prefix: bool, text: str) -> None:
    tokenizer = load(sentencepiece_metadata(add_space_prefix=add_space_prefix))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == sentencepiece_encode(text, add_space_prefix=add_space_prefix)
    assert tokenizer.decode(ids) == text


def test_a_sentencepiece_prompt_begins_with_bos_unless_told_otherwise() -> None:
    assert load(sentencepiece_metadata()).encode("a")[0] == 1
    assert 1 not in load(sentencepiece_metadata(add_bos_token=False)).encode("a")


def test_a_control_token_within_text_is_found_and_the_text_after_it_gets_its_own_space() -> None:
    tokenizer = load(sentencepiece_metadata())
    space_a = 259 + list(PIECES).index("▁a")
    assert tokenizer.encode("a</s>a") == [1, space_a, 2, space_a]


def test_a_sentencepiece_file_without_scores_is_refused() -> None:
    with pytest.raises(ModelError, match="no score"):
        load(sentencepiece_metadata(scores=None))


# The default model


@pytest.fixture(scope="module")
def embedded_metadata() -> dict[str, Any]:
    from headrace.models.gguf_file import read_gguf
    from headrace.models.sources import locate

    return dict(read_gguf(locate("smollm2")).metadata)


@pytest.mark.embedded
def test_the_embedded_tokenizer_is_built_quickly(embedded_metadata: dict[str, Any]) -> None:
    started = time.process_time()
    tokenizer = load(embedded_metadata)
    assert time.process_time() - started < 1.0  # about 0.15 s on an idle core
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))


@pytest.mark.embedded
def test_the_embedded_tokenizer_keeps_its_ids(embedded_metadata: dict[str, Any]) -> None:
    tokenizer = load(embedded_metadata)
    ids = tokenizer.encode("Hello world 1234 <|im_start|>user\n")
    assert ids == [19556, 905, 216, 33, 34, 35, 36, 216, 1, 4093, 198]
    assert tokenizer.encode("a  7") == [81, 256, 39]  # spaces are merged, digits are separate


@pytest.mark.embedded
def test_the_embedded_template_makes_the_prompt_of_its_model(embedded_metadata: dict[str, Any]) -> None:
    template = load(embedded_metadata).chat_template
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.embedded
@pytest.mark.slow
def test_the_embedded_tokenizer_agrees_with_transformers(embedded_metadata: dict[str, Any]) -> None:
    """Except where digits follow spaces: transformers does not split digits off for this kind of file."""
    from transformers import AutoTokenizer

    from headrace.models.sources import locate

    path = locate("smollm2")
    tokenizer = load(embedded_metadata)
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference.backend_tokenizer.pre_tokenizer = PRE_TOKENIZERS["smollm"]
    for text in (*CORPUS, "Привет, мир! مرحبا", "👩‍👩‍👧‍👦 🇫🇷 e\u0301", "a<|im_end|>\n\n\t b  ", "\x00\x7f\u3000", ""):
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
