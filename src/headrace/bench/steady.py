r"""Where the warm-up of a run ends and its drain begins, from the times of its chunks.

    tokens/s
       |          ____________________            steady: throughput is flat, clients are all at work
       |      ___/                    \
       |  ___/  warm-up         drain  \___       drain: from the last request that was sent
       +---------------------------------------> time, in bins of about one request's duration

The warm-up's end is found by MSER: of all starts, the one whose remaining bins have the smallest variance per bin;
bins that do not differ from the rest by more than the noise are taken back. What remains must then be flat: its two
halves agree within TOLERANCE or within the noise, and the number of requests in flight does not keep growing, as it
does in an open loop above the server's capacity. If not, there is no steady state, and the window says why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.bench.outcomes import Outcome, answered
from headrace.bench.slo import Slo
from headrace.bench.summary import summarize

TOLERANCE = 0.02  # share of the mean throughput
MAX_BINS = 60  # of a run: shorter bins show noise
MIN_BINS = 10  # before the drain: fewer show nothing
MIN_SHARE = 0.25  # of the bins must remain, or the run was mostly warm-up
MAX_ERROR = 0.05  # standard error of the mean throughput, as a share of it
NUM_ERRORS = 3.0  # standard errors that count as noise
MAX_CORRELATION = 0.6  # of neighbouring bins, whose requests overlap; a trend would show a larger one
MAX_GROWTH = 1.5  # of requests in flight, from the first quarter of the window to its last
MIN_GROWTH = 4.0  # requests: growth by fewer is noise
MIN_REQUESTS = 10  # that end within the window


@dataclass(frozen=True)
class Window:
    """The steady part of a run, or the whole of it with the reason why there is none. Times as in outcomes."""

    start_s: float
    end_s: float
    is_steady: bool
    reason: str  # a sentence
    bin_s: float | None = None  # the resolution of start_s and end_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def has(self, at_s: float) -> bool:
        return self.start_s <= at_s < self.end_s

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("start_s", "end_s", "is_steady", "reason", "bin_s")}


def steady_window(outcomes: Sequence[Outcome]) -> Window:
    """Find the steady part of a closed or open loop."""
    ok = answered(outcomes)
    if not ok:
        return Window(0.0, 0.0, False, "no steady state: no request was answered")
    whole = max(outcome.end_s for outcome in ok)
    # The drain begins with the last send: from there on, fewer and fewer requests are in flight.
    drain = max(outcome.sent_s for outcome in ok)
    bin_s = _bin_s(ok, drain)
    num_bins = int(drain / bin_s + 1e-9) if bin_s > 0 else 0

    def none(why: str) -> Window:
        return Window(0.0, whole, False, f"no steady state: {why}", bin_s or None)

    if num_bins < MIN_BINS:
        return none(
            f"requests were sent for {drain:.3g} s only, {num_bins} times the duration of one; "
            f"{MIN_BINS} times are needed to see it"
        )
    rates = throughput(ok, bin_s, num_bins)
    num_cut = _warm_up(rates)
    if num_cut is None:
        return none("throughput kept changing until the end of the run, which needs to be longer")
    rest = rates[num_cut:]
    window = Window(num_cut * bin_s, num_bins * bin_s, True, _reason(num_cut, bin_s, rest), bin_s)
    if (why := _why_not(ok, window, rest)) is not None:
        return none(why)
    return window


def summarize_window(outcomes: Sequence[Outcome], window: Window, slo: Slo | None = None) -> dict[str, Any]:
    """The figures of a window: rates of what ended or arrived within it, latencies of requests that were due within it.

    Latencies of all that ended would include requests sent during the warm-up; rates of all that were due would be the
    rate of an open loop and not of the server.
    """
    ended = summarize([outcome for outcome in outcomes if window.has(outcome.end_s)], window.seconds)
    due = summarize([outcome for outcome in outcomes if window.has(outcome.due_s)], window.seconds, slo)
    latencies = {name: due[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "slo") if name in due}
    num_tokens = sum(weight for outcome in answered(outcomes) for at, weight in _tokens(outcome) if window.has(at))
    rate = num_tokens / window.seconds if window.seconds else 0.0
    return ended | latencies | {"output_tokens_per_s": rate}


def throughput(outcomes: Sequence[Outcome], bin_s: float, num_bins: int) -> list[float]:
    """Output tokens/s of answered requests in each bin."""
    bins = [0.0] * num_bins
    for outcome in outcomes:
        for at, weight in _tokens(outcome):
            place = int(at / bin_s)
            if 0 <= place < num_bins:
                bins[place] += weight / bin_s
    return bins


def in_flight(outcomes: Sequence[Outcome], bin_s: float, num_bins: int) -> list[float]:
    """The mean number of requests in flight in each bin."""
    bins = [0.0] * num_bins
    for outcome in outcomes:
        first, last = max(0, int(outcome.due_s / bin_s)), min(num_bins - 1, int(outcome.end_s / bin_s))
        for place in range(first, last + 1):
            overlap = min(outcome.end_s, (place + 1) * bin_s) - max(outcome.due_s, place * bin_s)
            bins[place] += max(0.0, overlap) / bin_s
    return bins


def _tokens(outcome: Outcome) -> list[tuple[float, float]]:
    """When tokens arrived and how many: chunks hold equal numbers of them, as far as a client can tell."""
    if not outcome.chunk_s:
        return [(outcome.end_s, float(outcome.num_output_tokens))]
    weight = outcome.num_output_tokens / len(outcome.chunk_s)
    return [(at, weight) for at in outcome.chunk_s]


def _bin_s(outcomes: Sequence[Outcome], drain: float) -> float:
    """About the duration of a request: clients that started together stay in step, and a bin averages over that."""
    duration = statistics.median(outcome.end_s - outcome.sent_s for outcome in outcomes)
    return max(drain / MAX_BINS, min(duration, drain / MIN_BINS))


def _warm_up(rates: Sequence[float]) -> int | None:
    """How many bins the warm-up has; None if it never ends."""
    limit = len(rates) - max(MIN_BINS // 2, math.ceil(MIN_SHARE * len(rates)))
    found = min(range(limit + 1), key=lambda start: _mser(rates[start:]))
    # The minimum is flat, so it is often too late. The warm-up ends where bins begin to agree with the rest: the next
    # one, the next three, and all up to the minimum.
    rest = rates[found:]
    level, noise = statistics.fmean(rest), _noise(rest)

    def agree(some: Sequence[float]) -> bool:
        error = noise * math.sqrt(1 / len(some) + 1 / len(rest))
        return abs(statistics.fmean(some) - level) <= max(TOLERANCE * level, NUM_ERRORS * error)

    start = 0
    while start < found and not all(agree(rates[start:end]) for end in (start + 1, min(start + 3, found), found)):
        start += 1
    # A pause in the middle of a flat run is no warm-up: most of what comes before it is as the rest.
    if start == 0 or agree([statistics.median(rates[:start])] * start):
        return 0
    return None if start == limit else start


def _mser(rest: Sequence[float]) -> float:
    mean = sum(rest) / len(rest)
    return sum((rate - mean) ** 2 for rate in rest) / len(rest) ** 2


def _differ(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two means differ by more than TOLERANCE and by more than the noise."""
    apart = abs(statistics.fmean(some) - statistics.fmean(others))
    # Few bins show little of their own noise: the noisier part speaks for both.
    noise = max(map(_noise, (some, others))) * math.sqrt(1 / len(some) + 1 / len(others))
    return apart > TOLERANCE * statistics.fmean(others) and apart > NUM_ERRORS * noise


