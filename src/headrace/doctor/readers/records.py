"""Evidence of a finished measurement: a record of `headrace bench`, or the summary or status file of a batch job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.bench.levels import load_amount, load_label
from headrace.bench.record import SCHEMA, RecordError
from headrace.bench.values import found, is_number
from headrace.doctor.evidence import ClientCost, Evidence
from headrace.doctor.readers.shapes import shape_of_sizes
from headrace.errors import reason_of
from headrace.plan.gpus import Gpu, match_gpu

Record = Mapping[str, Any]


def read_record(path: Path) -> Evidence:
    """The evidence of a file; of several records in it, the last. A directory of a job has its status.json."""
    record, num_records = last_record(path)
    evidence = evidence_of_record(record, origin=str(path))
    if num_records > 1:
        remark = f"the file has {num_records:,} records; this is the last one"
        return _with_remarks(evidence, remark)
    return evidence


def last_record(path: Path) -> tuple[Any, int]:
    """The last record of a file as it is, and how many the file has."""
    if path.is_dir() and (path / "status.json").exists():
        path = path / "status.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {reason_of(error)}") from error
    lines = [line for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else [text]
    try:
        return (json.loads(lines[-1]) if lines else None), len(lines)
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from None


def evidence_of_record(record: Any, *, origin: str) -> Evidence:
    if isinstance(record, Mapping) and record.get("schema") == SCHEMA:
        read = _KINDS.get(str(record.get("kind")))
        if read is None:
            raise RecordError(f"{origin}: doctor reads {', '.join(_KINDS)} records, and this is {record.get('kind')!r}")
        return read(record, origin)
    if isinstance(record, Mapping) and "outcome" in record and "steps" in record:
        return _of_job(record, origin)
    if isinstance(record, Mapping) and "limited_by" in record and "lines_done" in record:
        return _of_status(record, origin)
    raise RecordError(
        f"{origin} is neither a record of headrace bench (schema {SCHEMA}) nor a --json-summary or status.json of a job"
    )


def _of_offline(record: Record, origin: str) -> Evidence:
    """The median round."""
    rounds = [each for each in record.get("rounds") or [] if is_number(each.get("seconds"))]
    if not rounds:
        return Evidence(source="offline", origin=origin, **_common(record), remarks=_failure(record))
    chosen = sorted(rounds, key=lambda each: float(each["seconds"]))[len(rounds) // 2]
    counters = chosen.get("counters") or {}
    num_requests = _number(found(record, "workload", "num_requests"))
    facts = {
        **_common(record),
        **_of_counters(counters),
        **_lengths(chosen, num_requests),
    }
    facts["output_tokens"] = facts.get("output_tokens") or _number(chosen.get("num_output_tokens"))
    facts["prompt_tokens"] = facts.get("prompt_tokens") or _number(chosen.get("num_prompt_tokens"))
    return Evidence(
        source="offline",
        origin=origin,
        seconds=float(chosen["seconds"]),
        num_requests=num_requests,
        num_waiting=None,
        gpu_utilization=_utilization(chosen.get("telemetry")),
        remarks=_failure(record),
        **facts,
    )


def _of_online(record: Record, origin: str) -> Evidence:
    """The level with the highest load."""
    levels = list(record.get("levels") or [])
    if not levels:
        return Evidence(source="online", origin=origin, **_common(record), remarks=_failure(record))
    level = max(levels, key=lambda each: load_amount(each.get("load")) or 0.0)
    summary, client = level.get("summary") or {}, level.get("client") or {}
    remarks = [*_failure(record)]
    if len(levels) > 1:
        remarks.append(f"of {len(levels)} load levels, this is the highest: {load_label(level.get('load'))}")
    num_ok = _number(summary.get("num_ok"))
    facts = {**_common(record), **_of_counters(level.get("counters") or {}), **_lengths(summary, num_ok)}
    facts["output_tokens"] = facts.get("output_tokens") or _number(summary.get("num_output_tokens"))
    facts["prompt_tokens"] = facts.get("prompt_tokens") or _number(summary.get("num_prompt_tokens"))
    facts.pop("num_refused", None)  # the client's count has the same requests
    failed = [_number(summary.get(name)) for name in ("num_failed", "num_timeout")]
    return Evidence(
        source="online",
        origin=origin,
        seconds=_number(summary.get("seconds")),
        num_requests=_number(summary.get("num_requests")),
        num_answered=num_ok,
        num_refused=_number(summary.get("num_refused")),
        num_failed=None if None in failed else sum(each or 0.0 for each in failed),
        num_in_flight=_number(found(level, "load", "concurrency")),
        client=_client(client),
        ttft_p95_s=_seconds(found(summary, "ttft_ms", "p95")),
        token_gap_p50_s=_seconds(found(summary, "itl_ms", "p50")),
        token_gap_p99_s=_seconds(found(summary, "itl_ms", "p99")),
        gpu_utilization=_utilization(level.get("telemetry")),
        remarks=tuple(remarks),
        **facts,
    )


def _of_sweep(record: Record, origin: str) -> Evidence:
    """The best config, in its median round."""
    configs = [each for each in record.get("configs") or [] if isinstance(each, Mapping)]
    best = next((each for each in configs if each.get("rank") == 1), None)
    remarks = [
        f"config {each.get('name')!r} failed: {found(each, 'failure', 'kind')}, {found(each, 'failure', 'message')}"
        for each in configs
        if each.get("status") == "failed"
    ]
    facts = _common({**record, "engine": {**(record.get("engine") or {}), "settings": found(best, "in_force")}})
    if best is not None:
        remarks.insert(0, f"of {len(configs)} configs, this is the best: {best.get('name')}")
        asked = dict(best.get("settings") or {})
        facts["settings"] = {**facts["settings"], **asked}
        facts["given"] = facts["given"] | frozenset(asked)
        facts |= _median_round(record, best)
    if facts.get("num_steps") is None:
        remarks.append("this sweep has no counters of the engine; give doctor a record of one of its configs")
    return Evidence(source="sweep", origin=origin, remarks=tuple(remarks), **facts)


def _median_round(record: Record, row: Record) -> dict[str, Any]:
    """Figures and counters of a config of a sweep."""
    rounds = [each for each in row.get("rounds") or [] if isinstance(each, Mapping)]
    if not rounds:
        return {}
    # In the order of their time, where they have one: the rate of a run is not always in its figures.
    place = sorted(range(len(rounds)), key=lambda each: _number(rounds[each].get("seconds")) or 0.0)[len(rounds) // 2]
    figures, counters = rounds[place], list(row.get("counters") or [])
    num_answered = _number(figures.get("num_ok"))
    num_requests = _number(figures.get("num_requests")) or _number(found(record, "workload", "num_requests"))
    facts = {
        **_of_counters(counters[place] if place < len(counters) else {}),
        **_lengths(figures, num_answered or num_requests),
        "seconds": _number(figures.get("seconds")),
        "num_requests": num_requests,
    }
    for name, own in (("prompt_tokens", "num_prompt_tokens"), ("output_tokens", "num_output_tokens")):
        facts[name] = facts.get(name) or _number(figures.get(own))
    if num_answered is not None:  # over HTTP; the client's count has the requests that the server counts as refused
        facts |= {"num_answered": num_answered, "num_refused": _number(figures.get("num_refused"))}
    return facts


def _of_job(summary: Record, origin: str) -> Evidence:
    """A `--json-summary`."""
    steps, requests = _number(summary.get("steps")), _number(summary.get("answered"))
    prompt, queried_share = _number(summary.get("prompt_tokens")), _number(summary.get("prefix_hit_share"))
    host, wait = (_number(summary.get(f"{part}_seconds_per_step")) for part in ("host", "wait"))
    output = _number(summary.get("completion_tokens"))
    return Evidence(
        source="job",
        origin=origin,
        engine="headrace",
        seconds=_number(summary.get("seconds")),
        num_steps=steps,
        num_requests=requests,
        prompt_tokens=prompt,
        output_tokens=output,
        kv_use=_number(summary.get("kv_use_peak")),
        num_preemptions=_number(summary.get("preemptions")),
        recomputed_tokens=_number(summary.get("recomputed_tokens")),
        prefix_queried_tokens=prompt,
        prefix_hit_tokens=None if prompt is None or queried_share is None else prompt * queried_share,
        tokens_per_step=_number(summary.get("tokens_per_step")),
        host_seconds=None if host is None or steps is None else host * steps,
        wait_seconds=None if wait is None or steps is None else wait * steps,
        prompt_len=prompt / requests if prompt is not None and requests else None,
        output_len=output / requests if output is not None and requests else None,
        num_answered=requests,
        limited_by_seconds=summary.get("limited_by_seconds") or None,
        **_settings(summary.get("settings")),
        **_hardware(summary, {"name": summary.get("model"), **(summary.get("model_shape") or {})}),
    )


def _of_status(status: Record, origin: str) -> Evidence:
    """A job's status.json: the last ten seconds."""
    limit = status.get("limited_by")
    remark = [] if limit is None else [f"the job says: limited by {limit}: {status.get('limited_because')}"]
    return Evidence(
        source="job",
        origin=origin,
        engine="headrace",
        seconds=_number(status.get("seconds")),
        num_requests=_number(status.get("lines_answered")),
        num_running=_number(status.get("sequences_running")),
        num_waiting=_number(status.get("sequences_waiting")),
        kv_use=_number(status.get("kv_use")),
        prompt_tokens=_number(status.get("prompt_tokens")),
        output_tokens=_number(status.get("completion_tokens")),
        limited_by_seconds=None if limit is None else {str(limit): 1.0},
        model=shape_of_sizes({"name": status.get("model")}),
        remarks=tuple(remark),
    )


