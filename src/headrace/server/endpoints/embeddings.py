"""POST /v1/embeddings: the model's hidden states of prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import monotonic

from headrace.engine.prompts import TokenizedPrompt
from headrace.engine.readouts import PendingEmbedding
from headrace.errors import RequestError
from headrace.openai.body import read
from headrace.openai.choices import encode
from headrace.openai.embeddings import EmbeddingFormat, embedding_format, embedding_inputs
from headrace.openai.schema.embeddings import EmbeddingRequest
from headrace.sched.limits import check_prompt_len
from headrace.server.endpoints.generation import answer_id, cache_salt, check_model, engine_id, run_stream
from headrace.server.endpoints.prompting import estimated_tokens, off_loop, tokenize
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

ID_PREFIX = "embd-"
CHARACTERS_PER_VALUE = 20  # of a number as JSON


async def create_embeddings(services: Services, exchange: Exchange) -> None:
    arrived = monotonic()
    request = read(EmbeddingRequest, await exchange.read_body(services.options.max_body_bytes))
    check_model(services, request.model)
    prompts = embedding_inputs(request)
    form = embedding_format(request)
    settings = services.engine.settings
    # The engine runs no more inputs at once. A longer list takes no more places: its tokens limit what may wait.
    num_places = min(len(prompts), settings.max_num_seqs)
    num_tokens = estimated_tokens(prompts, settings.max_model_len)
    with _input_named(), services.queue.reserve(num_places, num_tokens=num_tokens) as reservation:
        tokenized = await tokenize(services.engine.reader, prompts, add_special_tokens=True, limited_param="input")
        for prompt in tokenized:
            check_prompt_len(len(prompt.token_ids), settings.max_model_len, num_sampled=0)
        reservation.count_tokens(sum(len(prompt.token_ids) for prompt in tokenized))
        pending = _prepared(services, exchange, request, tokenized)
        open_stream = partial(services.engine.open_readouts, pending)
        async with run_stream(services, exchange, pending, open_stream, reservation, arrived=arrived) as stream:
            await stream.wait()
            model = encode(services.model_name)
            num_characters = CHARACTERS_PER_VALUE * sum(len(one.values) for one in pending)
            body = await off_loop(partial(_body, form, pending, model), num_characters=num_characters)
            await exchange.reply(200, body)


def _prepared(
    services: Services, exchange: Exchange, request: EmbeddingRequest, prompts: Sequence[TokenizedPrompt]
) -> list[PendingEmbedding]:
    own_id = engine_id(answer_id(ID_PREFIX, request.request_id, exchange), request.request_id)
    salt = cache_salt(exchange, request.cache_salt)
    return [
        services.engine.prepare_embedding(prompt, f"{own_id}-{position}", cache_salt=salt)
        for position, prompt in enumerate(prompts)
    ]


def _body(form: EmbeddingFormat, pending: Sequence[PendingEmbedding], model: bytes) -> bytes:
    num_tokens = sum(len(one.request.prompt_token_ids) for one in pending)
    return form.body([one.output().embedding for one in pending], model, num_tokens)


@contextmanager
def _input_named() -> Iterator[None]:
    """Errors of the layers below name the prompt as clients do here."""
    try:
        yield
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error), param="input", code=error.code) from None
