"""The bodies of the endpoints that pool: /v1/embeddings, /v2/embed, /pooling, /classify, /rerank and /score."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class PooledRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that all of them have, with vLLM's names."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


class EmbeddingRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]  # text, texts, token ids, or lists of token ids
    encoding_format: str | None = None
    dimensions: int | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None  # one of the prompts that sentence-transformers puts before a text


class CohereEmbedRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    texts: list[str]
    input_type: str | None = None
    embedding_types: list[str] | None = None
    output_dimension: int | None = None
    truncate: str | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    task: str | None = None


class ClassifyRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    input: str | list[Any]
    add_special_tokens: bool | None = None


class RerankRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: list[Any]  # texts, or objects with a text
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(PooledRequest, kw_only=True, forbid_unknown_fields=True):
    """Two texts or lists of texts, under one of vLLM's pairs of names."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
