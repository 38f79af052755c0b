"""Requests for /v2/embed, and the objects that answer them as JSON, in the shapes of Cohere's API."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.models.pooler import DOCUMENT_PROMPTS, QUERY_PROMPTS
from headrace.openai.choices import encode
from headrace.openai.embeddings import MAX_INPUTS, UNSUPPORTED_IN_POOLING, check_pooled
from headrace.openai.errors import bad_request
from headrace.openai.schema.embeddings import CohereEmbedRequest

Embedding = npt.NDArray[np.float32]

DEFAULT_TYPES = ("float",)
# What a text is for, and the names that its prompt may have in sentence-transformers' files.
INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_query": QUERY_PROMPTS,
    "search_document": DOCUMENT_PROMPTS,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
# Cohere's parameters that are refused unless they ask for what is done anyway: see `fields.UNSUPPORTED`.
UNSUPPORTED_IN_EMBED: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_IN_POOLING,
    "images": ([],),
    "inputs": ([],),
    "max_tokens": (),
}


def _signs(embedding: Embedding) -> npt.NDArray[np.uint8]:
    """One bit per number, the first in the highest bit: whether it is positive."""
    return np.packbits(embedding > 0)


ENCODERS: dict[str, Callable[[Embedding], Any]] = {
    "float": lambda embedding: embedding.tolist(),
    "base64": lambda embedding: b64encode(embedding.astype("<f4").tobytes()).decode(),
    "ubinary": lambda embedding: _signs(embedding).tolist(),
    "binary": lambda embedding: (_signs(embedding).astype(np.int16) - 128).tolist(),
}


def check_embed(request: CohereEmbedRequest) -> None:
    check_pooled(request)
    if not 0 < len(request.texts) <= MAX_INPUTS:
        raise bad_request(
            f"texts has {len(request.texts):,} texts; from 1 to {MAX_INPUTS:,} are taken at once", "texts"
        )
    for name in embedding_types(request):
        if name not in ENCODERS:
            raise bad_request(f"embedding_types can have {', '.join(ENCODERS)}, got {name[:40]!r}", "embedding_types")
    if request.input_type is not None and request.input_type not in INPUT_TYPES:
        known = ", ".join(INPUT_TYPES)
        raise bad_request(f"input_type must be one of {known}, got {request.input_type[:40]!r}", "input_type")
    if request.truncate not in (None, "END", "NONE"):
        raise bad_request(f"truncate must be END or NONE, got {request.truncate[:40]!r}", "truncate")


def embedding_types(request: CohereEmbedRequest) -> Sequence[str]:
    return request.embedding_types or DEFAULT_TYPES


def truncation(request: CohereEmbedRequest) -> int | None:
    """As `truncate_prompt_tokens`. By default the start of a text that is too long is embedded, as Cohere does."""
    if request.truncate_prompt_tokens is not None:
        return request.truncate_prompt_tokens
    return None if request.truncate == "NONE" else -1


def embed_body(
    embeddings: Sequence[Embedding], request: CohereEmbedRequest, num_prompt_tokens: int, *, id: str
) -> bytes:
    by_type = {name: [ENCODERS[name](each) for each in embeddings] for name in embedding_types(request)}
    return encode(
        {
            "id": id,
            "response_type": "embeddings_by_type",
            "embeddings": by_type,
            "texts": request.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": num_prompt_tokens}},
        }
    )
