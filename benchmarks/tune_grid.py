"""Measures an exhaustive grid of settings on four workloads, and compares the choice of `headrace tune` with its best.

    python benchmarks/tune_grid.py --workload tight-cache --rounds 5 --commit COMMIT      measure one grid
    python benchmarks/tune_grid.py                                                        all four
    python benchmarks/tune_grid.py --judge TUNE.json GRID.json                            tune's choice in the grid
    python benchmarks/tune_grid.py --judge TUNE.json GRID.json --confirm --rounds 10      both measured again

Every round measures all configs, in turn forwards and backwards (A B C, C B A), so that a slow drift of the machine
hits all alike. One engine does all of it: it changes its settings without a restart. Each finished measurement is one
fsynced line of a journal beside the record, and the same command continues after an interruption. `taskset -c 0,1`
before the command limits the engine to two cores; `--beside N` says in the record how many others measure on the same
machine meanwhile.

The best of many noisy figures looks better than it is. `--confirm` therefore measures tune's choice and the grid's best
again, in rounds of their own.

Needs only the standard library, numpy and Headrace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

from headrace.bench.engines.base import Engine, EngineFailure, RunningEngine
from headrace.bench.engines.headrace_engine import HeadraceEngine, as_flags
from headrace.bench.offline import round_of
from headrace.bench.record import SCHEMA, rounded
from headrace.bench.statistics import ratio_of_rounds
from headrace.bench.sweep.configs import SweepConfig, shown_settings
from headrace.bench.sweep.journal import Journal
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.config import EMBEDDED_MODEL
from headrace.hardware.describe import current_commit, machine_facts, package_versions
from headrace.models import open_checkpoint

RESULTS = Path(__file__).parent / "results"
SUMMARY = RESULTS / "tune-against-grid.json"
KIND = "tune-grid"
FIGURE = "output_tokens_per_s"
RESUMABLE = 75  # exit code: the same command continues
MAX_SHORTFALL = 0.03  # of tune's choice against the best of the grid
MAX_COST_SHARE = 0.2

SEQS, TOKENS, SWITCH = (8, 16, 32, 64, 128), (128, 512, 2048), (True, False)
USUAL_KNOBS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": SEQS,
    "max_num_batched_tokens": TOKENS,
    "enable_prefix_caching": SWITCH,
    "enable_chunked_prefill": SWITCH,
}
LONG_KNOBS: dict[str, tuple[Any, ...]] = {
    **USUAL_KNOBS,
    "max_num_seqs": (2, 4, 8, 128),
    "max_num_batched_tokens": (64, 128, 512, 2048),
}
PREFIX_KNOBS: dict[str, tuple[Any, ...]] = {**USUAL_KNOBS, "max_num_seqs": (4, 8, 16, 128)}
TIGHT_KNOBS: dict[str, tuple[Any, ...]] = {
    "max_num_seqs": (4, 8, 12, 16),
    "max_num_batched_tokens": (64, 128, 512),
    "enable_prefix_caching": SWITCH,
    "capacity_policy": ("max_utilization", "guaranteed_no_evict"),
}
# What decides how an engine runs; two configs are the same if these are. Sizes that memory decides are left out.
EFFECTIVE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "capacity_policy",
    "scheduling_policy",
    "block_size",
    "num_threads",
    "kv_cache_dtype",
    "max_model_len",
    "num_gpu_blocks_override",
)


@dataclass(frozen=True)
class GridWorkload:
    """A workload, the settings that all configs share, and the knobs of its grid."""

    name: str
    spec: WorkloadSpec
    common: Mapping[str, Any]
    knobs: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: USUAL_KNOBS)

    @property
    def flags(self) -> list[str]:
        """The same workload and common settings for `headrace tune` and `headrace bench`."""
        names = {"name": "workload", "seed": "workload_seed"}
        defaults = WorkloadSpec(name=self.spec.name).as_json()
        given = {
            names.get(name, name): value
            for name, value in self.spec.as_json().items()
            if name == "name" or defaults.get(name) != value
        }
        return as_flags({**given, **self.common})

    def configs(self) -> list[SweepConfig]:
        """The default, then every valid combination of the knobs."""
        grid = [dict(zip(self.knobs, values, strict=True)) for values in itertools.product(*self.knobs.values())]
        valid = [settings for settings in grid if is_valid(settings, self.common.get("max_model_len", 0))]
        return [SweepConfig("default", {}), *(SweepConfig(shown_settings(each), each) for each in valid)]


def is_valid(settings: Mapping[str, Any], max_model_len: int) -> bool:
    """Without chunked prefill a prompt must fit in one step; each running sequence needs one token a step."""
    num_tokens = settings["max_num_batched_tokens"]
    fits = settings.get("enable_chunked_prefill", True) or num_tokens >= max_model_len
    return bool(fits and num_tokens >= settings["max_num_seqs"])


WORKLOADS = {
    each.name: each
    for each in (
        GridWorkload(
            "long-prompts",
            WorkloadSpec(name="random", num_requests=20, input_len=160, output_len=4, spread=0.25, seed=11),
            {"max_model_len": 512},
            LONG_KNOBS,
        ),
        GridWorkload(
            "short-prompts",
            WorkloadSpec(name="random", num_requests=48, input_len=12, output_len=12, spread=0.4, seed=12),
            {"max_model_len": 512},
        ),
        GridWorkload(
            "shared-prefixes",
            WorkloadSpec(
                name="prefix", num_requests=24, prefix_len=96, num_prefixes=3, input_len=12, output_len=6, seed=13
            ),
            {"max_model_len": 512},
            PREFIX_KNOBS,
        ),
        # The scheduler does not know the lengths: an end token may come at any time. 16 blocks hold about 8 sequences
        # at their end, and 16 at their start.
        GridWorkload(
            "tight-cache",
            WorkloadSpec(name="random", num_requests=20, input_len=16, output_len=14, spread=0.3, ends="eos", seed=14),
            {"max_model_len": 256, "num_gpu_blocks_override": 16},
            TIGHT_KNOBS,
        ),
    )
}


def visits(num_configs: int, num_rounds: int) -> Iterator[tuple[int, int]]:
    """Round and config of each measurement, in order: forwards, then backwards."""
    for number in range(num_rounds):
        places = range(num_configs) if number % 2 == 0 else reversed(range(num_configs))
        yield from ((number, place) for place in places)


def workload_of(grid: GridWorkload, vocab_size: int) -> Workload:
    return build(grid.spec.for_vocabulary(vocab_size))


# ---- measuring


class Lane:
    """Measures configs with one engine, which is started again only if it must be."""

    def __init__(self, engine: Engine, workload: Workload, common: Mapping[str, Any]) -> None:
        self._engine = engine
        self._workload = workload
        self._common = common
        self._running: RunningEngine | None = None
        short = replace(workload.spec, name="random", num_requests=8, input_len=8, output_len=4, prefix_len=None)
        self._warm_up = build(replace(short, spread=0.0, ends="exact", num_prefixes=None))

    @property
    def model_facts(self) -> dict[str, Any]:
        return {} if self._running is None else self._running.model_facts()

    def measured(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """One round with these settings, from an empty cache. Raises EngineFailure."""
        running, start_s = self._with({**self._common, **settings})
        running.run_offline(self._warm_up)
        running.reset_prefix_cache()
        figures = round_of(running.run_offline(self._workload), self._workload)
        in_force = running.settings_in_force()
        effective = {name: in_force[name].value for name in EFFECTIVE if name in in_force}
        return {**figures, "start_s": start_s, "effective": effective, "num_blocks": in_force["num_blocks"].value}

    def stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def _with(self, settings: Mapping[str, Any]) -> tuple[RunningEngine, float | None]:
        running = self._running
        if running is not None and running.is_alive():
            try:
                if running.reconfigure(settings):
                    return running, None
            except EngineFailure as error:
                if error.kind == "bad_setting" and running.is_alive():
                    raise
        self.stop()
        self._running = running = self._engine.start(settings, serves=False)
        running.run_offline(self._workload)  # compiles kernels for its shapes
        return running, running.start_s


class Grid:
    """Owns the journal of one grid: what is measured, what failed."""

    def __init__(self, grid: GridWorkload, workload: Workload, journal: Journal, *, facts: Mapping[str, Any]) -> None:
        self._grid = grid
        self._workload = workload
        self._journal = journal
        self._facts = facts
        self.identity = identity_of(workload, grid.common, facts)

    @property
    def entries(self) -> list[dict[str, Any]]:
        return [entry for entry in self._journal.entries if entry["identity"] == self.identity]

    def run(self, lane: Lane, configs: Sequence[SweepConfig], num_rounds: int, *, max_seconds: float | None) -> bool:
        """Measure what is missing. False: the time is used up."""
        done = {(entry["config_hash"], entry["round"]) for entry in self.entries}
        failed = {entry["config_hash"] for entry in self.entries if "failure" in entry}
        started = marked = monotonic()
        for number, place in visits(len(configs), num_rounds):
            config = configs[place]
            if (config.hash, number) in done or config.hash in failed:
                continue
            if max_seconds is not None and monotonic() - started > max_seconds:
                return False
            entry = {"identity": self.identity, "config_hash": config.hash, "name": config.name, "round": number}
            entry |= {"settings": dict(config.settings), "at": _now(), "load_1m": round(os.getloadavg()[0], 2)}
            try:
                entry |= lane.measured(config.settings)
                shown = f"{entry[FIGURE]:8.1f} output tokens/s, {entry['seconds']:.2f} s"
            except EngineFailure as error:
                if error.kind != "bad_setting":
                    lane.stop()
                entry |= {"failure": {"kind": error.kind, "message": str(error), "log_tail": error.log_tail}}
                failed.add(config.hash)
                shown = f"failed: {error.kind}: {error}"
            now = monotonic()
            self._journal.append(entry | {"spent_s": now - marked})  # from the end of the one before: all costs
            marked = now
            print(f"{self._grid.name} round {number + 1} of {num_rounds}, {config.name}: {shown}", flush=True)
        return True

    def record(self, configs: Sequence[SweepConfig], num_rounds: int, model: Mapping[str, Any]) -> dict[str, Any]:
        return record_of(self._grid, self._workload, self.entries, configs, num_rounds, {**self._facts, "model": model})


def identity_of(workload: Workload, common: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Rounds of another workload, commit, machine or set of packages are not continued."""
    machine, cores = facts["machine"], facts["cores"]
    same = [workload.spec.hash, dict(common), facts["commit"], facts["versions"], machine["cpu"], cores["num_cores"]]
    return sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def record_of(
    grid: GridWorkload,
    workload: Workload,
    entries: Sequence[Mapping[str, Any]],
    configs: Sequence[SweepConfig],
    num_rounds: int,
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    rows = [_row(config, [each for each in entries if each["config_hash"] == config.hash]) for config in configs]
    best = best_of(rows, num_rounds)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "name": grid.name,
        **facts,
        "started_at": entries[0]["at"] if entries else None,
        "ended_at": entries[-1]["at"] if entries else None,
        "workload": workload.facts,
        "tune_flags": shlex.join(grid.flags),
        "common_settings": dict(grid.common),
        "knobs": {name: list(values) for name, values in grid.knobs.items()},
        "figure": FIGURE,
        "num_rounds": num_rounds,
        "is_complete": all(row["failure"] or len(row["rounds"]) == num_rounds for row in rows),
        "wall_s": sum(each["spent_s"] for each in entries),  # engine starts included
        "num_starts": sum(each.get("start_s") is not None for each in entries),
        "best": None if best is None else best["name"],
        "order": [{"at": each["at"], "round": each["round"], "config": each["name"]} for each in entries],
        "configs": sorted(rows, key=lambda row: -(row["mean"] or 0.0)),
    }


