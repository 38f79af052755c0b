"""Synthetic records of tunes, as `headrace tune` writes them: a seeded machine with noise, and known true ratios."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.statistics import ratio_of_rounds
from headrace.bench.sweep import SweepConfig
from headrace.bench.sweep.settings_file import settings_file
from tests.bench.records import base_record

NUM_CONFIRM_ROUNDS = 6
OOM = {
    "stage": "start",
    "kind": "oom",
    "message": "the KV cache needs 31.2 GiB, and 22.4 GiB are free",
    "log_tail": "loading weights\nallocating the KV cache\nout of memory",
}
BAD_SETTING = {"stage": "start", "kind": "bad_setting", "message": "block_size must be 16 or 32", "log_tail": ""}


@dataclass(frozen=True)
class Planned:
    """A config with its true ratio to the default, or its failure."""

    settings: Mapping[str, Any]
    ratio: float = 1.0
    failure: Mapping[str, Any] | None = None
    ruled_out_by: Mapping[str, Any] | None = None
    origin: str = "shortlist"
    rungs: int = 1  # how many rungs of the race it was in
    first_rung: int = 1
    predicted: float | None = None
    is_finalist: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items()) or "default"


@dataclass
class Machine:
    """Values of trials: the true one, the drift of a round, and noise."""

    seed: int = 0
    base: float = 412.0
    noise: float = 0.008
    is_serve: bool = False
    has_sequence_speed: bool = True
    rng: random.Random = field(init=False)
    drift: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def trial(self, config: Planned, phase: str, rung: int, number: int, count: int) -> dict[str, Any]:
        shared = "confirm" if phase == "noise" else phase
        drift = self.drift.setdefault((shared, rung, number), 1 + self.rng.gauss(0, 0.03))
        value = self.base * config.ratio * drift * (1 + self.rng.gauss(0, self.noise))
        facts: dict[str, Any] = {"phase": phase, "rung": rung, "round": number, "num_requests": count}
        if self.is_serve:
            levels = [self._level(config, value, concurrency, count) for concurrency in (8, 16, 32)]
            best = levels[1]
            facts |= {"value": best["figures"]["goodput_requests_per_s"], "levels": levels, "load": best["load"]}
            facts |= {"figures": best["figures"], "num_requests": 3 * count + number}  # of all levels
        else:
            figures = {
                "seconds": count * 32 / value,
                "output_tokens_per_s": value,
                "total_tokens_per_s": 3.1 * value,
                "requests_per_s": value / 32,
                "success_share": 1.0,
            }
            if self.has_sequence_speed:
                figures["sequence_tokens_per_s"] = value / (config.settings.get("max_num_seqs", 64) ** 0.7)
            facts |= {"value": value, "figures": figures, "load": None}
        return facts | {"at": "2026-11-16T12:00:00+00:00", "seconds": 12.5, "start_s": 4.1 if number == 0 else None}

    def _level(self, config: Planned, value: float, concurrency: int, count: int) -> dict[str, Any]:
        share = {8: 0.62, 16: 1.0, 32: 1.12}[concurrency]
        slow = concurrency / 16 / config.ratio
        figures = {
            "output_tokens_per_s": value * share,
            "requests_per_s": value * share / 48,
            "goodput_requests_per_s": value / 48 * (share if concurrency < 32 else 0.4),
            "success_share": 1.0,
        }
        for latency, median, tail in (("ttft", 80.0, 2.4), ("tpot", 14.0, 1.5), ("e2e", 760.0, 1.7)):
            for percent, factor in ((50, 1.0), (95, tail), (99, tail**1.4)):
                figures[f"{latency}_p{percent}"] = median * slow * factor * (1 + self.rng.gauss(0, 0.03))
        load = {"kind": "closed_loop", "concurrency": concurrency, "num_requests": count}
        return {"load": load, "figures": figures, "verdict": "missed" if concurrency > 16 else "met"}


KNOBS = [
    {
        "name": "max_num_seqs",
        "values": [16, 32, 64, 128, 256],
        "default": 64,
        "needs_restart": False,
        "grows_memory": True,
        "changes_quality": False,
        "why": "more sequences in a step share the reading of the weights",
    },
    {
        "name": "max_num_batched_tokens",
        "values": [512, 1024, 2048, 4096],
        "default": 1024,
        "needs_restart": False,
        "grows_memory": True,
        "changes_quality": False,
        "why": "prompts are long: fewer and larger steps",
    },
    {
        "name": "enable_prefix_caching",
        "values": [True, False],
        "default": True,
        "needs_restart": True,
        "grows_memory": False,
        "changes_quality": False,
        "why": "no prompts share a prefix: hashing may be pure cost",
    },
    {
        "name": "block_size",
        "values": [8, 16, 32],
        "default": 16,
        "needs_restart": True,
        "grows_memory": False,
        "changes_quality": False,
        "why": "smaller blocks waste less, larger ones are read faster",
    },
    {
        "name": "kv_cache_dtype",
        "values": ["auto", "fp8"],
        "default": "auto",
        "needs_restart": True,
        "grows_memory": False,
        "changes_quality": True,
        "why": "half the cache: more sequences fit",
    },
]

RULED_OUT = {"config": "max_num_seqs=256", "why": "it needs at least as much memory as a config that ran out of it"}
BEST = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
CONFIGS = (
    Planned({}, 1.0, predicted=395.0, origin="default", rungs=3),
    Planned({"max_num_seqs": 16}, 0.71, predicted=250.0),
    Planned({"max_num_seqs": 32}, 0.88, predicted=330.0),
    Planned({"max_num_seqs": 128}, 1.21, predicted=470.0, rungs=3),
    Planned({"max_num_seqs": 256}, failure=OOM, predicted=520.0),
    Planned({"max_num_seqs": 256, "max_num_batched_tokens": 4096}, ruled_out_by=RULED_OUT, predicted=540.0),
    Planned({"max_num_seqs": 128, "max_num_batched_tokens": 4096}, 1.19, predicted=505.0, rungs=2),
    Planned({"max_num_batched_tokens": 512}, 0.93, predicted=380.0),
    Planned({"max_num_batched_tokens": 2048}, 1.11, predicted=430.0, rungs=2),
    Planned({"max_num_batched_tokens": 4096}, 1.08, predicted=441.0, rungs=1),
    Planned({"enable_prefix_caching": False}, 1.02),
    Planned({"block_size": 32}, 1.01),
    Planned({"block_size": 8}, failure=BAD_SETTING),
    Planned({"kv_cache_dtype": "fp8"}, 1.04, rungs=2),
    Planned(BEST, 1.37, origin="recombined", first_rung=2, rungs=2, predicted=490.0, is_finalist=True),
    Planned(BEST | {"kv_cache_dtype": "fp8"}, 1.33, origin="recombined", first_rung=3, rungs=1, is_finalist=True),
)


def batch_record(seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Failures, a config that was ruled out, recombined configs, a shown gain."""
    return _tune(Machine(seed), CONFIGS, goal="batch") | changes


