"""/tokenize, /detokenize and /tokenizer_info: the tokenizer by itself."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.openai.body import read
from headrace.openai.errors import bad_request
from headrace.openai.schema.tokenize import DetokenizeRequest, TokenizeRequest
from headrace.server.endpoints.generation import check_model
from headrace.server.endpoints.prompting import estimated_tokens, off_loop, tokenize, tokenize_chat
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services


async def tokenize_text(services: Services, exchange: Exchange) -> None:
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(TokenizeRequest, body)
    check_model(services, request.model)
    given = [request.prompt, request.messages, request.tools]
    with services.queue.reserve(1, num_tokens=estimated_tokens([given], services.engine.settings.max_model_len)):
        tokens = await _tokens(services, request, num_characters=len(body))
    reply: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": services.engine.settings.max_model_len,
        "tokens": tokens,
        "token_strs": None,
    }
    if request.return_token_strs:
        tokenizer = services.engine.get_tokenizer()
        reply["token_strs"] = [tokenizer.token(token) for token in tokens]
    await exchange.reply(200, msgspec.json.encode(reply))


async def _tokens(services: Services, request: TokenizeRequest, *, num_characters: int) -> list[int]:
    reader = services.engine.reader
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if request.messages is not None:
        prompt = await tokenize_chat(
            reader,
            request.messages,
            num_characters=num_characters,
            limited_param=None,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=bool(request.continue_final_message),
            add_special_tokens=bool(request.add_special_tokens),
            variables=request.chat_template_kwargs,
        )
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(request, name):
                raise bad_request(f"{name} is for messages", name)
        special = request.add_special_tokens is not False
        (prompt,) = await tokenize(reader, [request.prompt or ""], add_special_tokens=special, limited_param=None)
    tokens: list[int] = prompt.token_ids.tolist()
    return tokens


async def detokenize(services: Services, exchange: Exchange) -> None:
    body = await exchange.read_body(services.options.max_body_bytes)
    request = read(DetokenizeRequest, body)
    check_model(services, request.model)
    tokenizer = services.engine.get_tokenizer()
    for token in request.tokens:
        if not 0 <= token < 2**31:
            raise bad_request(f"token id {token} is out of vocabulary", "tokens")
    with services.queue.reserve():  # token ids to decode are no prompt
        text = await off_loop(lambda: tokenizer.decode(request.tokens, False), num_characters=len(body))
    await exchange.reply(200, msgspec.json.encode({"prompt": text}))


async def tokenizer_info(services: Services, exchange: Exchange) -> None:
    """What a client needs to tokenize as the model does, under the names of `tokenizer_config.json`."""
    tokenizer = services.engine.get_tokenizer()
    template = tokenizer.chat_template
    templates = {} if template is None else template.templates
    await exchange.reply(
        200,
        msgspec.json.encode(
            {
                "tokenizer_class": "headrace.Tokenizer",
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": services.engine.settings.max_model_len,
                "bos_token": None,
                "eos_token": None,
                "pad_token": None,
                **tokenizer.special_tokens,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "eos_token_ids": tokenizer.eos_token_ids,
                "chat_template": templates.get("default", next(iter(templates.values()), None)),
            }
        ),
    )
