"""Makes checkpoints: from records of benchmarks, sweeps and tunes, a job's summary, or a server's self-check.

What is private or changes by the minute is left out: keys in commands, the ids of GPUs, the load average.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.compare import flat_figures
from headrace.bench.levels import figures_of, levels_of, load_label
from headrace.bench.sweep.result import round_figures
from headrace.bench.values import found, is_number
from headrace.checkpoint.decision import NOT_COMPARED, decision, decision_of_sweep, decision_of_tune
from headrace.checkpoint.document import CheckpointError
from headrace.checkpoint.judge import BY_NAME, values_of

Record = Mapping[str, Any]
OFFLINE = {"kind": "offline"}
ALL_AT_ONCE = "all requests at once"
JUDGED = ("output_tokens_per_s", "goodput_requests_per_s", "success_share", "ttft_p50", "tpot_p50")
SECRETS = ("--api-key", "--admin-key")
HIDDEN = "HIDDEN"
MACHINE = ("cpu", "num_cores", "memory_bytes", "platform")
GPU = ("name", "driver_version", "memory.total")


def from_records(records: Sequence[Record], *, text: str | None = None) -> dict[str, Any]:
    """The facts of a checkpoint of one record, or of several that are rounds of the same thing."""
    if not records:
        raise CheckpointError("there is no record to make a checkpoint of")
    kinds = {str(record.get("kind")) for record in records}
    if kinds == {"sweep"}:
        if len(records) > 1:
            raise CheckpointError(f"a checkpoint is made of one sweep, and there are {len(records)}")
        return from_sweep(records[0], text=text)
    if kinds == {"tune"}:
        if len(records) > 1:
            raise CheckpointError(f"a checkpoint is made of one tune, and there are {len(records)}")
        return from_tune(records[0], text=text)
    if not kinds <= {"offline", "online"} or len(kinds) > 1:
        raise CheckpointError(
            "a checkpoint is made of records of kind offline, online, sweep or tune; "
            f"these are {', '.join(sorted(kinds))}"
        )
    identities = {_identity(record) for record in records}
    if len(identities) > 1:
        raise CheckpointError(
            f"the {len(records)} records are of {len(identities)} different engines, models, settings, workloads or "
            "loads; a checkpoint is of one: write it to a file of its own"
        )
    first, kind = records[0], kinds.pop()
    loads = merged([loads_of(record) for record in records])
    if not any(each["rounds"] for each in loads):
        raise CheckpointError("nothing was measured in this record" + _failure_of(first))
    reason = f"{NOT_COMPARED}. {_headline(loads)}"
    return {
        **_common(first, kind),
        "decision": decision(reason, text),
        "verification": verification(kind, loads),
        "engine": _engine(first, found(first, "engine", "launch_command"), found(first, "engine", "settings") or {}),
        "load": first.get("load") or OFFLINE,
        "slo": _slo_of(first),
        "warnings": _warnings(records),
    }


def from_sweep(record: Record, *, text: str | None = None) -> dict[str, Any]:
    """The facts of a checkpoint of the best config of a sweep."""
    best = next((row for row in record.get("configs") or [] if row.get("rank") == 1), None)
    if best is None:
        raise CheckpointError("no config of this sweep could be measured, so there is nothing to decide")
    load = record.get("load") or (OFFLINE if best.get("level") is None else None)
    if load is None:
        raise CheckpointError("this record of a sweep does not say how requests were sent; run the sweep again")
    given = {
        name: {"value": value, "source": "given", "reason": ""}
        for name, value in {**(record.get("common_settings") or {}), **best["settings"]}.items()
    }
    kind, rank_by = "offline" if load == OFFLINE else "online", record["rank_by"]
    loads = [_load(best.get("level") or ALL_AT_ONCE, list(best["rounds"]))]
    return {
        **_common(record, "sweep"),
        "decision": decision_of_sweep(record, best, text),
        "verification": verification(kind, loads, rank_by=rank_by),
        "engine": _engine(record, best.get("launch_command"), best.get("in_force") or given),
        "load": load,
        "slo": record.get("slo"),
        "warnings": list(best.get("warnings") or []) + ([str(record["stopped"])] if record.get("stopped") else []),
    }


def from_tune(record: Record, *, text: str | None = None) -> dict[str, Any]:
    """The facts of a checkpoint of what a tune chose. Its rounds are those of the confirmation; without any, those of
    the race that had most requests."""
    name = found(record, "decision", "chosen")
    chosen = next((row for row in record.get("configs") or [] if row.get("name") == name), None)
    is_batch = record.get("goal") == "batch"
    trials = [] if chosen is None else _trials_to_verify(chosen, is_batch=is_batch)
    if chosen is None or not trials:
        reason = record.get("stopped") or "no config was measured"
        raise CheckpointError(f"this tune decided nothing: {reason}")
    loads = merged([[_load_of_trial(record, trial, is_batch=is_batch)] for trial in trials])
    given = {**(record.get("common_settings") or {}), **chosen["settings"]}
    settings = {name: dict(setting) for name, setting in (record.get("settings_in_force") or {}).items()}
    settings |= {
        name: {"value": value, "source": "given", "reason": ""} for name, value in given.items() if value is not None
    }
    warnings = [str(warning) for warning in record.get("warnings") or []]
    if trials[0].get("phase") != "confirm":
        warnings.append("the choice was not confirmed: its rounds are those of the race")
    if record.get("stopped"):
        warnings.append(f"the search ended early: {record['stopped']}")
    return {
        **_common(record, "tune"),
        "decision": decision_of_tune(record, chosen, text),
        "verification": verification("offline" if is_batch else "online", loads),
        "engine": _engine(record, record.get("launch_command"), settings),
        "load": _load_to_repeat(record, trials, is_batch=is_batch),
        "slo": record.get("slo"),
        "warnings": list(dict.fromkeys(warnings)),
    }


def from_job(
    summary: Mapping[str, Any],
    *,
    command: str,
    workload: Mapping[str, Any],
    arguments: Sequence[str] | None,
) -> dict[str, Any]:
    """The facts of a checkpoint of a batch job. `summary` is that of --json-summary; `arguments` run it again, and are
    None if it cannot be run again."""
    total, answered, seconds = summary["requests"], summary["answered"], summary["seconds"]
    tokens = summary["prompt_tokens"] + summary["completion_tokens"]
    figures = {
        "seconds": seconds,
        "output_tokens_per_s": summary["completion_tokens_per_second"],
        "total_tokens_per_s": tokens / seconds if seconds else 0.0,
        "requests_per_s": answered / seconds if seconds else 0.0,
        "success_share": answered / total if total else 0.0,
    }
    loads = [_load(ALL_AT_ONCE, [figures])]
    warnings = []
    if summary["outcome"] != "finished":
        warnings.append(f"the job was {summary['outcome']}: its figures are of a part of the input")
    if summary["done_before"]:
        warnings.append(f"earlier runs had finished {summary['done_before']:,} lines: the figures are of the rest")
    if arguments is None:
        warnings.append("this job cannot be run again from this file: its input is no local file, or it redid lines")
    facts = {
        "model": {
            "name": summary["model"],
            "digest": summary["model_digest"] or hub_digest(summary["model"]),
            **(summary["model_shape"] or {}),
        },
        "machine": summary["machine"],
        "versions": summary["versions"],
        "commit": summary["commit"],
        "command": command,
        "workload": dict(workload),
        "engine": {"name": "headrace", "versions": {"headrace": summary["versions"]["headrace"]}},
    }
    return {
        **_common(facts, "job"),
        "decision": decision(f"{NOT_COMPARED}. {_headline(loads)}"),
        "verification": verification("job", loads),
        "engine": _engine(facts, None, summary["settings"]),
        "load": OFFLINE,
        "slo": None,
        "rerun": None if arguments is None or warnings else {"arguments": list(arguments)},
        "warnings": warnings,
    }


def verification(
    kind: str, loads: Sequence[Mapping[str, Any]], *, rank_by: str | None = None, judged: Sequence[str] = JUDGED
) -> dict[str, Any]:
    """The figures of a measurement, and which of them `verify` judges."""
    names = dict.fromkeys((*judged, *([rank_by] if rank_by else [])))
    recorded = [name for name in names if any(values_of(name, each["rounds"]) for each in loads)]
    return {
        "kind": kind,
        "rank_by": rank_by,
        "num_rounds": max((len(each["rounds"]) for each in loads), default=0),
        "judged": recorded,
        "loads": [dict(each) for each in loads],
    }


def loads_of(record: Record, rank_by: str | None = None) -> list[dict[str, Any]]:
    """The rounds of each load of a record. With `rank_by`, of the one load that a sweep takes its figure from."""
    if rank_by is not None:
        figures, label = round_figures(record, rank_by)
        if record.get("rounds"):
            return [_load(ALL_AT_ONCE, [flat_figures(each) for each in record["rounds"]])]
        return [_load(label or ALL_AT_ONCE, [figures] if figures else [])]
    if record.get("rounds") is not None:
        return [_load(ALL_AT_ONCE, [flat_figures(each) for each in record["rounds"]])]
    return [
        _load(load_label(level.get("load")), [_level_figures(level)], slo=found(level, "summary", "slo", "verdict"))
        for level in levels_of(record)
    ]


def merged(several: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The loads of several records as rounds of the same loads. An SLO is met if every round met it."""
    rounds: dict[str, list[Mapping[str, Any]]] = {}
    verdicts: dict[str, list[str]] = {}
    for loads in several:
        for each in loads:
            rounds.setdefault(each["load"], []).extend(each["rounds"])
            if each.get("slo"):
                verdicts.setdefault(each["load"], []).append(each["slo"])
    worst = {
        label: next(verdict for verdict in ("missed", "unresolved", "met") if verdict in given)
        for label, given in verdicts.items()
    }
    return [_load(label, each, slo=worst.get(label)) for label, each in rounds.items()]


