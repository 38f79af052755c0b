"""Runs again what a checkpoint has measured: the same workload by its hash, engine, settings given, and load.

Settings that the engine chose by itself are chosen again; those that come out differently are named by `verify`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headrace.bench.engines import Engine, RunningEngine
from headrace.bench.load import load_from_json
from headrace.bench.slo import Slo
from headrace.bench.workloads import Workload, WorkloadSpec, build, read_workload
from headrace.checkpoint.create import from_job, from_records, loads_of, merged, verification, with_hub_digest
from headrace.checkpoint.document import Checkpoint, CheckpointError
from headrace.checkpoint.facts import OF_PLACE
from headrace.checkpoint.jobs import INPUT, digest_of_input
from headrace.checkpoint.judge import BY_NAME
from headrace.config import EMBEDDED_MODEL
from headrace.errors import ConfigError

ENGINES = ("headrace", "vllm", "openai")
DERIVED = frozenset({"model", "num_blocks", "num_gpu_blocks"})  # reported as given, but no setting

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run again. What is None is as recorded."""

    num_rounds: int | None = None
    model: str | None = None  # another place of the same model
    data: str | None = None  # another place of the workload's or the job's file
    url: str | None = None
    api_key: str | None = None
    vllm_python: str | None = None
    start_timeout_s: float = 900.0


def measure_again(checkpoint: Checkpoint, options: Options, say: Say, engine: Engine | None = None) -> dict[str, Any]:
    """Facts as in a new checkpoint. `engine` stands in for the recorded one in tests."""
    if checkpoint.at("verification", "kind") == "job":
        return _run_job(checkpoint, options, say)
    rank_by = checkpoint.at("verification", "rank_by")
    if rank_by is not None and rank_by not in BY_NAME:
        raise CheckpointError(f"the checkpoint is ranked by {rank_by!r}, which is no figure of this version")
    engine = engine or engine_of(checkpoint, options)
    workload = workload_of(checkpoint, options)
    serves = checkpoint.at("verification", "kind") == "online"
    num_rounds = options.num_rounds or int(checkpoint.at("verification", "num_rounds") or 1)
    say(f"starting {engine.name}: {num_rounds} round{'s' * (num_rounds > 1)} of workload {workload.name!r}")
    with engine.start(settings_given(checkpoint), serves=serves) as running:
        say(f"{engine.name} is ready after {running.start_s or 0.0:.1f} s")
        if serves:
            records = online_again(checkpoint, running, workload, num_rounds, options, say)
        else:
            records = [_offline(checkpoint, running, workload, num_rounds, say)]
    found = merged([loads_of(record, rank_by) for record in records])
    if rank_by is not None:  # each round has the load with the best figure, which need not be the recorded one
        label = checkpoint.facts["verification"]["loads"][0]["load"]
        found = merged([[each | {"load": label}] for each in found])
    failure = next((record["failure"] for record in records if "failure" in record), None)
    if not any(each["rounds"] for each in found):
        message = failure["message"] if failure else "no request was answered"
        raise CheckpointError(f"nothing could be measured: {message}")
    kind = str(checkpoint.at("verification", "kind"))
    facts = with_hub_digest(from_records(records))
    return facts | {"verification": verification(kind, found, rank_by=rank_by), "failure": failure}


