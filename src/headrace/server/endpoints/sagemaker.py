"""/ping and /invocations, which Amazon SageMaker calls: whether the server is alive, and any request of its routes."""

from __future__ import annotations

from headrace.openai.body import decode
from headrace.openai.errors import bad_request
from headrace.server.endpoints import chat, chat_batch, completions, embeddings, scoring
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Handler
from headrace.server.services import Services


async def invoke(services: Services, exchange: Exchange) -> None:
    """The answer of the route that takes such a body."""
    body = await exchange.read_body(services.options.max_body_bytes)
    pooler = services.engine.spec.pooler
    handler = _route_of(decode(body), is_classifier=pooler is not None and pooler.task == "classify")
    exchange.return_body(body)
    await handler(services, exchange)


def _route_of(given: dict[str, object], *, is_classifier: bool) -> Handler:
    messages = given.get("messages")
    if messages is not None:
        is_batch = isinstance(messages, list) and any(isinstance(one, list) for one in messages)
        return chat_batch.create_chat_completions if is_batch else chat.create_chat_completion
    if "prompt" in given:
        return completions.create_completion
    if "input" in given:
        return embeddings.create_classification if is_classifier else embeddings.create_embeddings
    if "query" in given:
        return scoring.create_ranking
    if given.keys() & {"text_1", "queries", "data_1"}:
        return scoring.create_scores
    raise bad_request(
        "the body must have messages (a chat), prompt (a completion), input (embeddings or classes), query (a ranking) "
        "or text_1 (scores)",
        "messages",
    )