def hub_digest(model: str, revision: str | None = None) -> str | None:
    """The digest of a hub model's files, if they are in the hub's cache."""
    from headrace.models.digests import digest_of_model

    with suppress(ImportError, ValueError, OSError):
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, "config.json", revision=revision)
        if isinstance(path, str):
            return digest_of_model(Path(path).parent)
    return None


def with_hub_digest(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with the digest of a hub model, for what was measured just now: records leave it out."""
    model = facts["model"]
    if model.get("digest") is None and (digest := hub_digest(str(model.get("name")))) is not None:
        return facts | {"model": model | {"digest": digest}}
    return facts


def without_secrets(command: str) -> str:
    """A command line with its keys hidden."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    hidden: list[str] = []
    is_secret = False  # a flag may have several keys
    for word in words:
        flag, has_value, _ = word.partition("=")
        if is_secret and not word.startswith("--"):
            word = HIDDEN
        elif word.startswith("-"):
            is_secret = flag.replace("_", "-") in SECRETS and not has_value
            if flag.replace("_", "-") in SECRETS and has_value:
                word = f"{flag}={HIDDEN}"
        hidden.append(without_credentials(word))
    return shlex.join(hidden)


def without_credentials(address: str) -> str:
    return re.sub(r"://[^/@\s]*@", f"://{HIDDEN}@", address)


def _common(record: Record, kind: str) -> dict[str, Any]:
    machine = record.get("machine") or {}
    gpus = [gpu for gpu in machine.get("gpus") or [] if isinstance(gpu, Mapping)]
    return {
        "kind": kind,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": dict(record.get("model") or {}),
        "workload": {
            name: without_credentials(value) if name == "input" else value
            for name, value in (record.get("workload") or {}).items()
        },
        "machine": {name: machine.get(name) for name in MACHINE}
        | {"gpus": [{name: gpu.get(name) for name in GPU} for gpu in gpus]},
        "versions": dict(record.get("versions") or {}),
        "commit": record.get("commit"),
        "command": without_secrets(str(record.get("command") or "")),
        "rerun": None,
        "measured_at": record.get("started_at"),
    }


def _engine(record: Record, launch_command: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    address = found(record, "engine", "address") if found(record, "engine", "name") == "openai" else None
    return {
        "name": found(record, "engine", "name"),
        "versions": found(record, "engine", "versions") or {},
        "launch_command": None if launch_command is None else without_secrets(launch_command),
        "address": None if address is None else without_credentials(address),
        "settings": {name: dict(setting) for name, setting in sorted(settings.items())},
    }


def _load(label: str, rounds: Sequence[Mapping[str, Any]], *, slo: str | None = None) -> dict[str, Any]:
    from headrace.bench.statistics import mean_interval

    kept = [
        {name: each[name] for name in ("seconds", *BY_NAME) if is_number(each.get(name))} for each in rounds if each
    ]
    figures: dict[str, Any] = {}
    for name in BY_NAME:
        if values := values_of(name, kept):
            interval = mean_interval(values)
            figures[name] = {
                "mean": sum(values) / len(values),
                "interval": None if interval is None else [interval.low, interval.high],
            }
    return {"load": label, **({"slo": slo} if slo else {}), "figures": figures, "rounds": kept}


def _trials_to_verify(row: Record, *, is_batch: bool) -> list[Record]:
    measured = [trial for trial in row.get("trials") or [] if is_number(trial.get("value"))]
    confirmed = [trial for trial in measured if trial.get("phase") == "confirm"]
    kept = confirmed or [trial for trial in measured if trial.get("phase") == "race"]
    if not is_batch:  # its load says how many requests were sent; the trial counts those of all levels
        return kept
    most = max((int(trial.get("num_requests") or 0) for trial in kept), default=0)
    return [trial for trial in kept if int(trial.get("num_requests") or 0) == most]  # rounds of the same requests


def _load_of_trial(record: Record, trial: Record, *, is_batch: bool) -> dict[str, Any]:
    figures = {str(record["figure"]): trial["value"], **(trial.get("figures") or {})}
    label = ALL_AT_ONCE if is_batch else load_label(trial.get("load"))
    levels = [level for level in trial.get("levels") or [] if level.get("load") == trial.get("load")]
    return _load(label, [figures], slo=found(levels[0], "verdict") if levels else None)


def _load_to_repeat(record: Record, trials: Sequence[Record], *, is_batch: bool) -> dict[str, Any]:
    """How requests were sent: of a batch, how many of the workload's first ones, if not all."""
    if is_batch:
        num_requests = trials[0].get("num_requests")
        is_part = num_requests is not None and num_requests != found(record, "workload", "num_requests")
        return OFFLINE | ({"num_requests": num_requests} if is_part else {})
    levels: list[dict[str, Any]] = []
    for trial in trials:
        if not isinstance(trial.get("load"), Mapping):
            raise CheckpointError("this record of a tune does not say how requests were sent; run it again")
        if trial["load"] not in levels:
            levels.append(dict(trial["load"]))
    return {"levels": levels, "warms_up": True}


def _level_figures(level: Mapping[str, Any]) -> dict[str, float]:
    """Of the steady window where there is one; the share answered is of the whole level."""
    figures = flat_figures(figures_of(level))
    whole = flat_figures(level.get("summary") or {})
    return figures | {name: whole[name] for name in ("success_share",) if name in whole}


def _headline(loads: Sequence[Mapping[str, Any]]) -> str:
    rates = [
        (each["figures"]["output_tokens_per_s"]["mean"], each["load"])
        for each in loads
        if "output_tokens_per_s" in each["figures"]
    ]
    if not rates:
        return "No output was measured"
    rate, label = max(rates)
    return f"{rate:,.1f} output tokens/s, {label}"


def _slo_of(record: Record) -> str | None:
    return next((text for level in levels_of(record) if (text := found(level, "summary", "slo", "text"))), None)


def _warnings(records: Sequence[Record]) -> list[str]:
    own = [str(text) for record in records for text in record.get("warnings") or []]
    own += [
        f"{load_label(level.get('load'))}: {text}"
        for record in records
        for level in record.get("levels") or []
        for text in level.get("warnings") or []
    ]
    own += [f"ended early: {record['failure'].get('message')}" for record in records if record.get("failure")]
    return list(dict.fromkeys(own))


def _failure_of(record: Record) -> str:
    message = found(record, "failure", "message")
    return f": {message}" if message else ""


def _identity(record: Record) -> str:
    given = {
        name: setting.get("value")
        for name, setting in (found(record, "engine", "settings") or {}).items()
        if setting.get("source") == "given"
    }
    model = [found(record, "model", name) for name in ("name", "digest")]
    # Only the first of several rounds of a server warms up.
    load = {name: value for name, value in (record.get("load") or {}).items() if name != "warms_up"}
    parts = [found(record, "engine", "name"), model, given, found(record, "workload", "hash"), load]
    return json.dumps(parts, sort_keys=True, default=str)
