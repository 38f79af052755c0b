"""A tokenizer from the metadata of a GGUF file.

    tokenizer.ggml.model = 'gpt2'    byte-level BPE with merges; tokenizer.ggml.pre says how text is split first
    tokenizer.ggml.model = 'llama'   SentencePiece BPE with scores and byte fallback

Those of encoders are in `gguf_encoder_tokenizer.py`.
An unknown splitting is refused: a similar one would silently give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.errors import ModelError, UnsupportedModelError, nearest
from headrace.text import gguf_encoder_tokenizer as encoders
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer, mark_special, wrap_prompts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_FURTHER_ENDS = ("eot_token_id", "eom_token_id")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
_SIGNS_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is split before merging, and other settings of the tokenizers that use this splitting."""

    pattern: str | None = None  # None: GPT-2's own, built into the library
    splits_digits: bool = False  # every digit alone, before the pattern
    first_patterns: tuple[str, ...] = ()  # what they match is split off, one after the other, before the pattern
    ignores_merges: bool = False  # a word that is in the vocabulary is not merged
    composes: bool = False  # text is normalized to NFC first
    adds_bos: bool = False  # where the file does not say


_GPT2 = Splitting()
_DIGITS = Splitting(splits_digits=True)
_LLAMA3_PATTERN = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}"
_LLAMA3 = Splitting(_LLAMA3_PATTERN, ignores_merges=True, adds_bos=True)
_QWEN2 = Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACES}", composes=True)
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_SIGNS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = Splitting(rf"{_CONTRACTIONS}|{_MARKED_WORDS}|\p{{N}}|{_MARKED_SIGNS}", composes=True)
_DEEPSEEK3 = Splitting(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    first_patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
_TEKKEN = Splitting(
    rf"{'|'.join(_CASED_WORDS)}|\p{{N}}|{_SIGNS_WITH_SLASHES}",
    ignores_merges=True,
    adds_bos=True,
)
_LLAMA4 = Splitting(
    rf"{'|'.join(f'{word}{_CONTRACTIONS}?' for word in _CASED_WORDS)}|\p{{N}}{{1,3}}|{_SIGNS_WITH_SLASHES}",
    ignores_merges=True,
    adds_bos=True,
)

# tokenizer.ggml.pre -> splitting
SPLITTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "modern-bert": Splitting(composes=True),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "dbrx": Splitting(_LLAMA3_PATTERN),
    "smaug-bpe": Splitting(_LLAMA3_PATTERN),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "deepseek-v3": _DEEPSEEK3,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "llama4": _LLAMA4,
    "gpt-4o": Splitting(_LLAMA4.pattern),
    "seed-coder": Splitting(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The file's tokens with their types, checked."""

    tokens: Sequence[str]
    types: Sequence[int]

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def of_type(self, *types: int) -> list[str]:
        return [token for token, type_ in zip(self.tokens, self.types, strict=True) if type_ in types]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    model = metadata.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama", *encoders.KINDS):
        raise UnsupportedModelError(
            f"this GGUF file's tokenizer is of kind {model!r}, known are 'gpt2', 'llama', 'bert' and 't5'; "
            "name a directory with a tokenizer.json with --tokenizer"
        )
    vocabulary = _read_vocabulary(metadata)
    special_tokens = _special_tokens(metadata, vocabulary)
    splitting = _splitting(metadata) if model == "gpt2" else Splitting(adds_bos=True)
    backend = _backend(str(model), metadata, vocabulary, splitting, special_tokens.get("unk_token"))
    _add_tokens(backend, vocabulary, special_tokens)
    if metadata.get("general.architecture") in encoders.ARCHITECTURES:
        encoders.wrap_pairs(backend, metadata, vocabulary.tokens)
    else:
        _wrap(backend, metadata, special_tokens, adds_bos=splitting.adds_bos)
    templates = _templates(metadata)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=ChatTemplate(templates, special_tokens) if templates else None,
        vocab_size=len(vocabulary.tokens),
        eos_token_ids=[metadata[key] for key in _token_keys(_FURTHER_ENDS) if key in metadata],
    )


def _backend(
    model: str, metadata: Mapping[str, Any], vocabulary: _Vocabulary, splitting: Splitting, unk_token: str | None
) -> Backend:
    if model == "gpt2":
        return _byte_level(metadata, vocabulary, splitting=splitting)
    if model == "bert":
        return encoders.word_piece(vocabulary.tokens, vocabulary.of_type(_CONTROL, _UNKNOWN))
    if model == "t5":
        return encoders.unigram(metadata, vocabulary.tokens, unk_token)
    return _sentencepiece(metadata, vocabulary, unk_token=unk_token)


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError("this GGUF file has no tokenizer.ggml.tokens; name a directory with a tokenizer.json instead")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"this GGUF file has {len(tokens):,} tokens but {len(types):,} token types; fetch it again")
    return _Vocabulary(tokens, types)


