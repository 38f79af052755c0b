"""`headrace doctor --fix`: what advice is tested on, for each kind of evidence, and how the result is shown.

a record            the same engine, settings given, workload (by its hash) and load, as `checkpoint verify` does
a job's summary     the same settings; --data names its input
a command line      its settings; the workload of --data, --workload or lengths, all requests at once
a live server       copies on this machine with its settings, and the lengths and the concurrency that were seen
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.bench.flags import RECORDS, engine_of, loads_of, workload_of
from headrace.cli.bench.measure import build_parser as bench_parser
from headrace.cli.bench.measure import num_requests_of_all
from headrace.cli.bench.output import say
from headrace.cli.bench.sweep import engine_version, measure_of, model_identity
from headrace.cli.fetching import fetch_if_missing
from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench.engines import Engine, RunningEngine
    from headrace.bench.workloads import Workload
    from headrace.doctor.diagnosis import Diagnosis
    from headrace.doctor.fix import FixResult, Trial

IMPROVED, NOT_IMPROVED, RESUMABLE = 0, 3, 75
MIN_REQUESTS = 64  # of a workload of lengths
REQUESTS_PER_SEQUENCE = 2  # of the largest batch that is tested: slots are full for most of a round
SHARED_MACHINE = (
    "copies of the server were measured on this machine. If it is the server's own, both shared it: the live server "
    "was slower meanwhile, and ratios may be closer to 1 than without it"
)


def fix(given: argparse.Namespace, diagnosis: Diagnosis) -> int:
    """Test advice, print the result, and return the exit code."""
    from headrace.doctor.fix import MIN_ROUNDS, FixResult, proposals, try_advice

    if given.rounds < MIN_ROUNDS:
        raise ConfigError(f"--rounds must be at least {MIN_ROUNDS} with --fix, got {given.rounds}")
    found = proposals(diagnosis)
    if all(each.obstacle for each in found):
        show(given, diagnosis, FixResult(tested=(), untestable=tuple(found)))
        return NOT_IMPROVED if diagnosis.problems else IMPROVED
    trial = trial_of(given, diagnosis)
    for note in trial.notes:
        say(note)
    stem = given.output or Path(RECORDS) / "doctor-fix"
    journals = [stem.with_suffix(f".{place}.journal") for place in range(100)]
    result = try_advice(
        diagnosis,
        trial,
        num_rounds=given.rounds,
        tries_all=given.fix == "all",
        journal=lambda place: journals[place],
        say=say,
    )
    if not result.was_stopped:
        for path in journals:
            path.unlink(missing_ok=True)  # the next test of the same thing is to measure again
    show(given, diagnosis, result)
    if result.was_stopped:
        return RESUMABLE
    return IMPROVED if result.best is not None or not diagnosis.problems else NOT_IMPROVED


def show(given: argparse.Namespace, diagnosis: Diagnosis, result: FixResult) -> None:
    document = result.as_json(diagnosis)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(document, indent=2, default=str) + "\n", encoding="utf-8")
        say(f"record: {given.output}")
    if given.json:
        print(json.dumps(document, indent=2, default=str))
        return
    print(result.headline)
    for tested in result.tested:
        if tested.headline != result.headline:
            print(f"  {tested.headline}")
        if tested.proposal.advice.gain is not None and tested.ratio is not None:
            most = "at most " if tested.proposal.advice.certainty == "bound" else ""
            print(f"  predicted was {most}{1 + tested.proposal.advice.gain:.2f}x")
    if result.best is None and result.tested and given.fix != "all":
        print("  --fix all tests the other advice too")
    for each in result.untestable:
        print(f"  not tested: {each.advice.text}: {each.obstacle}")
    for note in result.notes:
        print(f"  note: {note}")
    print()


def trial_of(given: argparse.Namespace, diagnosis: Diagnosis) -> Trial:
    source = diagnosis.evidence.source
    if source == "command":
        return _of_command(given, diagnosis)
    if source == "live":
        return _of_server(given, diagnosis)
    from headrace.doctor.readers.records import last_record

    record, _ = last_record(Path(given.record))
    if source == "sweep":
        raise ConfigError("a sweep has compared its settings already; give --fix a record of one of its configs")
    return _of_job(given, diagnosis, record) if source == "job" else _of_record(given, record)


def _of_record(given: argparse.Namespace, record: Mapping[str, Any]) -> Trial:
    from headrace.bench.levels import load_amount
    from headrace.checkpoint import rerun
    from headrace.checkpoint.document import Checkpoint
    from headrace.doctor.fix import Trial

    if record["engine"]["name"] == "openai":
        raise ConfigError(
            "this record is of a server that bench did not start, so that its settings cannot be changed; give the "
            "command that starts it after --"
        )
    how, notes = dict(record.get("load") or {}), list[str]()
    serves = record["kind"] == "online"
    if serves and len(how.get("levels") or []) > 1:
        how["levels"] = [max(how["levels"], key=lambda each: load_amount(each) or 0.0)]
        notes.append("only the highest load of the record is tested, which is the one that was judged")
    options = rerun.Options(data=given.data, vllm_python=given.vllm_python)
    checkpoint = Checkpoint({**record, "load": how})
    engine = rerun.engine_of(checkpoint, options)

    def online(running: RunningEngine, workload: Workload) -> dict[str, Any]:
        return rerun.online_again(checkpoint, running, workload, 1, options, lambda line: None)[0]

    return Trial(
        engine=engine,
        settings=rerun.settings_given(checkpoint),
        workload=rerun.workload_of(checkpoint, options),
        measure=online if serves else measure_of(_bench([]), [], None),
        serves=serves,
        known_settings=_known(engine, serves),
        identity={"load": how, "model": checkpoint.at("model", "digest"), "version": engine_version(engine)},
        notes=tuple(notes),
    )


def _of_job(given: argparse.Namespace, diagnosis: Diagnosis, summary: Mapping[str, Any]) -> Trial:
    if given.data is None:
        raise ConfigError("a job's summary does not name its input: give it with --data to test advice on its lines")
    evidence = diagnosis.evidence
    settings = {name: evidence.settings[name] for name in evidence.given}
    model = str(given.model or summary.get("model") or EMBEDDED_MODEL)
    note = "the lines of the job were run as a benchmark, all at once: reading, writing and retries are left out"
    return _measured(given, diagnosis, "headrace", model, settings, notes=[note])


def _of_command(given: argparse.Namespace, diagnosis: Diagnosis) -> Trial:
    evidence = diagnosis.evidence
    command = evidence.command
    assert command is not None
    is_job = "run" in [word.rpartition("/")[2] for word in command.words[:4]]
    if is_job and given.data is None and command.positional:
        given.data = command.positional[0]
    named = [str(value) for value in command.values("--model")]
    model = (named or ([] if is_job else list(command.positional)) or [EMBEDDED_MODEL])[0]
    settings = {name: evidence.settings[name] for name in evidence.given}
    return _measured(given, diagnosis, command.program, model, settings)


def _of_server(given: argparse.Namespace, diagnosis: Diagnosis) -> Trial:
    from headrace.bench.engines.base import EngineFailure
    from headrace.bench.engines.http import HttpError, ServerClient
    from headrace.cli.doctor import key_of

    evidence = diagnosis.evidence
    if evidence.engine != "headrace":
        raise ConfigError(
            f"{evidence.engine} does not say how it was started; give its command instead of --url, and "
            "--input-len, --output-len and --concurrency as seen there"
        )
    try:
        told = ServerClient(evidence.origin, api_key=key_of(given)).get_json("/server_info")
    except (HttpError, EngineFailure) as error:
        raise ConfigError(f"{evidence.origin}/server_info is needed for its settings: {error}") from None
    found = {name: each["value"] for name, each in told["settings"].items() if each.get("source") == "given"}
    notes = [SHARED_MACHINE]
    for name in [name for name, value in found.items() if value == "set"]:
        del found[name]  # a secret, or a path of that machine
        if name == "tokenizer":
            notes.append("the server has a tokenizer of its own, whose place it does not tell: the model's was used")
    if given.concurrency is None:
        given.concurrency = max(1, round((evidence.num_running or 0.0) + (evidence.num_waiting or 0.0)))
        notes.append(f"{given.concurrency} clients, as many requests as were seen in the server")
    if given.data is None and given.workload is None:
        given.input_len = given.input_len or round(evidence.prompt_len or 0) or None
        given.output_len = given.output_len or round(evidence.output_len or 0) or None
    return _measured(given, diagnosis, "headrace", str(given.model or told["model"]["name"]), found, notes=notes)


def _measured(
    given: argparse.Namespace,
    diagnosis: Diagnosis,
    engine_name: str,
    model: str,
    settings: Mapping[str, Any],
    *,
    notes: list[str] | None = None,
) -> Trial:
    """What `headrace bench` would measure with these settings."""
    from headrace.checkpoint.facts import OF_PLACE
    from headrace.doctor.fix import Trial

    notes = notes or []
    bench = _bench([model, "--engine", engine_name, *_workload_words(given, diagnosis, notes)])
    bench.vllm_python = given.vllm_python
    engine, loads = engine_of(bench), loads_of(bench)
    if engine_name == "headrace":
        fetch_if_missing(model, quiet=given.json)
    workload, more = workload_of(bench, model, num_requests_of_all(loads))
    serves = bool(loads)
    known = _known(engine, serves)
    left_out = {name for name in settings if name in OF_PLACE or name in ("model", "config") or name not in known}
    dropped = sorted(name for name in left_out if name not in OF_PLACE and name != "model")
    if dropped:
        notes.append(f"not part of the test: {', '.join(dropped)}")
    if not serves:
        notes.append("all requests were given at once, in process; --concurrency N measures over HTTP")
    return Trial(
        engine=engine,
        settings={name: value for name, value in settings.items() if name not in left_out},
        workload=workload,
        measure=measure_of(bench, loads, None),
        serves=serves,
        known_settings=known,
        identity={
            "model": model_identity(model),
            "version": engine_version(engine),
            "loads": [load.as_json() for load in loads],
        },
        notes=(*notes, *more),
    )


def _workload_words(given: argparse.Namespace, diagnosis: Diagnosis, notes: list[str]) -> list[str]:
    """Workload and load as flags of `headrace bench`."""
    from headrace.doctor.estimates import USUAL_OUTPUT, USUAL_PROMPT

    flags: dict[str, Any] = {"--concurrency": given.concurrency, "--num-requests": given.num_requests}
    if given.data is not None:
        flags["--data"] = given.data
    elif given.workload is not None:
        flags |= {"--workload": given.workload, "--input-len": given.input_len, "--output-len": given.output_len}
    else:
        lens = given.input_len or USUAL_PROMPT, given.output_len or USUAL_OUTPUT
        flags |= {"--workload": "random", "--input-len": lens[0], "--output-len": lens[1]}
        flags["--num-requests"] = given.num_requests or _num_requests(given, diagnosis)
        is_assumed = given.input_len is None or given.output_len is None
        assumed = " (assumed; --data, --workload or --input-len and --output-len change it)" if is_assumed else ""
        notes.append(
            f"workload: {flags['--num-requests']} requests of {lens[0]} random tokens and {lens[1]} out{assumed}"
        )
    return [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]


def _num_requests(given: argparse.Namespace, diagnosis: Diagnosis) -> int:
    """Enough for the larger of both batches."""
    from headrace.doctor.fix import proposals

    advised = [
        each.advice.value
        for each in proposals(diagnosis)
        if each.advice.setting == "max_num_seqs" and isinstance(each.advice.value, int)
    ]
    largest = max(*advised, int(diagnosis.evidence.number("max_num_seqs") or 0), given.concurrency or 0)
    return max(MIN_REQUESTS, REQUESTS_PER_SEQUENCE * largest)


def _bench(words: list[str]) -> argparse.Namespace:
    return bench_parser().parse_args(words)


def _known(engine: Engine, serves: bool) -> frozenset[str]:
    """The names of the engine's settings, and of its server's where it serves."""
    if engine.name == "vllm":
        from headrace.bench.engines.vllm_engine import VllmEngine

        assert isinstance(engine, VllmEngine)
        return frozenset(engine.setting_names(serves=serves))
    from headrace.server.options import ServerOptions

    kinds = (EngineConfig, ServerOptions) if serves else (EngineConfig,)
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind)) - {"model"}
