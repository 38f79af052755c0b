"""POST /v1/chat/completions/batch: the next message of several conversations, as choices of one answer (vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic, time
from typing import Any

import msgspec

from headrace.engine.answer_stream import AnswerStream
from headrace.openai.body import read
from headrace.openai.choices import CHAT_ID_PREFIX, CHAT_OBJECT, completion_body, encode
from headrace.openai.errors import bad_request, not_supported
from headrace.openai.prompts import MAX_PROMPTS
from headrace.openai.sampling import chat_limit, chat_params, check_context, check_num_sequences
from headrace.openai.schema.chat import ChatBatchRequest, ChatRequest
from headrace.openai.usage import Usage
from headrace.server.endpoints.chat import ChatReply, continued, tokenized_chat
from headrace.server.endpoints.completions import truncated
from headrace.server.endpoints.generation import (
    answer_id,
    answer_use_of,
    check_model,
    engine_id,
    limits_of,
    prepared,
    priority_of,
    running,
)
from headrace.server.endpoints.prompting import estimated_tokens
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

_REFUSED: dict[str, tuple[Any, ...]] = {"stream": (False,), "use_beam_search": (False,), "n": (1,), "best_of": (1,)}


async def create_chat_completions(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    body = await exchange.read_body(services.options.max_body_bytes)
    given = read(ChatBatchRequest, body)
    check_model(services, given.model)
    requests = _conversations(given)
    first, priority = requests[0], priority_of(services, given.priority)
    use, limit = answer_use_of(services, first), chat_limit(first)
    params = chat_params(first, limits_of(services), limit, **use.params)
    check_num_sequences(params, len(requests))
    max_model_len = services.engine.settings.max_model_len
    num_tokens = estimated_tokens([[one.messages, use.tool_use.tools] for one in requests], max_model_len)
    with services.queue.reserve(len(requests), num_tokens=num_tokens) as reservation:
        params = await services.engine.compiled(params)
        id = answer_id(CHAT_ID_PREFIX, given.request_id, exchange)
        own_id = engine_id(id, given.request_id)
        replies, answers = [], []
        for position, request in enumerate(requests):
            prompt = await tokenized_chat(request, services, use, num_characters=len(body) // len(requests))
            prompt = truncated(prompt, request, limit, max_model_len)
            check_context(len(prompt.token_ids), limit, max_model_len, prompt_param=f"messages[{position}]")
            is_inside = use.is_inside(prompt.text, continued(request))
            own = use.constrained(params, is_inside, services.engine.get_tokenizer())
            replies.append(ChatReply(request, services, use.format(is_inside), id))
            name = f"{own_id}-{position}"
            answers.append(prepared(services, exchange, request, prompt, own, name, priority=priority))
        reservation.count_tokens(sum(len(each.request.prompt_token_ids) for each in answers))
        async with running(services, exchange, answers, reservation, arrived=arrived) as stream:
            await _BatchReply(replies, id, services.answering(given.model)).whole(exchange, stream)


def _conversations(given: ChatBatchRequest) -> list[ChatRequest]:
    """A request for each conversation."""
    for name, neutral in _REFUSED.items():
        if getattr(given, name) not in (None, *neutral):
            raise not_supported(name, f"{name} is not for batches of conversations; leave it out")
    if not 0 < len(given.messages) <= MAX_PROMPTS:
        raise bad_request(
            f"messages must be 1 to {MAX_PROMPTS:,} conversations, got {len(given.messages):,}", "messages"
        )
    fields = {name: getattr(given, name) for name in given.__struct_fields__ if name != "messages"}
    return [msgspec.structs.replace(ChatRequest(messages=[], **fields), messages=one) for one in given.messages]


@dataclass(frozen=True, slots=True)
class _BatchReply:
    replies: Sequence[ChatReply]
    id: str
    model_name: str

    async def whole(self, exchange: Exchange, stream: AnswerStream) -> None:
        outputs = await stream.outputs()
        usage, choices = Usage.of(outputs), []
        for position, (reply, output) in enumerate(zip(self.replies, outputs, strict=True)):
            answer = replace(output.outputs[0], index=position)
            message = reply.message(answer)
            if reply.has_reasoning:
                usage.num_reasoning = (usage.num_reasoning or 0) + reply.count(message.reasoning)
            choices.append(reply.choice(answer, message))
        name, id = encode(self.model_name), encode(self.id)[1:-1]
        body = completion_body(CHAT_OBJECT, id, int(time()), name, b",".join(choices), usage.to_json())
        await exchange.reply(200, body)