_KINDS: dict[str, Callable[[Record, str], Evidence]] = {
    "offline": _of_offline,
    "online": _of_online,
    "sweep": _of_sweep,
}


def _common(record: Record) -> dict[str, Any]:
    engine = record.get("engine") or {}
    return {
        "engine": engine.get("name"),
        **_settings(engine.get("settings")),
        **_hardware(record, record.get("model") or {}),
    }


def _settings(found_settings: Any) -> dict[str, Any]:
    settings = found_settings if isinstance(found_settings, Mapping) else {}
    values = {name: each["value"] for name, each in settings.items() if isinstance(each, Mapping) and "value" in each}
    given = frozenset(
        name for name, each in settings.items() if isinstance(each, Mapping) and each.get("source") == "given"
    )
    return {"settings": values, "given": given}


def _hardware(record: Record, model: Record) -> dict[str, Any]:
    gpus = found(record, "machine", "gpus")
    settings = _settings(record.get("settings") or found(record, "engine", "settings"))["settings"]
    device = settings.get("device")
    is_on_cpu = device == "cpu" if device in ("cpu", "cuda") else (not gpus if isinstance(gpus, list) else None)
    gpu: Gpu | None = None
    if isinstance(gpus, list) and gpus and not is_on_cpu:
        gpu = match_gpu(str(found(gpus[0], "name")))
    return {"is_on_cpu": is_on_cpu, "gpu": gpu, "model": shape_of_sizes(model)}


