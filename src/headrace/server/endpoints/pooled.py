"""What the endpoints of pooling models share: from their texts to the pooled values of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic, time

from headrace.engine.prompts import Prompt, TokenizedPrompt
from headrace.engine.readouts import PendingPooling
from headrace.errors import RequestError
from headrace.models.pooler import PoolerTask
from headrace.openai.choices import encode
from headrace.openai.schema.embeddings import PooledRequest
from headrace.sched.limits import check_prompt_len
from headrace.server.endpoints.generation import (
    answer_id,
    cache_salt,
    check_model,
    engine_id,
    priority_of,
    run_stream,
)
from headrace.server.endpoints.prompting import estimated_tokens, off_loop
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

CHARACTERS_PER_VALUE = 20  # of a number as JSON


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The inputs of a request: `read` makes prompts of them, and runs on a thread if they are long."""

    texts: Sequence[Prompt]
    read: Callable[[], list[TokenizedPrompt]]
    param: str  # the field that errors name


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """The computed requests, and what every answer states."""

    pending: list[PendingPooling]
    id: str
    model: bytes  # the name as JSON
    created: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.request.prompt_token_ids) for one in self.pending)


@asynccontextmanager
async def pooled(
    services: Services,
    exchange: Exchange,
    request: PooledRequest,
    inputs: PooledInputs,
    *,
    task: PoolerTask,
    id_prefix: str,
    use_activation: bool | None = None,
    dimensions: int | None = None,
) -> AsyncIterator[PooledAnswer]:
    """Queues, tokenizes and computes the inputs."""
    arrived = monotonic()
    check_model(services, request.model, generates=False)
    settings = services.engine.settings
    # The engine runs no more inputs at once. A longer list takes no more places: its tokens limit what may wait.
    num_places = min(len(inputs.texts), settings.max_num_seqs)
    num_tokens = estimated_tokens(inputs.texts, settings.max_model_len)
    own_id = answer_id(id_prefix, request.request_id, exchange)
    with _named(inputs.param), services.queue.reserve(num_places, num_tokens=num_tokens) as reservation:
        num_characters = sum(map(len, inputs.texts))
        tokenized = await off_loop(inputs.read, num_characters=num_characters)
        for prompt in tokenized:
            check_prompt_len(len(prompt.token_ids), settings.max_model_len, num_sampled=0)
        reservation.count_tokens(sum(len(prompt.token_ids) for prompt in tokenized))
        engine_ids = engine_id(own_id, request.request_id)
        pending = [
            services.engine.prepare_pooling(
                prompt,
                f"{engine_ids}-{position}",
                task=task,
                use_activation=use_activation,
                dimensions=dimensions,
                priority=priority_of(services, request.priority),
                cache_salt=cache_salt(exchange, request.cache_salt),
                adapter=services.adapter_of(request.model),
            )
            for position, prompt in enumerate(tokenized)
        ]
        open_stream = partial(services.engine.open_readouts, pending)
        async with run_stream(services, exchange, pending, open_stream, reservation, arrived=arrived) as stream:
            await stream.wait()
            yield PooledAnswer(pending, own_id, encode(services.answering(request.model)), int(time()))


async def reply(exchange: Exchange, answer: PooledAnswer, body: Callable[[], bytes]) -> None:
    """Sends the body, which is written on a thread if it is long."""
    num_characters = CHARACTERS_PER_VALUE * sum(len(one.values) for one in answer.pending)
    await exchange.reply(200, await off_loop(body, num_characters=num_characters))


@contextmanager
def _named(param: str) -> Iterator[None]:
    """Errors of the layers below name the prompt as clients do here."""
    try:
        yield
    except RequestError as error:
        if error.param != "prompt":
            raise
        raise RequestError(str(error), param=param, code=error.code) from None
