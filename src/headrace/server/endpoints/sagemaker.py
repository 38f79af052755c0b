"""/ping and /invocations, which Amazon SageMaker calls: whether the server is alive, and any request of its routes."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from headrace.openai.body import decode
from headrace.openai.errors import bad_request
from headrace.server.endpoints import chat, chat_batch, completions, embeddings, scoring
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.http.routes import Handler
from headrace.server.sagemaker_sessions import SESSION, VARIABLE, SageMakerSessions
from headrace.server.services import Services

REQUEST_TYPE = "requestType"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
NEW_SESSION, CLOSED_SESSION = "X-Amzn-SageMaker-New-Session-Id", "X-Amzn-SageMaker-Closed-Session-Id"


async def invoke(services: Services, exchange: Exchange) -> None:
    """The answer of the route that takes such a body. A header may name the adapter instead of `model`."""
    body = await exchange.read_body(services.options.max_body_bytes)
    given = decode(body)
    if await _handle_session(services.sagemaker_sessions, exchange, given):
        return
    pooler = services.engine.spec.pooler
    handler = _route_of(given, is_classifier=pooler is not None and pooler.task == "classify")
    adapter = exchange.header(ADAPTER.lower().encode())
    exchange.return_body(
        body if adapter is None else msgspec.json.encode({**given, "model": adapter.decode("latin-1")})
    )
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


async def _handle_session(sessions: SageMakerSessions | None, exchange: Exchange, given: dict[str, object]) -> bool:
    """Answer a request that opens or closes a session, and check that of any other; tells whether it was answered."""
    header = exchange.header(SESSION.lower().encode())
    name = None if header is None else header.decode("latin-1")
    kind = given.get(REQUEST_TYPE)
    if kind is None and name is None:
        return False
    if sessions is None:
        raise bad_request(f"sessions are off: set {VARIABLE}=true for the server", REQUEST_TYPE)
    if kind is None:
        assert name is not None
        sessions.check(name)
        return False
    if len(given) > 1:
        raise bad_request(f"a request with {REQUEST_TYPE} can have nothing else", REQUEST_TYPE)
    if kind == "NEW_SESSION":
        new, end = sessions.open()
        expires = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await _reply(exchange, f"Session {new} created", {NEW_SESSION: f"{new}; Expires={expires}"})
    elif kind == "CLOSE":
        if name is None:
            raise ApiError(424, f"invalid session_id: the header {SESSION} is missing", code="invalid_session")
        sessions.close(name)
        await _reply(exchange, f"Session {name} closed", {CLOSED_SESSION: name})
    else:
        raise bad_request(f"{REQUEST_TYPE} must be NEW_SESSION or CLOSE, got {kind!r}", REQUEST_TYPE)
    return True


async def _reply(exchange: Exchange, text: str, headers: dict[str, str]) -> None:
    await exchange.reply(200, text.encode(), content_type="text/plain", headers=headers)