def _of_counters(counters: Record) -> dict[str, float | None]:
    names = {
        "num_steps": "num_steps",
        "num_preemptions": "num_preemptions",
        "prompt_tokens": "num_prompt_tokens",
        "output_tokens": "num_generated_tokens",
        "recomputed_tokens": "num_recomputed_tokens",
        "prefix_queried_tokens": "prefix_queried_tokens",
        "prefix_hit_tokens": "prefix_hit_tokens",
        "num_refused": "num_refused",
    }
    facts: dict[str, float | None] = {field: _number(counters.get(name)) for field, name in names.items()}
    steps = facts["num_steps"]
    for part in ("host", "wait"):
        total, each = (_number(counters.get(f"{part}_{unit}")) for unit in ("seconds", "ms_per_step"))
        if total is None and each is not None and steps is not None:
            total = each * steps / 1e3
        facts[f"{part}_seconds"] = total
    if steps and facts["output_tokens"] is not None and facts["prompt_tokens"] is not None:
        computed = facts["output_tokens"] + facts["prompt_tokens"] - (facts["prefix_hit_tokens"] or 0.0)
        facts["tokens_per_step"] = computed / steps
    return facts


def _lengths(figures: Record, num_requests: float | None) -> dict[str, float | None]:
    prompt, output = _number(figures.get("num_prompt_tokens")), _number(figures.get("num_output_tokens"))
    return {
        "prompt_len": prompt / num_requests if prompt is not None and num_requests else None,
        "output_len": output / num_requests if output is not None and num_requests else None,
    }


def _client(client: Record) -> ClientCost | None:
    shares = [share for share in client.get("cpu_shares") or [] if is_number(share)]
    cost = ClientCost(
        cpu_share=max(shares) if shares else None,
        loop_lag_p99_ms=_number(found(client, "loop_lag_ms", "p99")),
        send_late_p99_ms=_number(found(client, "send_late_ms", "p99")),
    )
    return None if cost == ClientCost() else cost


def _utilization(telemetry: Any) -> float | None:
    """Of the busiest GPU: others of the machine may have nothing to do with the measurement."""
    gpus = found(telemetry, "gpu", "gpus")
    means = [found(gpu, "utilization", "mean") for gpu in gpus] if isinstance(gpus, list) else []
    known = [float(mean) for mean in means if is_number(mean)]
    return max(known) if known else None


def _failure(record: Record) -> tuple[str, ...]:
    failure = record.get("failure")
    return () if not failure else (f"the run failed: {found(failure, 'kind')}, {found(failure, 'message')}",)


def _with_remarks(evidence: Evidence, *remarks: str) -> Evidence:
    return replace(evidence, remarks=(*evidence.remarks, *remarks))


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _seconds(milliseconds: Any) -> float | None:
    return float(milliseconds) / 1e3 if is_number(milliseconds) else None
