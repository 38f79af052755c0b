"""Where a model's tokenizer and chat template come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TextSource:
    """The source of a tokenizer: either a directory with tokenizer files, or the metadata of a GGUF file."""

    directory: Path | None = None
    gguf_metadata: Mapping[str, Any] | None = None
