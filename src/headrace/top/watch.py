"""Asks a server again and again. Two scrapes give the figures of the interval between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, NamedTuple

from headrace.errors import HeadraceError
from headrace.scrape.client import HttpError, ServerClient
from headrace.scrape.page import Growth, Sample, finite, growth, samples
from headrace.top.figures import Figures, alerts_of, engine_of, figures_of

HISTORY_LEN = 300  # readings
DIAGNOSIS_S = 10.0  # of evidence, if there is that much
MIN_DIAGNOSIS_S = 5.0
TIMEOUT_S = 5.0
NOT_THERE = (401, 403, 404, 405, 501)  # statuses of a path that a server does not have, or does not show us


class _Scrape(NamedTuple):
    at: float  # `time.monotonic`
    text: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at the server: its figures, or why there are none."""

    address: str
    at: float = field(default_factory=time)  # seconds since the Unix epoch
    figures: Figures | None = None
    failure: str | None = None
    down_s: float | None = None  # for how long the server has not been readable
    bottleneck: str | None = None
    alerts: tuple[str, ...] | None = None  # firing ones; None: the server does not evaluate alerts

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "headrace.top/1",
            "address": self.address,
            "at": self.at,
            "failure": self.failure,
            "figures": None if self.figures is None else self.figures.as_json(),
            "bottleneck": self.bottleneck,
            "alerts": None if self.alerts is None else list(self.alerts),
        }


class Watch:
    """Owns the readings of one server. `read` never raises for what the server does."""

    def __init__(self, client: ServerClient, *, clock: Callable[[], float] = monotonic) -> None:
        self._client = client
        self._clock = clock
        self._scrapes: deque[_Scrape] = deque()  # since the server was last away, or restarted
        self._down_since: float | None = None
        self._absent: set[str] = set()  # optional paths that the server does not have
        self.history: deque[Figures | None] = deque(maxlen=HISTORY_LEN)  # None: it was away

    @property
    def address(self) -> str:
        return self._client.address

    def read(self) -> Reading:
        try:
            figures = self._scrape()
        except HeadraceError as error:
            return self._failed(str(error))
        self._down_since = None
        self.history.append(figures)
        return Reading(
            address=self.address, figures=figures, bottleneck=self._bottleneck(), alerts=self._firing_alerts()
        )

    def _failed(self, reason: str) -> Reading:
        now = self._clock()
        self._down_since = now if self._down_since is None else self._down_since
        self._scrapes.clear()
        self._absent.clear()  # the server that comes back may be another version
        self.history.append(None)
        return Reading(address=self.address, failure=reason, down_s=now - self._down_since)

    # ---- the page

    def _scrape(self) -> Figures:
        text = self._page()
        scrape = _Scrape(self._clock(), text, finite(samples(text)))
        engine = engine_of(scrape.samples)
        if engine is None:
            raise HeadraceError(f"{self.address}/metrics has no series of Headrace, vLLM or SGLang")
        grown: Growth | None = None
        seconds = None
        if self._scrapes:
            before = self._scrapes[-1]
            grown, seconds = growth(before.samples, scrape.samples), max(1e-9, scrape.at - before.at)
            if grown.is_restart:
                self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and scrape.at - self._scrapes[1].at >= DIAGNOSIS_S:
            self._scrapes.popleft()
        return figures_of(engine, scrape.samples, grown, seconds)

    def _page(self) -> str:
        try:
            return self._client.get("/metrics").decode(errors="replace")
        except HttpError as error:
            if error.status in (401, 403):
                raise HeadraceError(
                    f"{self.address}/metrics needs a key: set HEADRACE_API_KEY, or name its variable with --api-key-env"
                ) from None
            raise HeadraceError(f"{self.address}/metrics answers with status {error.status}") from None

    # ---- what the server says about itself, if it does

    def _ask(self, path: str) -> Any:
        """The JSON of an optional path; None without one."""
        if path in self._absent:
            return None
        try:
            return self._client.get_json(path)
        except HttpError as error:
            if error.status in NOT_THERE:
                self._absent.add(path)
            return None
        except (HeadraceError, ValueError):
            return None

    def _firing_alerts(self) -> tuple[str, ...] | None:
        document = self._ask("/alerts")
        return None if document is None else tuple(_alert_text(alert) for alert in alerts_of(document))

    def _bottleneck(self) -> str | None:
        document = self._ask("/bottleneck")
        headline = document.get("headline") if isinstance(document, dict) else None
        return str(headline) if headline else self._own_diagnosis()

    def _own_diagnosis(self) -> str | None:
        """What doctor says about the scrapes here, for a server that does not diagnose itself."""
        first, last = self._scrapes[0], self._scrapes[-1]
        if last.at - first.at < MIN_DIAGNOSIS_S:
            return None
        from headrace.doctor.diagnosis import diagnose
        from headrace.doctor.readers.live import evidence_of_pages

        try:
            evidence = evidence_of_pages(first.text, last.text, seconds=last.at - first.at, origin=self.address)
            return diagnose(evidence).headline
        except (HeadraceError, ValueError, ArithmeticError):  # a page with NaN may be beyond doctor's rules
            return None


def _alert_text(alert: Any) -> str:
    labels, annotations = alert.get("labels") or {}, alert.get("annotations") or {}
    name = str(labels.get("alertname", "alert"))
    said = annotations.get("summary") or annotations.get("description")
    severity = f" ({labels['severity']})" if labels.get("severity") else ""
    return f"{name}{severity}: {said}" if said else f"{name}{severity}"
