"""Requests for /v1/embeddings, /pooling and /classify, and the objects that answer them as JSON."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.pooling import check_truncation
from headrace.engine.prompts import Prompt
from headrace.openai.choices import encode
from headrace.openai.errors import bad_request
from headrace.openai.prompts import as_prompts
from headrace.openai.sampling import check_label
from headrace.openai.schema.embeddings import ClassifyRequest, EmbeddingRequest, PooledRequest

MAX_INPUTS = 2048  # OpenAI's

# vLLM's parameters that are refused unless they ask for what is done anyway: see `fields.UNSUPPORTED`.
UNSUPPORTED_IN_POOLING: dict[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "padding": ("do_not_pad",),
    "truncation_side": ("right",),
}

_BODY = b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}'
_LIST = (
    b'{"id":"%b","object":"list","created":%d,"model":%b,"data":[%b],'
    b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0,"prompt_tokens_details":null}}'
)
_POOLED = b'{"index":%d,"object":"pooling","data":%b}'
_CLASSES = b'{"index":%d,"label":%b,"probs":%b,"num_classes":%d}'
_ITEM = b'{"object":"embedding","index":%d,"embedding":%b}'


class EmbeddingFormat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="embedding"):
    """How a request wants its embeddings: as numbers, or as base64 of little-endian float32."""

    is_base64: bool = False

    def body(self, embeddings: Sequence[npt.NDArray[np.float32]], model: bytes, num_prompt_tokens: int) -> bytes:
        """`model`: the name as JSON."""
        items = [_ITEM % (index, self.encoded(embedding)) for index, embedding in enumerate(embeddings)]
        return _BODY % (b",".join(items), model, num_prompt_tokens, num_prompt_tokens)

    def encoded(self, embedding: npt.NDArray[np.float32]) -> bytes:
        return b'"%b"' % b64encode(embedding.astype("<f4").tobytes()) if self.is_base64 else encode(embedding.tolist())


def pooling_body(
    values: Sequence[npt.NDArray[np.float32]],
    form: EmbeddingFormat,
    model: bytes,
    num_prompt_tokens: int,
    *,
    id: bytes,
    created: int,
) -> bytes:
    items = [_POOLED % (index, form.encoded(each)) for index, each in enumerate(values)]
    return _LIST % (id, created, model, b",".join(items), num_prompt_tokens, num_prompt_tokens)


def classification_body(
    values: Sequence[npt.NDArray[np.float32]],
    labels: Sequence[str],
    model: bytes,
    num_prompt_tokens: int,
    *,
    id: bytes,
    created: int,
) -> bytes:
    items = [
        _CLASSES % (index, encode(labels[int(each.argmax())]), encode(each.tolist()), len(each))
        for index, each in enumerate(values)
    ]
    return _LIST % (id, created, model, b",".join(items), num_prompt_tokens, num_prompt_tokens)


def embedding_inputs(request: EmbeddingRequest | ClassifyRequest) -> list[Prompt]:
    return as_prompts(request.input, "input", max_prompts=MAX_INPUTS)


def check_pooled(request: PooledRequest) -> None:
    """Checks the fields that all requests of this kind have."""
    for name in ("cache_salt", "request_id"):
        check_label(name, getattr(request, name))
    check_truncation(request.truncate_prompt_tokens)


def embedding_format(request: EmbeddingRequest) -> EmbeddingFormat:
    """Checks the fields beside the input."""
    if request.encoding_format not in (None, "float", "base64"):
        shown = request.encoding_format[:40]
        raise bad_request(f"encoding_format must be float or base64, got {shown!r}", "encoding_format")
    check_pooled(request)
    return EmbeddingFormat(request.encoding_format == "base64")