def serve_record(seed: int = 1, **changes: Any) -> dict[str, Any]:
    slo = {"slo": "ttft:p95<300ms;tpot:p95<40ms"}
    return _tune(Machine(seed, base=480.0, is_serve=True), CONFIGS, goal="serve") | slo | changes


def no_difference_record(seed: int = 2) -> dict[str, Any]:
    configs = (
        Planned({}, 1.0, origin="default", rungs=2),
        Planned({"max_num_seqs": 128}, 1.004, is_finalist=True, rungs=2),
        Planned({"block_size": 32}, 0.99),
    )
    return _tune(Machine(seed, noise=0.02, has_sequence_speed=False), configs, goal="batch")


def single_record(seed: int = 3) -> dict[str, Any]:
    """Nothing to search: every knob was fixed by the user."""
    record = _tune(Machine(seed), (Planned({}, origin="default", rungs=0),), goal="batch")
    return record | {"knobs": [], "rungs": [], "common_settings": {"model": "tiny", "max_num_seqs": 8}}


def interrupted_record(seed: int = 4) -> dict[str, Any]:
    """Ctrl-C in the first rung of the race."""
    record = _tune(Machine(seed), CONFIGS[:6], goal="batch", num_confirm=0)
    return record | {"stopped": "interrupted by Ctrl-C; run the same command again to continue"}


def nothing_measured_record() -> dict[str, Any]:
    """The default failed twice."""
    record = _tune(Machine(), (Planned({}, failure=OOM, origin="default"),), goal="batch", num_confirm=0)
    nothing = {"decision": None, "settings_file": None, "launch_command": None, "settings_in_force": {}}
    return record | nothing | {"stopped": "the default does not start: out of memory", "rungs": []}


def _tune(
    machine: Machine, configs: Sequence[Planned], *, goal: str, num_confirm: int = NUM_CONFIRM_ROUNDS
) -> dict[str, Any]:
    rows = [_row(machine, config, num_confirm) for config in configs]
    default = rows[0]
    decision, noise = _decision(rows, default), _noise(default)
    chosen = next(row for row in rows if row["name"] == decision["chosen"])
    suffix, text = settings_file("headrace", chosen["settings"])
    flags = "".join(f" --{name.replace('_', '-')} {value}" for name, value in chosen["settings"].items())
    command = "headrace serve tiny" if goal == "serve" else "headrace run INPUT -o OUTPUT --model tiny"
    in_force = {"max_num_seqs": {"value": 64, "source": "automatic", "reason": "the KV cache holds 71"}}
    in_force |= {name: {"value": v, "source": "given", "reason": ""} for name, v in chosen["settings"].items()}
    return base_record(
        "tune",
        command=f"headrace tune tiny --data my.jsonl --goal {goal}",
        engine={"name": "headrace", "versions": {"headrace": "0.1.0"}},
        load=None,
        slo=None,
        common_settings={"model": "tiny"},
        goal=goal,
        figure="goodput_requests_per_s" if goal == "serve" else "output_tokens_per_s",
        budget_s=1200.0,
        spent_s=431.2,
        stopped=None,
        knobs=KNOBS,
        configs=rows,
        rungs=_rungs(configs),
        noise=noise,
        decision=decision,
        quality=[
            {"config": row["name"], "agreement": 0.947, "num_tokens": 2048, "num_prompts": 32}
            for row in rows
            if "kv_cache_dtype" in row["settings"] and row["status"] == "ok"
        ],
        settings_in_force=in_force,
        launch_command=command + flags,
        settings_file={"suffix": suffix, "text": text},
    )


