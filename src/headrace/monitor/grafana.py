"""A dashboard for Grafana: a table of panels over the series of `table.py`, under Headrace's or vLLM's names.

`headrace grafana` prints it. Every panel filters by the variables `model` and `instance`; the data source is a variable
too, so that the file can be imported anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from headrace.monitor import table
from headrace.monitor.promql import PREFIXES, Names, alias_of
from headrace.monitor.series import Alias, Series

Show = Literal["value", "rate", "increase", "quantile", "mean", "share"]
Kind = Literal["stat", "timeseries"]

SCHEMA_VERSION = 39  # of Grafana 11; later versions migrate it
GRID_WIDTH = 24
SECTION_HEIGHT, STAT_HEIGHT, CHART_HEIGHT = 1, 4, 8
TITLES: dict[Names, str] = {"headrace": "Headrace", "vllm": "vLLM"}
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WINDOW = "[$__rate_interval]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One query of a panel. `by` keeps labels, which are shown in the legend; `per` is the whole of a share."""

    series: Series
    show: Show = "value"
    legend: str = ""
    by: tuple[str, ...] = ()
    quantile: float = 0.95
    per: Series | None = None

    @property
    def all_series(self) -> tuple[Series, ...]:
        return (self.series,) if self.per is None else (self.series, self.per)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    unit: str  # an id of Grafana's units
    lines: tuple[Line, ...]
    kind: Kind = "timeseries"
    width: int = 8
    max: float | None = None
    red_from: float | None = None  # of a stat

    @property
    def height(self) -> int:
        return STAT_HEIGHT if self.kind == "stat" else CHART_HEIGHT


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


def _stat(title: str, unit: str, line: Line, **options: Any) -> Panel:
    return Panel(title=title, unit=unit, lines=(line,), kind="stat", width=4, **options)


def _percentiles(title: str, series: Series) -> Panel:
    lines = (Line(series=series, show="quantile", quantile=q, legend=f"p{100 * q:g}") for q in (0.5, 0.95, 0.99))
    return Panel(title=title, unit="s", lines=tuple(lines))


def _gpu(title: str, unit: str, series: Series, **options: Any) -> Panel:
    line = Line(series=series, by=("instance", "gpu"), legend="{{instance}} GPU {{gpu}}")
    return Panel(title=title, unit=unit, lines=(line,), width=6, **options)


# Gauges of which the highest is shown where there are several; others are added up.
_NOT_ADDED = (table.KV_USE, table.GPU_UTILIZATION, table.GPU_MEMORY_USED, table.GPU_POWER, table.GPU_TEMPERATURE)
_HITS = Line(series=table.PREFIX_HITS, show="share", per=table.PREFIX_QUERIES, legend="hits")
_KV_USE = Line(series=table.KV_USE, by=("instance",), legend="{{instance}}")