def _row(config: SweepConfig, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    good = sorted((each for each in entries if "failure" not in each), key=lambda each: int(each["round"]))
    kept = ("round", "at", "load_1m", FIGURE, "seconds", "spent_s", "start_s", "num_output_tokens", "counters")
    return {
        "name": config.name,
        "hash": config.hash,
        "settings": dict(config.settings),
        "effective": good[-1]["effective"] if good else None,
        "num_blocks": good[-1]["num_blocks"] if good else None,
        "failure": next((each["failure"] for each in entries if "failure" in each), None),
        "mean": mean(each[FIGURE] for each in good) if good else None,
        "rounds": [{name: each[name] for name in kept} for each in good],
    }


def best_of(rows: Sequence[Mapping[str, Any]], num_rounds: int) -> Mapping[str, Any] | None:
    """The config with the highest mean, of those that have all rounds."""
    whole = [row for row in rows if row["failure"] is None and len(row["rounds"]) == num_rounds]
    return max(whole, key=lambda row: float(row["mean"]), default=None)


# ---- judging


class JudgeError(Exception):
    """The two records cannot be compared."""


def chosen_by(tune: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of tune's choice, and the effective ones."""
    name = tune["decision"]["chosen"]
    config = next(each for each in tune["configs"] if each["name"] == name)
    common = {key: value for key, value in tune["common_settings"].items() if key != "model"}
    in_force = tune["settings_in_force"]
    effective = {key: in_force[key]["value"] for key in EFFECTIVE if key in in_force}
    return {**common, **config["settings"]}, effective


def same_settings(rows: Sequence[Mapping[str, Any]], effective: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the grid that runs as the choice does. Of equal ones, the first: they are the same config twice."""
    return next((row for row in rows if row["effective"] == effective), None)


def judged(tune: Mapping[str, Any], grid: Mapping[str, Any]) -> dict[str, Any]:
    """How near tune's choice comes to the grid's best, and at what share of the cost."""
    if tune["workload"]["hash"] != grid["workload"]["hash"]:
        raise JudgeError(
            f"other workloads: tune's has the hash {tune['workload']['hash']}, the grid's {grid['workload']['hash']}; "
            f"tune it with {grid['tune_flags']}"
        )
    best = best_of(grid["configs"], grid["num_rounds"])
    if best is None:
        raise JudgeError("no config of the grid has all rounds")
    settings, effective = chosen_by(tune)
    choice, default = same_settings(grid["configs"], effective), _named(grid, "default")
    share = tune["spent_s"] / grid["wall_s"]
    ratio = None if choice is None else _ratio(best, choice)
    return {
        "workload": grid["name"],
        "choice": {"name": tune["decision"]["chosen"], "settings": settings, "verdict": tune["decision"]["verdict"]},
        "in_grid": None if choice is None else choice["name"],
        "best": {"name": best["name"], "settings": best["settings"], "mean": best["mean"]},
        "ratio_to_best": ratio,
        "best_to_default": None if default is None else _ratio(default, best),
        "rank": None if choice is None else grid["configs"].index(choice) + 1,
        "num_configs": len(grid["configs"]),
        "num_rounds": grid["num_rounds"],
        "tune_s": tune["spent_s"],
        "grid_s": grid["wall_s"],
        "cost_share": share,
        "is_near": None if ratio is None else ratio["value"] >= 1 - MAX_SHORTFALL,
        "is_cheap": share <= MAX_COST_SHARE,
        "remarks": remarks_of(tune, grid, choice),
    }


def remarks_of(tune: Mapping[str, Any], grid: Mapping[str, Any], choice: Mapping[str, Any] | None) -> list[str]:
    remarks = []
    if choice is None:
        remarks.append("the grid does not have tune's choice: --confirm measures both")
    for name in ("cpu", "num_cores"):
        if tune["machine"].get(name) != grid["machine"].get(name):
            remarks.append(f"other machines: {name} {tune['machine'].get(name)} and {grid['machine'].get(name)}")
    if tune.get("commit") != grid.get("commit"):
        remarks.append(f"other commits: tune {tune.get('commit')}, grid {grid.get('commit')}")
    if not grid["is_complete"]:
        remarks.append("the grid is not complete")
    return remarks


def _named(grid: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    return next((row for row in grid["configs"] if row["name"] == name and row["rounds"]), None)


def _ratio(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of means, after to before, over the rounds that both have."""
    sides = [{each["round"]: each[FIGURE] for each in row["rounds"]} for row in (before, after)]
    rounds = sorted(sides[0].keys() & sides[1].keys())
    found = ratio_of_rounds(*([side[number] for number in rounds] for side in sides), is_paired=True)
    if found is None:
        return None
    return {"value": found.value, "low": found.low, "high": found.high, "num_rounds": len(rounds)}


def confirmed(
    lane: Lane, judgment: Mapping[str, Any], grid: Mapping[str, Any], num_rounds: int, *, commit: str | None
) -> dict[str, Any]:
    """Tune's choice and the grid's best in fresh rounds, interleaved. The engine has the grid's common settings."""
    sides = [("best", judgment["best"]["settings"]), ("choice", judgment["choice"]["settings"])]
    rows: list[dict[str, Any]] = [{"name": name, "settings": settings, "rounds": []} for name, settings in sides]
    for number, place in visits(len(rows), num_rounds):
        at = _now()
        figures = lane.measured(rows[place]["settings"])
        kept = {name: figures[name] for name in (FIGURE, "seconds", "counters")}
        rows[place]["rounds"].append({"round": number, "at": at, **kept})
        print(f"{grid['name']} round {number + 1}, {rows[place]['name']}: {figures[FIGURE]:.1f}", flush=True)
    ratio = _ratio(*rows)
    return {
        "at": _now(),
        "commit": commit,
        "machine": machine_facts(),
        "cores": cores_of(0),
        "ratio_to_best": ratio,
        "is_near": None if ratio is None else ratio["value"] >= 1 - MAX_SHORTFALL,
        "rows": rows,
    }


# ---- the command


def cores_of(num_beside: int) -> dict[str, Any]:
    allowed = sorted(os.sched_getaffinity(0))
    return {"allowed": allowed, "num_cores": len(allowed), "num_of_machine": os.cpu_count(), "num_beside": num_beside}


def measure_grid(grid: GridWorkload, given: argparse.Namespace) -> bool:
    """Measure one grid and write its record. False: it is not complete yet."""
    configs = grid.configs()[: given.limit]
    workload = workload_of(grid, _vocab_size())
    facts = {
        "command": shlex.join(["python", "benchmarks/tune_grid.py", *sys.argv[1:]]),
        "commit": given.commit or current_commit(),
        "machine": machine_facts(),
        "versions": package_versions(),
        "cores": cores_of(given.beside),
    }
    path = given.output / f"{KIND}-{grid.name}.json"
    with Journal(path.with_suffix(".journal")) as journal:
        measured = Grid(grid, workload, journal, facts=facts)
        lane = Lane(HeadraceEngine(EMBEDDED_MODEL), workload, grid.common)
        try:
            is_done = measured.run(lane, configs, given.rounds, max_seconds=given.max_seconds)
        except KeyboardInterrupt:
            is_done = False
        finally:
            model = lane.model_facts or _model_of(path)
            lane.stop()
        _write(path, measured.record(configs, given.rounds, model))
    print(f"{path}" + ("" if is_done else ": not complete; the same command continues"), flush=True)
    return is_done


def judge(given: argparse.Namespace) -> None:
    tune, grid = (json.loads(path.read_text(encoding="utf-8")) for path in given.judge)
    judgment = judged(tune, grid)
    if given.confirm:
        known = WORKLOADS[grid["name"]]
        workload = workload_of(known, _vocab_size())
        if workload.spec.hash != grid["workload"]["hash"]:
            raise JudgeError(f"the workload {known.name} is not the one of the grid any more")
        lane = Lane(HeadraceEngine(EMBEDDED_MODEL), workload, known.common)
        try:
            judgment["confirmed"] = confirmed(
                lane, judgment, grid, given.rounds, commit=given.commit or current_commit()
            )
        finally:
            lane.stop()
    summary = json.loads(given.summary.read_text(encoding="utf-8")) if given.summary.exists() else {"workloads": {}}
    summary["workloads"][judgment["workload"]] = judgment
    _write(given.summary, summary)
    print(shown_judgment(judgment))


def shown_judgment(judgment: Mapping[str, Any]) -> str:
    ratio = (judgment.get("confirmed") or {}).get("ratio_to_best") or judgment["ratio_to_best"]
    near = "not in the grid" if ratio is None else "{value:.3f} [{low:.3f}, {high:.3f}] of the best".format(**ratio)
    again = " (measured again)" if judgment.get("confirmed") else ""
    cost = f"{judgment['cost_share']:.1%} of the cost of {judgment['num_configs']} configs"
    return "\n".join([f"{judgment['workload']}: {near}{again}, at {cost}", *judgment["remarks"]])


def _vocab_size() -> int:
    return open_checkpoint(EMBEDDED_MODEL).spec.vocab_size


def _model_of(path: Path) -> dict[str, Any]:
    """Of the record before, if nothing was left to measure."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["model"] if path.exists() else {}
    return found


def _write(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(dumped(rounded(record)), encoding="utf-8")
    temporary.replace(path)


def dumped(record: Mapping[str, Any]) -> str:
    """JSON with one line for each key, and one for each item of a list of objects: small, and easy to compare."""
    lines = []
    for name, value in record.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(each) for each in value) + "\n ]"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=5, help="of each config, or of both with --confirm (%(default)s)")
    parser.add_argument("--limit", type=int, help="only the first configs, to try the command")
    parser.add_argument("--num-requests", type=int, help="of the workload, instead of its own number: another workload")
    parser.add_argument("--max-seconds", type=float, help="stop after the measurement that exceeds this, for each grid")
    parser.add_argument("--beside", type=int, default=0, help="how many others measure on this machine meanwhile")
    parser.add_argument("--commit", help="of the code, where it is not in a checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of records and journals (%(default)s)")
    parser.add_argument("--judge", type=Path, nargs=2, metavar=("TUNE", "GRID"), help="compare two records")
    parser.add_argument("--confirm", action="store_true", help="with --judge: measure choice and best again")
    parser.add_argument("--summary", type=Path, default=SUMMARY, help="what --judge writes (%(default)s)")
    given = parser.parse_args()
    if given.judge:
        try:
            judge(given)
        except JudgeError as error:
            parser.error(str(error))
        return 0
    chosen = list(WORKLOADS.values()) if given.workload == "all" else [WORKLOADS[given.workload]]
    if given.num_requests is not None:
        chosen = [replace(each, spec=replace(each.spec, num_requests=given.num_requests)) for each in chosen]
    results = [measure_grid(grid, given) for grid in chosen]
    return 0 if all(results) else RESUMABLE


if __name__ == "__main__":
    raise SystemExit(main())