def settings_given(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings that a user gave. Where a server listened is left out."""
    return {
        name: _plain(setting.get("value"))
        for name, setting in checkpoint.facts["engine"]["settings"].items()
        if isinstance(setting, Mapping)
        and setting.get("source") == "given"
        and name not in DERIVED
        and name not in OF_PLACE
    }


def _plain(value: Any) -> Any:
    """A value as it is given: engines report a dtype as torch.float32."""
    return value.removeprefix("torch.") if isinstance(value, str) else value


def engine_of(checkpoint: Checkpoint, options: Options) -> Engine:
    """The recorded engine, not started."""
    name = checkpoint.at("engine", "name")
    if name not in ENGINES:
        raise CheckpointError(f"unknown engine {name!r} (known: {', '.join(ENGINES)}); it cannot be started here")
    if name == "openai":
        from headrace.bench.engines.openai_engine import OpenAIEngine

        address = options.url or checkpoint.at("engine", "address")
        if not address:
            raise CheckpointError("the checkpoint has no address of its server; give one with --url")
        return OpenAIEngine(address, model=options.model or checkpoint.at("model", "name"), api_key=options.api_key)
    if options.url:
        raise ConfigError(f"--url is for a server that is running; this checkpoint starts {name}")
    model = present_model(checkpoint, options)
    if name == "vllm":
        from headrace.bench.engines.vllm_engine import VllmEngine

        return VllmEngine(model, python=options.vllm_python, start_timeout_s=options.start_timeout_s)
    from headrace.bench.engines.headrace_engine import HeadraceEngine

    return HeadraceEngine(model, start_timeout_s=options.start_timeout_s)


def present_model(checkpoint: Checkpoint, options: Options) -> str:
    """The model's name, if its files are here. Nothing is downloaded: other files would be another model."""
    from headrace.bench.engines.shapes import SHAPES
    from headrace.models.cache import cached_models, embedded_path

    model = str(options.model or checkpoint.at("model", "name") or EMBEDDED_MODEL)
    if model in SHAPES or Path(model).expanduser().exists():
        return model
    if model == EMBEDDED_MODEL:
        if embedded_path().exists():
            return model
    elif any(each.name == model for each in cached_models()):
        return model
    digest = checkpoint.at("model", "digest")
    is_path = model.startswith((".", "/", "~")) or model.count("/") != 1
    way = "copy it there" if is_path and model != EMBEDDED_MODEL else f"fetch it with 'headrace models fetch {model}'"
    raise CheckpointError(
        f"the model {model!r} is not on this machine: {way}, or give its place with --model"
        + (f" (digest of its files: {digest})" if digest else "")
    )


def workload_of(checkpoint: Checkpoint, options: Options) -> Workload:
    """The same requests. Refused if their hash differs: figures of another workload verify nothing."""
    facts = checkpoint.facts["workload"]
    names = {field.name for field in fields(WorkloadSpec)}
    try:
        spec = WorkloadSpec(**{name: value for name, value in facts.items() if name in names})
        if facts.get("name") == "data":
            path = options.data or _data_of(checkpoint)
            workload, _ = read_workload(path, spec, count_tokens=_counter_of(checkpoint, options), skips_bad_lines=True)
        else:
            workload = build(spec)
    except (TypeError, ConfigError) as error:
        raise CheckpointError(f"the workload cannot be made again: {error}") from error
    if workload.spec.hash != facts.get("hash"):
        raise CheckpointError(
            f"the workload is not the recorded one: its hash is {workload.spec.hash}, recorded is {facts.get('hash')}"
            + ("; the file has other content" if facts.get("name") == "data" else "")
        )
    return workload


def _data_of(checkpoint: Checkpoint) -> str:
    """The file that the recorded command names."""
    words = shlex.split(str(checkpoint.facts.get("command") or ""))
    for word, following in zip(words, [*words[1:], ""], strict=True):
        path = following if word == "--data" else word.removeprefix("--data=") if word.startswith("--data=") else ""
        if path and ("://" in path or Path(path).exists()):
            return path
    raise CheckpointError(
        f"the workload is a file of the user (digest {checkpoint.at('workload', 'data_digest')}), which is not where "
        "it was; give its place with --data"
    )


def _counter_of(checkpoint: Checkpoint, options: Options) -> Callable[[str], int] | None:
    """Counts tokens as the measurement did: with the model's tokenizer, if it is here."""
    from headrace.bench.engines.shapes import SHAPES

    name, model = checkpoint.at("engine", "name"), options.model or checkpoint.at("model", "name")
    if name == "openai" or model in SHAPES or (name == "vllm" and not Path(str(model)).exists()):
        return None
    from headrace.models import open_checkpoint
    from headrace.text import load_tokenizer

    tokenizer = load_tokenizer(open_checkpoint(str(model)).text)
    return lambda text: len(tokenizer.encode(text))


def _offline(
    checkpoint: Checkpoint, running: RunningEngine, workload: Workload, num_rounds: int, say: Say
) -> dict[str, Any]:
    from headrace.bench.offline import measure_offline

    num_requests = checkpoint.at("load", "num_requests")  # a tune measures the first requests of a long workload
    asked = workload if num_requests is None else workload.first(num_requests)

    def on_round(number: int, figures: dict[str, Any]) -> None:
        say(f"round {number} of {num_rounds}: {figures['output_tokens_per_s']:,.1f} output tokens/s")

    record = measure_offline(running, asked, num_rounds=num_rounds, on_round=on_round)
    return record | {"load": checkpoint.facts.get("load"), "workload": workload.facts}


def online_again(
    checkpoint: Checkpoint, running: RunningEngine, workload: Workload, num_rounds: int, options: Options, say: Say
) -> list[dict[str, Any]]:
    """The recorded loads against a server: one record for each round."""
    from headrace.bench.online import Client, measure_online

    how = checkpoint.facts.get("load")
    if not isinstance(how, Mapping) or not isinstance(how.get("levels"), list) or not how["levels"]:
        raise CheckpointError("the checkpoint does not say how requests were sent")
    loads = [load_from_json(each) for each in how["levels"]]
    slo = checkpoint.facts.get("slo")
    client = Client(
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else None,
        timeout_s=float(how.get("timeout_s", 600.0)),
        compatibility=str(how.get("compatibility", "vllm")),
    )
    records = []
    for number in range(1, num_rounds + 1):
        measured = measure_online(
            running,
            workload,
            loads,
            slo=None if slo is None else Slo.parse(slo),
            client=client,
            warms_up=bool(how.get("warms_up", True)) and number == 1,
        )
        if measured.was_interrupted:
            raise KeyboardInterrupt
        records.append(measured.record)
        say(f"round {number} of {num_rounds} is done")
        if "failure" in measured.record:
            break
    return records


def _run_job(checkpoint: Checkpoint, options: Options, say: Say) -> dict[str, Any]:
    """Run the job with the recorded arguments in processes of its own, to a temporary output."""
    arguments = checkpoint.at("rerun", "arguments")
    if not isinstance(arguments, list):
        reasons = "; ".join(checkpoint.facts.get("warnings") or []) or "it has no arguments"
        raise CheckpointError(f"this job cannot be run again: {reasons}")
    source = Path(options.data or str(checkpoint.at("workload", "input")))
    if not source.is_file():
        raise CheckpointError(f"the job's input {source} is not there; give its place with --data")
    digest = digest_of_input(source)
    if digest != checkpoint.at("workload", "data_digest"):
        raise CheckpointError(
            f"the input {source} is not the recorded one: its digest is {digest}, "
            f"recorded is {checkpoint.at('workload', 'data_digest')}"
        )
    model = present_model(checkpoint, options)
    words = [str(source) if word == INPUT else str(word) for word in arguments]
    words += ["--model", model] if options.model else []
    num_rounds = options.num_rounds or 1
    found: list[dict[str, Any]] = []
    for number in range(1, num_rounds + 1):
        say(f"running the job again, {number} of {num_rounds}")
        summary = run_once(words)
        found.append(
            from_job(summary, command="", workload=checkpoint.facts["workload"] | {"data_digest": digest}, arguments=[])
        )
    loads = merged([each["verification"]["loads"] for each in found])
    return found[-1] | {"verification": verification("job", loads), "failure": None}


def run_once(arguments: list[str]) -> dict[str, Any]:
    """The summary of one `headrace run`."""
    from headrace.bench.engines.headrace_engine import environment

    with tempfile.TemporaryDirectory(prefix="headrace-verify-") as directory:
        summary, output = Path(directory) / "summary.json", Path(directory) / "output.jsonl"
        command = [sys.executable, "-m", "headrace", "run", *arguments, "-o", str(output), "--quiet"]
        done = subprocess.run(
            [*command, "--json-summary", str(summary)],
            env={**os.environ, **environment()},
            capture_output=True,
            text=True,
            check=False,
        )
        if not summary.exists():
            message = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise CheckpointError(f"the job did not run: {message[0].removeprefix('headrace: error: ')}")
        found: dict[str, Any] = json.loads(summary.read_text())
        return found
