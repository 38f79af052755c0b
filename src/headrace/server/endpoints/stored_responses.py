"""/v1/responses/{id}: responses that were stored, read again, cancelled and deleted."""

from __future__ import annotations

from headrace.openai.errors import bad_request
from headrace.openai.response_items import listed
from headrace.openai.response_output import ID_PREFIXES
from headrace.openai.responses import RESPONSE_ID_PREFIX
from headrace.server.endpoints.background import BackgroundRun
from headrace.server.endpoints.files import MAX_DIGITS, as_list, limit_of, owner_of, query, reply
from headrace.server.http.errors import ApiError
from headrace.server.http.exchange import Exchange
from headrace.server.response_store import StoredResponse
from headrace.server.services import Services

PREFIX = "/v1/responses/"
INPUT_ITEMS = "/input_items"
CANCEL = "/cancel"
DEFAULT_LISTED = 20
MAX_LISTED = 100


async def show_response(services: Services, exchange: Exchange) -> None:
    stored, given = _find(services, exchange), query(exchange)
    if given.get("stream") not in ("true", "True"):
        await reply(exchange, stored.response)
        return
    if not isinstance(stored.run, BackgroundRun):
        raise bad_request("only a response in the background can be streamed again; leave out stream", "stream")
    await stored.run.follow(exchange, after=_starting_after(given.get("starting_after", "-1")))


async def list_input_items(services: Services, exchange: Exchange) -> None:
    stored, given = _find(services, exchange, INPUT_ITEMS), query(exchange)
    limit = limit_of(given, default=DEFAULT_LISTED, most=MAX_LISTED)
    order, after = given.get("order", "desc"), given.get("after")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be 'asc' or 'desc', got {order[:20]!r}", "order")
    start = ID_PREFIXES["message"] + stored.id.removeprefix(RESPONSE_ID_PREFIX)
    items = [listed(item, f"{start}-{index}") for index, item in enumerate(stored.items)]
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad_request(f"after is {after[:80]!r}, which is none of the items", "after")
        items = items[ids.index(after) + 1 :]
    await reply(exchange, as_list(items[: limit + 1], limit))


async def cancel_response(services: Services, exchange: Exchange) -> None:
    stored = _find(services, exchange, CANCEL)
    if stored.run is None:
        raise bad_request(
            "Cannot cancel a synchronous response: only one that was created with background: true", "background"
        )
    await stored.run.cancel()
    await reply(exchange, stored.response)


async def delete_response(services: Services, exchange: Exchange) -> None:
    stored = _find(services, exchange)
    if stored.run is not None:
        await stored.run.cancel()
    services.responses.delete(stored.owner, stored.id)
    await reply(exchange, {"id": stored.id, "object": "response.deleted", "deleted": True})


def _find(services: Services, exchange: Exchange, suffix: str = "") -> StoredResponse:
    id = exchange.path.removeprefix(PREFIX).removesuffix(suffix)
    stored = services.responses.find(owner_of(exchange), id)
    if stored is None:
        raise ApiError(404, f"Response with id {id[:80]!r} not found.", param="response_id", code="not_found")
    return stored


def _starting_after(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isdecimal() or len(digits) > MAX_DIGITS:
        raise bad_request(f"starting_after must be an integer, got {text[:20]!r}", "starting_after")
    return max(-1, int(text))
