"""Evidence of a live server: two scrapes of /metrics, a few seconds apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic, sleep

from headrace.bench.engines import metrics
from headrace.bench.engines.base import EngineFailure
from headrace.bench.engines.http import HttpError, ServerClient
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.snapshots import ScrapeError, Snapshot, evidence_of_snapshots
from headrace.errors import ModelError
from headrace.plan.catalogue import find_entry
from headrace.plan.shape import ModelShape
from headrace.plan.source import shape_of_config
from headrace.scrape.page import Sample

DEFAULT_INTERVAL_S = 10.0


def read_live(
    address: str,
    *,
    interval_s: float = DEFAULT_INTERVAL_S,
    api_key: str | None = None,
    wait: Callable[[float], None] = sleep,
) -> Evidence:
    """Scrape twice. Raises ScrapeError, or EngineFailure if there is no answer."""
    client = ServerClient(address, api_key=api_key)
    before, started = _page(client), monotonic()
    wait(interval_s)
    after, ended = _page(client), monotonic()
    return evidence_of_pages(before, after, seconds=max(1e-9, ended - started), origin=client.address)


def evidence_of_pages(before: str, after: str, *, seconds: float, origin: str) -> Evidence:
    """What happened between two scrapes of one server."""
    found = list(metrics.samples(after))
    return evidence_of_snapshots(
        Snapshot.of_page(metrics.samples(before)),
        Snapshot.of_page(found),
        seconds=seconds,
        origin=origin,
        settings={name: setting.value for name, setting in metrics.settings(after).items()},
        model=_model_of(found),
    )


def _page(client: ServerClient) -> str:
    try:
        return client.get("/metrics").decode(errors="replace")
    except HttpError as error:
        if error.status in (401, 403):
            raise ScrapeError(f"{client.address}/metrics needs a key: set --api-key-env to its variable") from None
        hint = "; is this a server of OpenAI's API without metrics?" if error.status == 404 else ""
        raise ScrapeError(f"{client.address}/metrics answers with status {error.status}{hint}") from None
    except EngineFailure as error:
        raise ScrapeError(str(error)) from error


def _model_of(samples: Iterable[Sample]) -> ModelShape | None:
    """The shape of the served model, if its name is a built-in one."""
    name = next((sample.labels["model_name"] for sample in samples if sample.labels.get("model_name")), None)
    try:
        entry = None if name is None else find_entry(name)
    except ModelError:
        return None
    return None if entry is None else shape_of_config(entry.hub_id, entry.config)
