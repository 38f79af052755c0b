"""POST /rerank and /score, under all their paths: how relevant texts are for a query."""

from __future__ import annotations

import msgspec

from headrace.engine.pooling import check_scoring
from headrace.engine.pooling_prompts import PairPrompts
from headrace.engine.prompts import TokenizedPrompt
from headrace.openai.body import read
from headrace.openai.embeddings import UNSUPPORTED_IN_POOLING
from headrace.openai.schema.embeddings import PooledRequest, RerankRequest, ScoreRequest
from headrace.openai.scoring import (
    RERANK_ID_PREFIX,
    SCORE_ID_PREFIX,
    RerankFormat,
    ScoreFormat,
    TextPairs,
    rerank_format,
    rerank_texts,
    score_texts,
)
from headrace.server.endpoints.pooled import PooledInputs, pooled, reply
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services


async def create_ranking(services: Services, exchange: Exchange) -> None:
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(RerankRequest, body, unsupported=UNSUPPORTED_IN_POOLING)
    pairs = rerank_texts(request)
    form = rerank_format(request, pairs)
    await _reply_with_scores(services, exchange, request, pairs, form, id_prefix=RERANK_ID_PREFIX, param="documents")


async def create_scores(services: Services, exchange: Exchange) -> None:
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(ScoreRequest, body, unsupported=UNSUPPORTED_IN_POOLING)
    pairs = score_texts(request)
    await _reply_with_scores(
        services, exchange, request, pairs, ScoreFormat(), id_prefix=SCORE_ID_PREFIX, param="text_2"
    )


async def _reply_with_scores(
    services: Services,
    exchange: Exchange,
    request: PooledRequest,
    pairs: TextPairs,
    form: ScoreFormat | RerankFormat,
    *,
    id_prefix: str,
    param: str,
) -> None:
    pooler = services.engine.spec.pooler
    check_scoring(pooler)
    assert pooler is not None
    made: list[PairPrompts] = []

    def read_pairs() -> list[TokenizedPrompt]:
        made.append(
            services.engine.pooling_reader.read_pairs(
                pairs.firsts, pairs.seconds, truncate=request.truncate_prompt_tokens, param=param
            )
        )
        return made[0].prompts

    inputs = PooledInputs([*pairs.firsts, *pairs.seconds], read_pairs, param)
    # An embedding model's score is the cosine: its embeddings are normalized.
    activation = request.use_activation if pooler.is_cross_encoder else True
    async with pooled(
        services, exchange, request, inputs, task=pooler.task, id_prefix=id_prefix, use_activation=activation
    ) as answer:
        shaped = msgspec.structs.replace(form, num_first=made[0].num_first)
        values = [one.pooled() for one in answer.pending]
        own_id = answer.id.removeprefix(id_prefix).encode()
        tokens = answer.num_prompt_tokens
        await reply(
            exchange,
            answer,
            lambda: shaped.body(values, answer.model, tokens, id=own_id, created=answer.created),
        )