def _token_keys(names: Sequence[str]) -> list[str]:
    return [f"tokenizer.ggml.{name}" for name in names]


def _special_tokens(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, str]:
    named = {}
    for name, key in zip(_NAMED_TOKENS, _token_keys(tuple(_NAMED_TOKENS.values())), strict=True):
        token_id = metadata.get(key)
        if token_id is None:
            continue
        if not 0 <= token_id < len(vocabulary.tokens):
            raise ModelError(f"this GGUF file's {key} is {token_id:,}, it has {len(vocabulary.tokens):,} tokens")
        named[name] = vocabulary.tokens[token_id]
    return named


def _splitting(metadata: Mapping[str, Any]) -> Splitting:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITTINGS:
        raise UnsupportedModelError(
            f"this GGUF file splits text as {pre!r} (tokenizer.ggml.pre){nearest(str(pre), SPLITTINGS)}; known are "
            f"{', '.join(SPLITTINGS)}; name a directory with the model's tokenizer.json with --tokenizer"
        )
    return SPLITTINGS[pre]


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, splitting: Splitting) -> Backend:
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ModelError("this GGUF file has no tokenizer.ggml.merges; name a directory with a tokenizer.json instead")
    pairs = [_pair(merge) for merge in merges]
    backend = Backend(models.BPE(vocab=vocabulary.ids(), merges=pairs, ignore_merges=splitting.ignores_merges))
    if splitting.composes:
        backend.normalizer = normalizers.NFC()
    add_prefix_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    backend.pre_tokenizer = _pre_tokenizer(splitting, add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(splitting: Splitting, *, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for pattern in (*splitting.first_patterns, *([] if splitting.pattern is None else [splitting.pattern])):
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    use_regex = splitting.pattern is None
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, unk_token: str | None) -> Backend:
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = derive_merges(metadata, vocabulary) if merges is None else [_pair(merge) for merge in merges]
    model = models.BPE(vocab=vocabulary.ids(), merges=pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    spaces = normalizers.Replace(" ", "▁")
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def derive_merges(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Derives merges: SentencePiece merges the pair with the best score, so list every split of a token, best first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise ModelError("this GGUF file has no score for each token; name a directory with a tokenizer.json instead")
    normal = [
        (-score, token)
        for token, type_, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if type_ == _NORMAL
    ]
    known = {token for _, token in normal}
    halves = [
        (rank, split, token)
        for rank, token in normal
        for split in range(1, len(token))
        if token[:split] in known and token[split:] in known
    ]
    halves.sort(key=lambda half: (half[0], -half[1], half[1] - len(half[2])))
    return [(token[:split], token[split:]) for _, split, token in halves]


def _add_tokens(backend: Backend, vocabulary: _Vocabulary, special_tokens: Mapping[str, str]) -> None:
    """Adds control tokens as special, and user-defined ones, which are matched whole but remain text."""
    users = vocabulary.of_type(_USER_DEFINED)
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in users])
    mark_special(backend, [*vocabulary.of_type(_CONTROL, _UNKNOWN), *special_tokens.values()])


def _wrap(backend: Backend, metadata: Mapping[str, Any], special_tokens: Mapping[str, str], *, adds_bos: bool) -> None:
    with_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    with_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    wrap_prompts(
        backend,
        bos_token=special_tokens.get("bos_token") if with_bos else None,
        eos_token=special_tokens.get("eos_token") if with_eos else None,
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Reads the templates: tokenizer.chat_template is the default, others are tokenizer.chat_template.NAME."""
    prefix = "tokenizer.chat_template."
    templates = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if default := metadata.get("tokenizer.chat_template"):
        templates["default"] = default
    return templates
