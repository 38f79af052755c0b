"""What a job's results depend on. Compared when a job is resumed, so that one output never mixes two jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from headrace.config import EngineConfig
from headrace.errors import JobError, reason_of
from headrace.jobs.formats.file_format import format_of
from headrace.jobs.spec import JobSpec
from headrace.models.adapter_config import adapter_files
from headrace.models.digests import digest_of_local_model, digest_of_tokenizer
from headrace.openai.parser_names import AUTO

SMALL_FILE_BYTES = 1 << 20

# Engine settings that change answers. The others may differ when a job is resumed.
_SETTINGS = (
    "model",
    "revision",
    "runner",
    "convert",
    "pooler_config",
    "hf_overrides",
    "tokenizer",
    "chat_template",
    "default_chat_template_kwargs",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "seed",
)

# Digests of contents. None, or missing in a job of an earlier version: not known, and then not compared.
CONTENTS = ("model_weights", "tokenizer_files")


def fingerprint_of(job: JobSpec) -> dict[str, Any]:
    """A flat dictionary, so that a difference has one name. Stored in the manifest."""
    settings = {name: value for name, value in asdict(job.config).items() if name in _SETTINGS}
    sampling = {f"sampling.{name}": value for name, value in sorted(job.defaults.items())}
    files = {"model_files": _digest_of_model(job.config.model), **_contents(job.config)}
    files |= {f"adapter.{name}": _digest_of_adapter(path) for name, path in job.config.adapter_paths.items()}
    return {**settings, **files, **_reading(job), **_parsing(job), **sampling}


def _contents(config: EngineConfig) -> dict[str, str | None]:
    """The weights may have changed under the same names and sizes. None for a model of the hub."""
    tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
    return {
        "model_weights": digest_of_local_model(config.model),
        "tokenizer_files": digest_of_tokenizer(tokenizer) if tokenizer is not None and tokenizer.exists() else None,
    }


def with_contents_of(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """`now`, with the digests that only the earlier run knows."""
    known = {name: earlier[name] for name in CONTENTS if now.get(name) is None and earlier.get(name) is not None}
    return {**now, **known}


def _reading(job: JobSpec) -> dict[str, Any]:
    """How input lines become requests."""
    template = job.template
    return {
        "input_format": f"{format_of(job.input, job.input_format)}",
        "prompt": template.prompt.source if template is not None and template.prompt is not None else None,
        "system": template.system.source if template is not None and template.system is not None else None,
        "messages_column": template.messages_column if template is not None else None,
        "chat": template is not None and template.is_chat,
    }


def _parsing(job: JobSpec) -> dict[str, Any]:
    """How answers are parsed, where the job says so."""
    names = {"tool_call_parser": job.parser_names.tool_call, "reasoning_parser": job.parser_names.reasoning}
    return {key: name for key, name in names.items() if name != AUTO}


def first_difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The name and both values; a value is None if it was not given."""
    for name in sorted({*earlier, *now}):
        if earlier.get(name) != now.get(name):
            return name, earlier.get(name), now.get(name)
    return None


def digest_of_template(templates: Mapping[str, str] | None) -> str | None:
    return None if templates is None else _digest(repr(sorted(templates.items())).encode())


def _digest_of_model(model: str) -> str | None:
    """Names and sizes of a local model's files, and the contents of small ones; None for a model of the hub."""
    path = Path(model)
    if not path.exists():
        return None
    files = sorted(child for child in path.iterdir() if child.is_file()) if path.is_dir() else [path]
    return _digest(b"".join(_summary(file) for file in files))


def _digest_of_adapter(path: str) -> str:
    """The contents of its two files, wherever they are."""
    directory = Path(path).expanduser()
    try:
        return _digest(b"".join(_digest_of_file(file) for file in adapter_files(directory)))
    except OSError as error:
        raise JobError(f"the adapter in {directory} cannot be read: {reason_of(error)}") from error


def _digest_of_file(path: Path) -> bytes:
    with path.open("rb") as opened:
        return file_digest(opened, "blake2b").digest()


def _summary(file: Path) -> bytes:
    size = file.stat().st_size
    content = file.read_bytes() if size <= SMALL_FILE_BYTES else b""
    return f"{file.name}\0{size}\0{_digest(content)}\0".encode()


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