def _row(machine: Machine, config: Planned, num_confirm: int) -> dict[str, Any]:
    is_default = config.origin == "default"
    is_ok = config.failure is None and config.ruled_out_by is None
    trials = []
    if is_ok:
        for rung in range(config.first_rung, config.first_rung + config.rungs):
            trials.append(machine.trial(config, "race", rung, 0, 96 * rung))
        if config.is_finalist or is_default:
            trials += [machine.trial(config, "confirm", 0, number, 288) for number in range(num_confirm)]
        if is_default:
            trials += [machine.trial(config, "noise", 0, number, 288) for number in range(num_confirm)]
    value = config.predicted
    scale = machine.base / 412 / (48 if machine.is_serve else 1)
    predicted = None if value is None else {key: value * scale * f for key, f in _RANGE.items()}
    return {
        "name": config.name,
        "hash": SweepConfig(config.name, config.settings).hash,
        "settings": dict(config.settings),
        "is_default": is_default,
        "origin": config.origin,
        "predicted": predicted,
        "status": "failed" if config.failure else "ruled out" if config.ruled_out_by else "ok",
        "failure": config.failure,
        "ruled_out_by": config.ruled_out_by,
        "score": config.ratio if is_ok else None,
        "is_finalist": config.is_finalist,
        "trials": trials,
    }


_RANGE = {"value": 1.0, "low": 0.88, "high": 1.12}


def _rungs(configs: Sequence[Planned]) -> list[dict[str, Any]]:
    last = max((config.first_rung + config.rungs - 1 for config in configs), default=0)
    rungs = []
    for rung in range(1, last + 1):
        entered = [each for each in configs if each.first_rung <= rung < each.first_rung + each.rungs]
        entered = [each for each in entered if each.ruled_out_by is None]
        kept = [each for each in entered if each.first_rung + each.rungs > rung + 1 or each.is_finalist]
        added = [each for each in configs if each.first_rung == rung + 1 and each.origin == "recombined"]
        names = [[each.name for each in several] for several in (entered, kept, added)]
        rungs.append(
            {"rung": rung, "num_requests": 96 * rung, "entered": names[0], "kept": names[1], "added": names[2]}
        )
    return rungs


def _values(row: Mapping[str, Any], phase: str) -> list[float]:
    return [trial["value"] for trial in row["trials"] if trial["phase"] == phase]


def _decision(rows: Sequence[dict[str, Any]], default: dict[str, Any]) -> dict[str, Any]:
    finalists = [row for row in rows if row["is_finalist"]]
    best = max(finalists, key=lambda row: row["score"] or 0.0, default=None)
    ratio = None
    if best is not None:
        ratio = ratio_of_rounds(_values(default, "confirm"), _values(best, "confirm"), is_paired=True)
    facts: dict[str, Any] = {"against": default["name"], "is_shown": False}
    if best is None or ratio is None:
        measured = [row for row in rows if row["status"] == "ok"]
        best = max(measured, key=lambda row: row["score"] or 0.0, default=default)
        verdict = "the default is best" if best is default else "not confirmed"
        text = "the default is best" if best is default else f"not confirmed: {best['score']:.2f}x in the race"
        return facts | {
            "chosen": best["name"],
            "ratio": best["score"],
            "low": None,
            "high": None,
            "verdict": verdict,
            "text": text,
        }
    facts |= {"ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    edges = f"{ratio.value:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
    if ratio.holds(1.0):
        text = f"no difference shown: {edges}; the default is kept"
        return facts | {"chosen": default["name"], "verdict": "no difference shown", "text": text}
    text = f"tuned against default: {edges}"
    return facts | {"chosen": best["name"], "is_shown": True, "verdict": "tuned", "text": text}


def _noise(default: dict[str, Any]) -> dict[str, Any] | None:
    sides = [_values(default, phase) for phase in ("confirm", "noise")]
    ratio = ratio_of_rounds(*sides, is_paired=True)
    if ratio is None:
        return None
    floor = (ratio.high - ratio.low) / 2
    return {
        "ratio": ratio.value,
        "low": ratio.low,
        "high": ratio.high,
        "floor": floor,
        "num_rounds": len(sides[0]),
    }