def _noise(rates: Sequence[float]) -> float:
    """The standard deviation, made larger by the correlation of neighbours: divided by the root of the number of bins,
    it is the standard error of the mean."""
    if len(rates) < 3:
        return 0.0
    mean, deviation = statistics.fmean(rates), statistics.stdev(rates)
    if deviation == 0:
        return 0.0
    lagged = sum((one - mean) * (next_one - mean) for one, next_one in pairwise(rates))
    correlation = max(0.0, min(MAX_CORRELATION, lagged / (deviation**2 * len(rates))))
    return deviation * math.sqrt((1 + correlation) / (1 - correlation))


def _error(rates: Sequence[float]) -> float:
    return _noise(rates) / math.sqrt(len(rates))


def _why_not(ok: Sequence[Outcome], window: Window, rest: Sequence[float]) -> str | None:
    """Why the rest of a run is not steady."""
    half, mean, bin_s = len(rest) // 2, statistics.fmean(rest), window.bin_s or 1.0
    if mean <= 0:
        return "no tokens arrived"
    if _differ(rest[:half], rest[half:]):
        change = statistics.fmean(rest[half:]) / statistics.fmean(rest[:half]) - 1 if any(rest[:half]) else math.inf
        return f"throughput still changed by {change:+.1%} from one half of the window to the other"
    if _error(rest) > MAX_ERROR * mean:
        return f"throughput varies too much: its mean is known to ±{_error(rest) / mean:.0%} only"
    num_bins = round(window.end_s / bin_s)
    quarters = _quarters(in_flight(ok, bin_s, num_bins)[-len(rest) :])
    grows = all(later > earlier for earlier, later in pairwise(quarters))
    if grows and quarters[-1] > MAX_GROWTH * quarters[0] and quarters[-1] - quarters[0] > MIN_GROWTH:
        return (
            f"requests in flight grew from {quarters[0]:.0f} to {quarters[-1]:.0f}: they arrive faster than the "
            "server answers, and latencies depend on the length of the run"
        )
    num_ended = sum(window.has(outcome.end_s) for outcome in ok)
    if num_ended < MIN_REQUESTS:
        return f"only {num_ended} requests ended in the window, {MIN_REQUESTS} are needed"
    return None


def _quarters(values: Sequence[float]) -> list[float]:
    edges = [len(values) * part // 4 for part in range(5)]
    return [statistics.fmean(values[start:end] or [0.0]) for start, end in pairwise(edges)]


def _reason(num_cut: int, bin_s: float, rest: Sequence[float]) -> str:
    warm_up = f"warm-up of {num_cut * bin_s:.3g} s left out" if num_cut else "no warm-up seen"
    mean = statistics.fmean(rest)
    error = f"{_error(rest) / mean:.1%}" if mean else "0%"
    return f"{warm_up}; throughput is flat over {len(rest)} bins of {bin_s:.3g} s (standard error {error})"
