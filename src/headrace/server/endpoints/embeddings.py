"""POST /v1/embeddings, /v2/embed, /pooling and /classify: what a model makes of whole prompts."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from headrace.engine.pooling import check_dimensions, check_task
from headrace.models.pooler import PoolerTask
from headrace.openai.body import read
from headrace.openai.cohere import INPUT_TYPES, UNSUPPORTED_IN_EMBED, check_embed, embed_body, truncation
from headrace.openai.embeddings import (
    UNSUPPORTED_IN_POOLING,
    check_pooled,
    classification_body,
    embedding_format,
    embedding_inputs,
    pooling_body,
)
from headrace.openai.errors import bad_request
from headrace.openai.schema.embeddings import ClassifyRequest, CohereEmbedRequest, EmbeddingRequest, PoolingRequest
from headrace.server.endpoints.pooled import PooledInputs, pooled, reply
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

Asked = TypeVar("Asked", EmbeddingRequest, PoolingRequest, ClassifyRequest)

EMBEDDING_ID_PREFIX = "embd-"
POOLING_ID_PREFIX = "pool-"
CLASSIFY_ID_PREFIX = "classify-"


async def create_embeddings(services: Services, exchange: Exchange) -> None:
    request = await _read(services, exchange, EmbeddingRequest)
    inputs, form = _inputs(services, request), embedding_format(request)
    check_task(services.engine.spec.pooler, "embed")
    check_dimensions(services.engine.spec.pooler, request.dimensions)
    async with pooled(
        services,
        exchange,
        request,
        inputs,
        task="embed",
        id_prefix=EMBEDDING_ID_PREFIX,
        use_activation=request.use_activation,
        dimensions=request.dimensions,
    ) as answer:
        await reply(
            exchange,
            answer,
            lambda: form.body([one.pooled() for one in answer.pending], answer.model, answer.num_prompt_tokens),
        )


async def create_cohere_embeddings(services: Services, exchange: Exchange) -> None:
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(CohereEmbedRequest, body, unsupported=UNSUPPORTED_IN_EMBED)
    check_embed(request)
    check_task(services.engine.spec.pooler, "embed")
    check_dimensions(services.engine.spec.pooler, request.output_dimension)
    read_texts = partial(
        services.engine.pooling_reader.read_role,
        request.texts,
        prompt_names=INPUT_TYPES.get(request.input_type or "", ()),
        truncate=truncation(request),
        param="texts",
    )
    async with pooled(
        services,
        exchange,
        request,
        PooledInputs(request.texts, read_texts, "texts"),
        task="embed",
        id_prefix=EMBEDDING_ID_PREFIX,
        use_activation=request.use_activation,
        dimensions=request.output_dimension,
    ) as answer:
        values = [one.pooled() for one in answer.pending]
        await reply(exchange, answer, partial(embed_body, values, request, answer.num_prompt_tokens, id=answer.id))


async def create_pooling(services: Services, exchange: Exchange) -> None:
    request = await _read(services, exchange, PoolingRequest)
    pooler = services.engine.spec.pooler
    if pooler is None:
        raise bad_request(
            "this model does not support pooling: it generates text; use /v1/embeddings, or start it with --runner "
            "pooling",
            "model",
            "unsupported_model",
        )
    task: PoolerTask = pooler.task
    if request.task is not None:
        check_task(pooler, request.task)
    form = embedding_format(request)
    check_dimensions(pooler, request.dimensions)
    async with pooled(
        services,
        exchange,
        request,
        _inputs(services, request),
        task=task,
        id_prefix=POOLING_ID_PREFIX,
        use_activation=request.use_activation,
        dimensions=request.dimensions,
    ) as answer:
        values = [one.pooled() for one in answer.pending]
        body = partial(
            pooling_body,
            values,
            form,
            answer.model,
            answer.num_prompt_tokens,
            id=answer.id.encode(),
            created=answer.created,
        )
        await reply(exchange, answer, body)


async def create_classification(services: Services, exchange: Exchange) -> None:
    request = await _read(services, exchange, ClassifyRequest)
    pooler = services.engine.spec.pooler
    check_task(pooler, "classify")
    assert pooler is not None
    check_pooled(request)
    async with pooled(
        services,
        exchange,
        request,
        _inputs(services, request),
        task="classify",
        id_prefix=CLASSIFY_ID_PREFIX,
        use_activation=request.use_activation,
    ) as answer:
        values = [one.pooled() for one in answer.pending]
        body = partial(
            classification_body,
            values,
            pooler.labels,
            answer.model,
            answer.num_prompt_tokens,
            id=answer.id.encode(),
            created=answer.created,
        )
        await reply(exchange, answer, body)


async def _read(services: Services, exchange: Exchange, kind: type[Asked]) -> Asked:
    body = await exchange.read_body(services.options.max_body_bytes)
    return read(kind, body, unsupported=UNSUPPORTED_IN_POOLING)


def _inputs(services: Services, request: EmbeddingRequest | ClassifyRequest) -> PooledInputs:
    prompts = embedding_inputs(request)
    special = request.add_special_tokens
    read_prompts = partial(
        services.engine.pooling_reader.read,
        prompts,
        prompt_name=getattr(request, "prompt_name", None),
        truncate=request.truncate_prompt_tokens,
        add_special_tokens=True if special is None else special,
        param="input",
    )
    return PooledInputs(prompts, read_prompts, "input")
