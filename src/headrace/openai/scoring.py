"""Requests for /rerank and /score, and the objects that answer them as JSON, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engine.pooling import pair_scores
from headrace.openai.choices import encode
from headrace.openai.embeddings import MAX_INPUTS, check_pooled
from headrace.openai.errors import INVALID_TYPE, MISSING, bad_request
from headrace.openai.schema.embeddings import RerankRequest, ScoreRequest

RERANK_ID_PREFIX = "rerank-"
SCORE_ID_PREFIX = "score-"
_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

_USAGE = b'{"prompt_tokens":%d,"total_tokens":%d}'
_SCORES = b'{"id":"%b","object":"list","created":%d,"model":%b,"data":[%b],"usage":%b}'
_SCORE = b'{"index":%d,"object":"score","score":%b}'
_RANKING = b'{"id":"%b","model":%b,"usage":%b,"results":[%b]}'

Pooled = Sequence[npt.NDArray[np.float32]]


class TextPairs(msgspec.Struct, frozen=True, gc=False):
    """The texts of a request: one first text, or one for each second text."""

    firsts: list[str]
    seconds: list[str]


class ScoreFormat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="score"):
    """`num_first`: see `pair_scores`."""

    num_first: int | None = None

    def body(self, values: Pooled, model: bytes, num_prompt_tokens: int, *, id: bytes, created: int) -> bytes:
        """`id` without its prefix, `model`: the name as JSON."""
        items = [_SCORE % (i, encode(score)) for i, score in enumerate(pair_scores(list(values), self.num_first))]
        usage = _USAGE % (num_prompt_tokens, num_prompt_tokens)
        return _SCORES % (SCORE_ID_PREFIX.encode() + id, created, model, b",".join(items), usage)


class RerankFormat(msgspec.Struct, frozen=True, gc=False, array_like=True, tag="rerank"):
    num_first: int | None = None
    top_n: int | None = None  # None: all
    documents: tuple[str, ...] | None = None  # None: they are not returned

    def body(self, values: Pooled, model: bytes, num_prompt_tokens: int, *, id: bytes, created: int) -> bytes:
        scores = pair_scores(list(values), self.num_first)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        items = [encode(self._result(index, scores[index])) for index in ranked]
        usage = _USAGE % (num_prompt_tokens, num_prompt_tokens)
        return _RANKING % (RERANK_ID_PREFIX.encode() + id, model, usage, b",".join(items))

    def _result(self, index: int, score: float) -> dict[str, Any]:
        shown = {} if self.documents is None else {"document": {"text": self.documents[index], "multi_modal": None}}
        return {"index": index, **shown, "relevance_score": score}


def rerank_texts(request: RerankRequest) -> TextPairs:
    check_pooled(request)
    if not request.documents:
        raise bad_request("documents is an empty list", "documents", "empty_prompt")
    _check_count(request.documents, "documents")
    if request.top_n is not None and request.top_n < 0:
        raise bad_request(f"top_n must be at least 0 (0: all), got {request.top_n}", "top_n")
    documents = [_document(index, given) for index, given in enumerate(request.documents)]
    return TextPairs([request.query], documents)


def rerank_format(request: RerankRequest, pairs: TextPairs) -> RerankFormat:
    shown = None if request.return_documents is False else tuple(pairs.seconds)
    return RerankFormat(None, request.top_n or None, shown)


def score_texts(request: ScoreRequest) -> TextPairs:
    check_pooled(request)
    given = {name for name in ScoreRequest.__struct_fields__ if getattr(request, name) is not None}
    given &= {name for names in _NAMES for name in names}
    found = next((names for names in _NAMES if given == set(names)), None)
    if found is None:
        pairs = ", ".join(" and ".join(names) for names in _NAMES)
        got = ", ".join(sorted(given)) or "none"
        raise bad_request(f"give the two texts as one of these pairs: {pairs}; got {got}", "text_1", MISSING)
    firsts, seconds = (_texts(getattr(request, name), name) for name in found)
    if len(firsts) not in (1, len(seconds)):
        raise bad_request(
            f"{found[0]} has {len(firsts)} texts and {found[1]} {len(seconds)}; give one, or as many", found[0]
        )
    return TextPairs(firsts, seconds)


def _texts(given: str | list[str], param: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not texts:
        raise bad_request(f"{param} is an empty list; give at least one text", param, "empty_prompt")
    _check_count(texts, param)
    return texts


def _document(index: int, given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise bad_request(f"documents[{index}] must be text, or an object with a text", "documents", INVALID_TYPE)
    return text


def _check_count(given: Sequence[Any], param: str) -> None:
    if len(given) > MAX_INPUTS:
        raise bad_request(f"{param} has {len(given):,} texts; at most {MAX_INPUTS:,} are taken at once", param)
