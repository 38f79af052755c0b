"""A tokenizer from a Hugging Face directory.

tokenizer.json says how text is split; tokenizer_config.json and special_tokens_map.json name the special tokens; the
chat template is in a file of its own or in tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.errors import ModelError, UnsupportedModelError
from headrace.text.template import ChatTemplate, named_templates
from headrace.text.tokenizer import Tokenizer, mark_special, wrap_prompts

# Files that transformers can convert to a fast tokenizer. Without one of these it would silently build an empty one.
_VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")

_TYPES = "token_type_ids"  # among the inputs that a tokenizer gives a model

_WAY_OUT = "pip install 'headrace[tokenizers]', or name a directory with a tokenizer.json with --tokenizer"


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    settings = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens({**_read_json(directory / "special_tokens_map.json"), **settings})
    path = directory / "tokenizer.json"
    if path.is_file():
        backend = _read_backend(path)
    else:
        backend, converted_tokens = _convert(directory)
        special_tokens = converted_tokens | special_tokens
    _add_tokens(backend, settings)
    mark_special(backend, list(special_tokens.values()))
    _wrap_as_configured(backend, settings, special_tokens)
    templates = _templates(directory, settings)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_template=ChatTemplate(templates, special_tokens) if templates else None,
        has_token_types=_TYPES in settings.get("model_input_names", (_TYPES,)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold an object, it holds a {type(value).__name__}; fetch it again")
    return value


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ModelError(
            f"{path} cannot be read by tokenizers {tokenizers.__version__}: {error}; "
            "fetch the file again, or upgrade tokenizers if the file is newer"
        ) from error


def _convert(directory: Path) -> tuple[Backend, dict[str, str]]:
    """Returns the fast tokenizer that transformers converts older files to, and its special tokens."""
    if not any((directory / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelError(f"{directory} has no tokenizer.json; name a directory that has one with --tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(
            f"{directory} has no tokenizer.json, and transformers, which converts older files, is not installed; "
            f"{_WAY_OUT}"
        ) from error
    try:
        converted: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"{directory} has no tokenizer.json, and transformers cannot convert it: {error}; {_WAY_OUT}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedModelError(
            f"{directory} has no tokenizer.json, and transformers has only a slow {type(converted).__name__} for it; "
            "name a directory with a tokenizer.json with --tokenizer"
        )
    return backend, _special_tokens(converted.special_tokens_map)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Maps 'bos_token' and the like to their text; each is a text or an object with the text as 'content'."""
    texts = {name: _content(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text}


def _content(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _add_tokens(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Adds the tokens that tokenizer_config.json has beyond tokenizer.json, at their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in _configured_tokens(settings):
        if token.content in known:
            continue
        backend.add_tokens([token])
        if (actual := backend.token_to_id(token.content)) != token_id:
            raise ModelError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id:,}, tokenizer.json makes it "
                f"{actual:,}; fetch both files again from one revision"
            )


def _configured_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    entries: Mapping[str, Any] = settings.get("added_tokens_decoder") or {}
    flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
    for token_id, entry in sorted((int(key), entry) for key, entry in entries.items()):
        yield token_id, AddedToken(entry["content"], **{flag: bool(entry[flag]) for flag in flags if flag in entry})


def _wrap_as_configured(backend: Backend, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    """Applies add_bos_token and add_eos_token if tokenizer.json itself adds nothing; else tokenizer.json wins."""
    if backend.num_special_tokens_to_add(is_pair=False):
        return
    wanted = {name: special_tokens.get(name) for name in ("bos_token", "eos_token") if settings.get(f"add_{name}")}
    wrap_prompts(backend, bos_token=wanted.get("bos_token"), eos_token=wanted.get("eos_token"))


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Reads the templates: their own files win over tokenizer_config.json, which wins over chat_template.json."""
    files = {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        files["default"] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    value = settings.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    return named_templates(value)