SECTIONS: tuple[Section, ...] = (
    Section(
        "Now",
        (
            _stat("Output tokens/s", "short", Line(series=table.GENERATED_TOKENS, show="rate")),
            _stat("Running requests", "short", Line(series=table.RUNNING)),
            _stat("Waiting requests", "short", Line(series=table.WAITING)),
            _stat("p95 time to first token", "s", Line(series=table.FIRST_TOKEN_SECONDS, show="quantile")),
            _stat("KV cache use", "percentunit", Line(series=table.KV_USE), max=1.0, red_from=0.95),
            _stat("Engines up", "short", Line(series=table.ENGINE_UP)),
        ),
    ),
    Section(
        "Throughput",
        (
            Panel(
                title="Tokens/s",
                unit="short",
                lines=(
                    Line(series=table.GENERATED_TOKENS, show="rate", legend="output"),
                    Line(series=table.PROMPT_TOKENS, show="rate", legend="prompt"),
                ),
            ),
            Panel(
                title="Finished requests/s, by reason",
                unit="reqps",
                lines=(Line(series=table.FINISHED, show="rate", by=("reason",), legend="{{reason}}"),),
            ),
            Panel(
                title="Refused requests/s, by reason",
                unit="reqps",
                lines=(Line(series=table.REFUSED, show="rate", by=("reason",), legend="{{reason}}"),),
            ),
        ),
    ),
    Section(
        "Latency",
        (
            _percentiles("Time to first token", table.FIRST_TOKEN_SECONDS),
            _percentiles("Inter-token latency", table.TOKEN_GAP_SECONDS),
            _percentiles("End-to-end latency", table.END_TO_END_SECONDS),
            Panel(
                title="What the time to first token is made of, p95",
                unit="s",
                lines=(
                    Line(series=table.QUEUE_SECONDS, show="quantile", legend="queue"),
                    Line(series=table.PREFILL_SECONDS, show="quantile", legend="prefill"),
                ),
            ),
            Panel(
                title="Step time, mean",
                unit="s",
                lines=(
                    Line(series=table.STEP_SECONDS, show="mean", legend="step"),
                    Line(series=table.STEP_HOST_SECONDS, show="mean", legend="host part of it"),
                ),
            ),
            Panel(
                title="Event loop lag, p95",
                unit="s",
                lines=(Line(series=table.LOOP_LAG, show="quantile", legend="lag"),),
            ),
        ),
    ),
    Section(
        "Load and cache",
        (
            Panel(
                title="Requests",
                unit="short",
                lines=(Line(series=table.RUNNING, legend="running"), Line(series=table.WAITING, legend="waiting")),
            ),
            Panel(title="KV cache use", unit="percentunit", lines=(_KV_USE,), max=1.0),
            Panel(title="Prefix cache hits, share of prompt tokens", unit="percentunit", lines=(_HITS,), max=1.0),
            Panel(
                title="Preemptions/s",
                unit="ops",
                lines=(Line(series=table.PREEMPTIONS, show="rate", legend="preemptions"),),
            ),
            Panel(
                title="Tokens per request, mean",
                unit="short",
                lines=(
                    Line(series=table.PROMPT_LENGTHS, show="mean", legend="prompt"),
                    Line(series=table.ANSWER_LENGTHS, show="mean", legend="answer"),
                ),
            ),
            Panel(
                title="Tokens per step, mean",
                unit="short",
                lines=(Line(series=table.ITERATION_TOKENS, show="mean", legend="tokens"),),
            ),
        ),
    ),
    Section(
        "Errors",
        (
            Panel(
                title="HTTP responses/s, by status",
                unit="reqps",
                lines=(Line(series=table.ANSWERED, show="rate", by=("status",), legend="{{status}}"),),
                width=12,
            ),
            Panel(
                title="Engine restarts",
                unit="short",
                lines=(Line(series=table.RESTARTS, show="increase", by=("instance",), legend="{{instance}}"),),
                width=12,
            ),
        ),
    ),
    Section(
        "GPU",
        (
            _gpu("GPU utilisation", "percentunit", table.GPU_UTILIZATION, max=1.0),
            _gpu("GPU memory", "bytes", table.GPU_MEMORY_USED),
            _gpu("GPU power", "watt", table.GPU_POWER),
            _gpu("GPU temperature", "celsius", table.GPU_TEMPERATURE),
        ),
    ),
)


def dashboard(names: Names = "headrace") -> dict[str, Any]:
    """The content of the file. Panels whose series vLLM does not have are left out for `vllm`."""
    title = TITLES[names]
    return {
        "uid": names,
        "title": title,
        "description": f"What a {title} server does. Written by `headrace grafana`.",
        "tags": ["llm", names],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # one cursor in all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(names)},
        "annotations": {"list": [_alert_annotation(names)]},
        "panels": list(_laid_out(_sections(names), names)),
    }


def omitted(names: Names) -> list[str]:
    """Titles of panels without any line under these names."""
    return [panel.title for section in SECTIONS for panel in section.panels if not _lines(panel, names)]


# ---- queries


