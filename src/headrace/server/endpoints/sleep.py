"""/sleep, /wake_up and /is_sleeping under vLLM's names: the memory of the engine is freed until it is needed again.

They are off unless the server was started with --enable-sleep-mode. With an admin key they need it. The process of the
engine ends, so a GPU is empty then, its CUDA context included; waking loads the model as at the start. Both levels do
the same here: the weights come from their files, which the operating system usually still has in memory.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qs

import msgspec

from headrace.openai.errors import bad_request, not_supported
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.services import Services

LEVELS = ("1", "2")
MODES = ("abort", "wait")
TAGS = ("weights", "kv_cache")
POLL_S = 0.05  # while requests end


async def sleep(services: Services, exchange: Exchange) -> None:
    """New requests are refused. Those that wait or run are ended, or with `mode=wait` they end first."""
    _check_is_on(services)
    given = _query(exchange, ("level", "mode"))
    level = _one_of("level", given.get("level", ["1"]), LEVELS)
    mode = given.get("mode", ["abort"])
    if mode[-1] == "keep":
        raise not_supported(
            "mode", "mode=keep is not supported: the engine's process ends, and its requests with it; use wait or abort"
        )
    with services.state.going_to_sleep():
        if _one_of("mode", mode, MODES) == "wait":
            while services.queue.num_in_flight:
                await asyncio.sleep(POLL_S)
        services.metrics.sleeping(int(level))
        services.asleep = set(TAGS)
        services.engine.abort_all()
        await services.engine.sleep()
    await _reply(services, exchange)


async def wake_up(services: Services, exchange: Exchange) -> None:
    """With `tags` the engine starts once all of its parts were named: it has no use for one of them alone."""
    _check_is_on(services)
    given = _query(exchange, ("tags",))
    tags = [_one_of("tags", [tag], TAGS) for tag in given.get("tags", TAGS)]
    left = services.asleep - set(tags)
    if not left:
        await services.engine.wake_up()
        services.metrics.sleeping(0)
    services.asleep = left
    await _reply(services, exchange)


async def is_sleeping(services: Services, exchange: Exchange) -> None:
    _check_is_on(services)
    await _reply(services, exchange)


async def _reply(services: Services, exchange: Exchange) -> None:
    await exchange.reply(200, msgspec.json.encode({"is_sleeping": services.engine.phase == "asleep"}))


def _check_is_on(services: Services) -> None:
    if not services.options.enable_sleep_mode:
        raise ApiError(404, "sleeping is off: start the server with --enable-sleep-mode", code="sleep_mode_off")


def _query(exchange: Exchange, known: tuple[str, ...]) -> dict[str, list[str]]:
    found = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    for name in found:
        if name not in known:
            raise bad_request(f"unknown parameter {name[:40]!r}; there are {', '.join(known)}", name[:40])
    return found


def _one_of(name: str, given: list[str], allowed: tuple[str, ...]) -> str:
    if given[-1] not in allowed:
        raise bad_request(f"{name} must be {' or '.join(allowed)}, got {given[-1][:40]!r}", name)
    return given[-1]
