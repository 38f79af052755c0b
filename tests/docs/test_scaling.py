"""docs/scaling.md has the series, options and constants of the code, and the table of the committed record."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import routing

from headrace.balance import choice
from headrace.cli.route import build_parser
from headrace.jobs.status.metrics import SERIES as JOB_SERIES
from headrace.monitor.metrics import TARGET_USE
from headrace.monitor.table import SERIES
from headrace.server.route import affinity, desired, health, metrics, upstream

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/scaling.md").read_text(encoding="utf-8")
PROSE = " ".join(PAGE.split())
RECORD = json.loads((ROOT / "benchmarks/results/routing-simulated.json").read_text(encoding="utf-8"))


def test_the_table_is_that_of_the_record() -> None:
    """If this fails, run `python benchmarks/routing.py --markdown benchmarks/results/routing-simulated.json`."""
    assert routing.table(RECORD) in PAGE


def test_the_cost_of_the_router_is_that_of_the_record() -> None:
    cost = RECORD["cost"]
    assert f"about {cost['cpu_us_per_request'] / 1e3:.1f} ms of CPU time per request" in PROSE
    assert f"{cost['cpu_us_per_chunk']:.0f} µs per chunk" in PROSE


def test_the_record_was_made_with_the_constants_of_the_code() -> None:
    assert RECORD["choice"] == {
        "load_factor": choice.LOAD_FACTOR,
        "load_slack": choice.LOAD_SLACK,
        "min_match_share": choice.MIN_MATCH_SHARE,
        "pending_weight": choice.PENDING_WEIGHT,
    }


def test_the_page_has_every_series_of_the_router() -> None:
    others = {series.name for series in SERIES} | {series.shown_name for series in JOB_SERIES}
    documented = set(re.findall(r"`(headrace:[a-z_]+)`", PAGE)) - others
    assert documented == {f"{name}{'_total' if kind == 'counter' else ''}" for name, kind, *_ in metrics.SERIES}


def test_the_page_has_every_option() -> None:
    documented = {
        flag for line in PAGE.splitlines() if line.startswith("| `--") for flag in re.findall(r"`(--[a-z-]+)`", line)
    }
    assert documented == {flag for flag in build_parser().flags if flag.startswith("--")} - {"--help"}


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"chunks of {affinity.CHUNK_BYTES} bytes" in PROSE
    assert (
        f"more than {choice.LOAD_FACTOR:g} times the requests of the least loaded one, plus {choice.LOAD_SLACK:g}"
        in PROSE
    )
    assert choice.MIN_MATCH_SHARE == 0.25 and "a quarter of the prompt" in PROSE
    assert choice.PENDING_WEIGHT == 8 and "count eight times" in PROSE
    assert f"Below {health.DRAIN_BELOW:g} the replica is taken out" in PROSE
    assert (
        (health.MIN_BACKOFF_S, health.MAX_BACKOFF_S) == (1.0, 30.0) and "After 1 s" in PROSE and "up to 30 s" in PROSE
    )
    assert f"at most {upstream.MAX_BUFFERED // 1024} KiB" in PROSE
    assert f"last {desired.WINDOW_S:g} s" in PROSE and desired.HOLD_S == 300 and "the last 5 minutes" in PROSE
    assert desired.TARGET_USE == TARGET_USE, "of the router and of the servers"
    assert f"{desired.TARGET_USE:g} x `max_num_seqs`" in PROSE and f"it is {desired.DEFAULT_TARGET:g} requests" in PROSE