def expression(line: Line, names: Names = "headrace") -> str:
    """The query of a line in PromQL, with Grafana's variables."""

    def rate(series: Series, suffix: str = "", function: str = "rate") -> str:
        return _summed(line, f"{function}({_selector(series, names, suffix)}{WINDOW})", names)

    match line.show:
        case "value":
            return _summed(line, _selector(line.series, names), names, "max" if line.series in _NOT_ADDED else "sum")
        case "rate":
            return rate(line.series)
        case "increase":
            return rate(line.series, function="increase")
        case "quantile":
            buckets = f"rate({_selector(line.series, names, '_bucket')}{WINDOW})"
            return f"histogram_quantile({line.quantile:g}, sum by (le) ({buckets}))"
        case "mean":
            return f"{rate(line.series, '_sum')} / {rate(line.series, '_count')}"
        case "share":
            assert line.per is not None, "a share has a whole"
            return f"{rate(line.series)} / {rate(line.per)}"


def _selector(series: Series, names: Names, suffix: str = "") -> str:
    alias = _alias(series, names)
    name = alias.name + ("_total" if series.kind == "counter" else suffix)
    return f'{name}{{model_name=~"$model", instance=~"$instance"}}'


def _summed(line: Line, text: str, names: Names, function: str = "sum") -> str:
    alias = _alias(line.series, names)
    labels = ", ".join(alias.labels.get(label, label) for label in line.by)
    return f"{function} by ({labels}) ({text})" if labels else f"{function}({text})"


def _alias(series: Series, names: Names) -> Alias:
    alias = alias_of(series, names)
    assert alias is not None, f"{series.name} has no such name"
    return alias


def _lines(panel: Panel, names: Names) -> list[Line]:
    return [line for line in panel.lines if all(alias_of(series, names) is not None for series in line.all_series)]


# ---- the file


def _sections(names: Names) -> Iterator[tuple[str, list[Panel]]]:
    for section in SECTIONS:
        panels = [panel for panel in section.panels if _lines(panel, names)]
        if panels:
            yield section.title, panels


def _laid_out(sections: Iterable[tuple[str, list[Panel]]], names: Names) -> Iterator[dict[str, Any]]:
    """Panels from left to right and from top to bottom, below the title of their section."""
    number, top = 1, 0
    for title, panels in sections:
        place = {"x": 0, "y": top, "w": GRID_WIDTH, "h": SECTION_HEIGHT}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        number, top, left, height = number + 1, top + SECTION_HEIGHT, 0, 0
        for panel in panels:
            if left + panel.width > GRID_WIDTH:
                top, left, height = top + height, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, place, names)
            number, left, height = number + 1, left + panel.width, max(height, panel.height)
        top += height


def _panel(panel: Panel, number: int, place: dict[str, int], names: Names) -> dict[str, Any]:
    lines = _lines(panel, names)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.max is not None:
        defaults["max"] = panel.max
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_from is not None:
        steps.append({"color": "red", "value": panel.red_from})
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        defaults["custom"] = {"drawStyle": "line", "fillOpacity": 10, "showPoints": "never"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": " ".join(dict.fromkeys(line.series.help for line in lines)),
        "datasource": DATA_SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(line, letter, names) for line, letter in zip(lines, ascii_uppercase, strict=False)],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "graphMode": "area"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "none"}}


def _target(line: Line, letter: str, names: Names) -> dict[str, Any]:
    legend = line.legend
    for ours, theirs in _alias(line.series, names).labels.items():
        legend = legend.replace(f"{{{{{ours}}}}}", f"{{{{{theirs}}}}}")
    return {
        "refId": letter,
        "datasource": DATA_SOURCE,
        "expr": expression(line, names),
        "legendFormat": legend,
        "range": True,
    }


def _variables(names: Names) -> list[dict[str, Any]]:
    running = _alias(table.RUNNING, names).name
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    models = _variable("model", "Model", f"label_values({running}, model_name)")
    instances = _variable("instance", "Server", f'label_values({running}{{model_name=~"$model"}}, instance)')
    return [source, models, instances]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # whenever the time range changes
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _alert_annotation(names: Names) -> dict[str, Any]:
    """Marks where an alert of `headrace alerts` fires."""
    return {
        "name": "Alerts",
        "datasource": DATA_SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f'ALERTS{{alertname=~"{PREFIXES[names]}.*", alertstate="firing", instance=~"$instance|"}}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{instance}} {{severity}}",
    }
