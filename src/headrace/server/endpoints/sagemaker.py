"""/ping and /invocations, which Amazon SageMaker calls: whether the server is alive, and any request of its routes."""

from __future__ import annotations

from headrace.openai.body import decode
from headrace.openai.errors import bad_request
from headrace.server.endpoints import chat, chat_batch, completions, embeddings
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Handler
from headrace.server.services import Services


async def invoke(services: Services, exchange: Exchange) -> None:
    """The answer of the route that takes such a body."""
    body = await exchange.read_body(services.options.max_body_bytes)
    handler = _route_of(decode(body))
    exchange.return_body(body)
    await handler(services, exchange)


def _route_of(given: dict[str, object]) -> Handler:
    messages = given.get("messages")
    if messages is not None:
        is_batch = isinstance(messages, list) and any(isinstance(one, list) for one in messages)
        return chat_batch.create_chat_completions if is_batch else chat.create_chat_completion
    if "prompt" in given:
        return completions.create_completion
    if "input" in given:
        return embeddings.create_embeddings
    raise bad_request("the body must have messages (a chat), prompt (a completion) or input (embeddings)", "messages")
