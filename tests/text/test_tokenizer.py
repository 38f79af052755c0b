"""The tokenizer itself, and tokenizers read from directories."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from headrace.errors import ModelError, RequestError
from headrace.text import TextSource, Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
LETTERS = {letter: index for index, letter in enumerate("Ġabcdefghijklmnopqrstuvwxyz")}
VOCAB = LETTERS | {"<s>": 27, "</s>": 28, "<pad>": 29, "ab": 30}


def build_backend() -> Backend:
    backend = Backend(models.BPE(vocab=VOCAB, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return backend


def write_directory(directory: Path, backend: Backend | None = None, **files: Any) -> Path:
    (backend or build_backend()).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return directory


def load(directory: Path) -> Tokenizer:
    return load_tokenizer(TextSource(directory=directory))


def test_importing_text_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, headrace.text; print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_batch_gives_what_each_text_gives(byte_tokenizer: Tokenizer) -> None:
    texts = ["", "abc", "日本", "x" * 5000]
    assert byte_tokenizer.encode_batch(texts) == [byte_tokenizer.encode(text) for text in texts]
    assert byte_tokenizer.decode_batch(byte_tokenizer.encode_batch(texts)) == texts


def test_ids_that_the_tokenizer_does_not_know_add_nothing(byte_tokenizer: Tokenizer) -> None:
    unknown = [byte_tokenizer.vocab_size, 10**6, 2**40, -1]
    assert byte_tokenizer.decode([0x61, *unknown, 0x62]) == "ab"
    assert [byte_tokenizer.token(token_id) for token_id in unknown] == [""] * 4
    assert [byte_tokenizer.token_bytes(token_id) for token_id in unknown] == [b""] * 4


def test_half_a_character_is_available_as_bytes(byte_tokenizer: Tokenizer) -> None:
    assert [byte_tokenizer.token_bytes(byte) for byte in "é".encode()] == [b"\xc3", b"\xa9"]


def test_the_bytes_of_a_token_are_known_for_each_kind(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    assert tokenizers_by_kind["llama"].token_bytes(261) == b" the"
    assert tokenizers_by_kind["llama"].token_bytes(3 + 0xC3) == b"\xc3"
    assert tokenizers_by_kind["window"].token_bytes(262) == b"a"


def test_special_tokens_are_known_by_id(byte_tokenizer: Tokenizer) -> None:
    assert (byte_tokenizer.bos_token_id, byte_tokenizer.eos_token_id) == (257, 256)
    assert byte_tokenizer.eos_token_ids == (256,)
    assert byte_tokenizer.special_ids == {256, 257}


@pytest.mark.parametrize(
    "texts, message",
    [
        (["fine", "a\ud800b"], r"prompt 1 .*U\+D800 at character 1"),
        (["fine", 5], "prompt 1 must be text, got int"),
        ([None], "prompt 0 must be text, got NoneType"),
    ],
)
def test_an_invalid_text_is_refused_with_its_index(byte_tokenizer: Tokenizer, texts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_tokenizer.encode_batch(texts)


# Directories


def test_a_directory_reads_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    backend = build_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 27)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "pad_token": "<pad>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "added_tokens_decoder": {"31": {"content": "<think>", "special": False}, "27": {"content": "<s>"}},
    }
    write_directory(tmp_path, backend, tokenizer_config__json=config)
    tokenizer, reference = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("ab cab", "a</s>b<pad>", "<think>z", ""):
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.encode(text, False) == reference(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(MESSAGES) == reference.apply_chat_template(MESSAGES, tokenize=False)
    assert tokenizer.special_ids == {27, 28, 29}


def test_truncation_and_padding_in_the_file_do_not_count(tmp_path: Path) -> None:
    backend = build_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    assert load(write_directory(tmp_path, backend)).encode("abcdef") == [30, 3, 4, 5, 6]


def test_add_bos_token_counts_where_tokenizer_json_adds_nothing(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    tokenizer = load(write_directory(tmp_path, tokenizer_config__json=config))
    assert tokenizer.encode("c") == [27, 3, 28]
    assert tokenizer.encode("c", add_special_tokens=False) == [3]


def test_a_first_token_that_the_vocabulary_lacks_is_an_error(tmp_path: Path) -> None:
    config = {"bos_token": "<start>", "add_bos_token": True}
    with pytest.raises(ModelError, match=r"'<start>'.*no such token"):
        load(write_directory(tmp_path, tokenizer_config__json=config))


def test_special_tokens_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    tokenizer = load(write_directory(tmp_path, special_tokens_map__json=special, tokenizer_config__json={}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (27, 28)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "from config"}]}
    directory = write_directory(tmp_path, tokenizer_config__json=config)
    template = load(directory).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "from config"
    template = load(write_directory(directory, chat_template__jinja="from file")).chat_template
    assert template is not None
    assert template.render(MESSAGES) == "from file"


def test_a_directory_without_a_template_has_none(tmp_path: Path) -> None:
    assert load(write_directory(tmp_path)).chat_template is None


def test_added_tokens_at_other_ids_than_configured_are_an_error(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"99": {"content": "<x>"}}}
    with pytest.raises(ModelError, match=r"the id 99, tokenizer\.json makes it 31"):
        load(write_directory(tmp_path, tokenizer_config__json=config))


@pytest.mark.parametrize(
    "files, message",
    [
        ({"tokenizer__json": "{}"}, r"tokenizer\.json cannot be read by tokenizers"),
        ({"tokenizer_config__json": "{"}, r"tokenizer_config\.json is not JSON"),
        ({"tokenizer_config__json": "[]"}, r"tokenizer_config\.json must hold an object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(write_directory(tmp_path, **files))


def write_old_directory(directory: Path) -> Path:
    vocab = {**VOCAB, "<|endoftext|>": 31}
    config = {"tokenizer_class": "GPT2Tokenizer"}
    (directory / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (directory / "merges.txt").write_text("#version: 0.2\na b\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def test_older_files_are_converted_by_transformers(tmp_path: Path) -> None:
    tokenizer = load(write_old_directory(tmp_path))
    assert tokenizer.encode("abc") == [30, 3]
    assert tokenizer.decode([30, 3, 31]) == "abc"
    assert tokenizer.eos_token_id == 31


TEXTS = ("The river runs.", "the  river 12345 naïve", "北京 🙂\n\nline", "x")


def test_sentencepiece_files_are_read_as_sentencepiece_reads_them(tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    sample = tmp_path / "sample.txt"
    sample.write_text("The river runs past the mill, and the wheel turns with the river. " * 20, encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(sample),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    tokenizer, reference = load(tmp_path), spm.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        assert tokenizer.encode(text) == [reference.bos_id(), *reference.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiktoken_files_are_read_as_tiktoken_reads_them(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    words = (b"th", b"he", b"in", b"er", b"the", b" t", b" the", b"iv", b"iver", b" r", b" river")
    ranks = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    lines = [base64.b64encode(word) + b" %d\n" % rank for word, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    tokenizer = load(tmp_path)
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    reference = tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)
        assert tokenizer.decode(reference.encode(text)) == text


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'headrace\[tokenizers\]'"):
        load(write_old_directory(tmp_path))


def test_a_directory_without_any_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; name a directory"):
        load(tmp_path)


def test_a_model_without_any_text_side_says_so() -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(TextSource())
