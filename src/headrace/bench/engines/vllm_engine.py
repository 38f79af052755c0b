"""vLLM as the measured engine: `LLM` in a worker, or `vllm serve`, with the interpreter of its own environment."""

from __future__ import annotations

import json
import re
import shlex
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from headrace.bench.engines import metrics
from headrace.bench.engines.base import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.engines.http import HttpError, ServerClient, counters_of_server
from headrace.bench.engines.processes import Child, plain, shown
from headrace.bench.engines.shapes import MAX_MODEL_LEN, SHAPES, model_identity, shape_directory
from headrace.bench.engines.vllm_installation import CHILD_ENV, LAUNCHER, Installation
from headrace.bench.engines.vllm_settings import NEUTRAL, UNDECIDED, VllmSettings, in_force, translate
from headrace.bench.engines.workers import Worker
from headrace.bench.workloads import Workload
from headrace.config import EMBEDDED_MODEL

NAME = "vllm"
START_S = 1200.0  # compiling and capturing graphs takes minutes on some machines
INFO_S = 120.0  # the first answer runs programs to describe the machine
_KEY_OPTIONS = frozenset({"api_key"})
_OF_BENCH = frozenset({"host", "port", "served_model_name", "disable_log_stats"})  # not for a user's own launch
_SIZES = {  # names in config.json and in records
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts": "num_experts",
    "model_type": "family",
}

# Lines of vLLM's log, and the settings that they report.
_LOG_FACTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("kv_cache_size_tokens", re.compile(r"(?:GPU|CPU|[A-Z]+) KV cache size: ([\d,]+) tokens")),
    ("kv_cache_max_concurrency", re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")),
    ("attention_backend", re.compile(r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", re.IGNORECASE)),
    ("kv_cache_memory", re.compile(r"Available KV cache memory: ([\d.]+ GiB)")),
)


class VllmEngine(Engine):
    """`python`: the interpreter of vLLM's environment; None: beside the `vllm` on PATH, or this one. `env` is added to
    the environment, as for VLLM_CPU_KVCACHE_SPACE; so are settings whose names begin as vLLM's variables do."""

    name = NAME

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = START_S,
        run_timeout_s: float | None = None,
    ) -> None:
        self._model = model
        self._python = python
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._run_timeout_s = run_timeout_s
        self._vllm: Installation | None = None

    @property
    def installation(self) -> Installation:
        """Found at the first start."""
        if self._vllm is None:
            self._vllm = Installation(self._python)
        return self._vllm

    def setting_names(self, *, serves: bool) -> set[str]:
        """The settings that the installed version knows, and those of Headrace that mean what it does anyway."""
        arguments = self.installation.arguments()
        return {*arguments.engine, *(arguments.server if serves else ()), *NEUTRAL}

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        vllm = self.installation
        given = {**self._env, **settings}
        model = str(given.pop("model", self._model))
        for name in _KEY_OPTIONS & given.keys():
            raise EngineFailure(
                "unsupported", f"{name}: a server that a benchmark starts listens on this machine only and has no keys"
            )
        with ExitStack() as stack:
            path, own = model, dict[str, Any]()
            if model in SHAPES:
                path = str(stack.enter_context(shape_directory(model)))
                own = {"load_format": "dummy", "max_model_len": MAX_MODEL_LEN}
            elif model == EMBEDDED_MODEL:
                path = str(vllm.converted_default_model())
            if serves:
                own |= {"host": "127.0.0.1", "port": _free_port(), "served_model_name": model}
            else:
                own |= {"disable_log_stats": False}  # without statistics there are no counters
            asked = translate(given, vllm, serves=serves, own=own)
            start = self._serve if serves else self._start_worker
            running = start(vllm, model, path, asked)
            running.cleanup = stack.pop_all()
            return running

    def _start_worker(self, vllm: Installation, model: str, path: str, asked: VllmSettings) -> _VllmWorker:
        started = perf_counter()
        worker = vllm.start_worker(NAME, dict(asked.env))
        try:
            told = worker.call("start", model=path, settings=asked.settings, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.stop()
            raise
        running = _VllmWorker(vllm, model, path, asked, worker, told["config"], self._run_timeout_s)
        running.start_s = perf_counter() - started
        return running

    def _serve(self, vllm: Installation, model: str, path: str, asked: VllmSettings) -> _VllmServer:
        started = perf_counter()
        child = Child(
            [vllm.python, str(LAUNCHER), "serve", path, *asked.flags()],
            name="vllm serve",
            env={**CHILD_ENV, "VLLM_SERVER_DEV_MODE": "1", **asked.env},
        )
        client = ServerClient(f"http://{asked.settings['host']}:{asked.settings['port']}")

        def is_healthy() -> bool | None:
            try:
                client.get("/health")
            except (HttpError, EngineFailure):
                return None
            return True

        try:
            child.wait_until(is_healthy, timeout_s=self._start_timeout_s)
            running = _VllmServer(vllm, model, path, asked, child, client)
        except BaseException:
            child.stop()
            raise
        running.start_s = perf_counter() - started
        return running


class _Running(RunningEngine):
    """What both ways have in common: a child process with a log."""

    name = NAME

    def __init__(self, vllm: Installation, model: str, path: str, asked: VllmSettings, child: Child) -> None:
        self.cleanup = ExitStack()
        self._vllm = vllm
        self._model, self._path = model, path
        self._asked = asked
        self._child = child
        self.model_name = str(_first(asked.settings.get("served_model_name")) or path)
        child.settle_log()
        self._facts = log_facts(child.log_lines())

    def _in_force(self, config: Mapping[str, Mapping[str, Any]], *, serves: bool) -> dict[str, SettingInForce]:
        arguments = self._vllm.arguments()
        defaults = {**arguments.engine, **(arguments.server if serves else {})}
        found = in_force(self._asked, config, defaults)
        return found | self._facts | {"model": SettingInForce(self._model, "given")}

    def versions(self) -> dict[str, str]:
        return dict(self._vllm.versions)

    def model_facts(self) -> dict[str, Any]:
        facts = model_identity(self._model)
        try:
            config = json.loads((Path(self._path) / "config.json").read_text())
        except (OSError, ValueError):  # a model of the hub
            return facts
        return facts | {ours: config[theirs] for theirs, ours in _SIZES.items() if theirs in config}

    def is_alive(self) -> bool:
        return self._child.is_alive

    def failure(self) -> EngineFailure | None:
        return None if self.is_alive() else self._child.failure("while it was measured")

    def pids(self) -> list[int]:
        return self._child.pids()

    def log_tail(self) -> str:
        return self._child.log_tail()

    def _launch_command(self, *command: str) -> str:
        env = [f"{name}={shlex.quote(value)}" for name, value in self._asked.env.items()]
        of_bench = _OF_BENCH & self._asked.automatic.keys()
        of_user = {name: value for name, value in self._asked.settings.items() if name not in of_bench}
        return " ".join([*env, shown([*command, *replace(self._asked, settings=of_user).flags()])])


class _VllmWorker(_Running):
    """`LLM` in a worker."""

    def __init__(
        self,
        vllm: Installation,
        model: str,
        path: str,
        asked: VllmSettings,
        worker: Worker,
        config: Mapping[str, Mapping[str, Any]],
        run_timeout_s: float | None,
    ) -> None:
        super().__init__(vllm, model, path, asked, worker.child)
        self.model_name = model
        self._worker = worker
        self._config = config
        self._run_timeout_s = run_timeout_s

    def settings_in_force(self) -> dict[str, SettingInForce]:
        return self._in_force(self._config, serves=False)

    def run_offline(self, workload: Workload) -> OfflineRun:
        run = self._worker.run_offline(workload, timeout_s=self._run_timeout_s)
        return replace(run, counters=metrics.common_names(run.counters))

    def counters(self) -> dict[str, float]:
        return metrics.common_names(self._worker.call("counters"))

    def reset_prefix_cache(self) -> bool:
        return bool(self._worker.call("reset_prefix_cache")["was_reset"])

    def launch_command(self) -> str:
        return self._launch_command("vllm", "run-batch", "-i", "INPUT", "-o", "OUTPUT", "--model", self._model)

    def stop(self) -> None:
        self._worker.stop()
        self.cleanup.close()


class _VllmServer(_Running):
    """`vllm serve` on a free port of this machine, in its development mode, which has /server_info and
    /reset_prefix_cache."""

    def __init__(
        self, vllm: Installation, model: str, path: str, asked: VllmSettings, child: Child, client: ServerClient
    ) -> None:
        super().__init__(vllm, model, path, asked, child)
        self._client = client
        self.address = client.address
        info = client.maybe_json("/server_info?config_format=json", timeout_s=INFO_S)
        config = info.get("vllm_config") if isinstance(info, dict) else None
        self._config: dict[str, Any] = config if isinstance(config, dict) else {}  # older versions have only text

    def settings_in_force(self) -> dict[str, SettingInForce]:
        found = self._in_force(self._config, serves=True)
        for name, setting in metrics.settings(self._client.maybe_text("/metrics") or "").items():
            if name not in found or (found[name].source == "default" and found[name].value in UNDECIDED):
                found[name] = setting
        return found

    def counters(self) -> dict[str, float]:
        return counters_of_server(self, self._client)

    def reset_prefix_cache(self) -> bool:
        try:
            self._client.post("/reset_prefix_cache")
        except HttpError:
            return False
        return True

    def launch_command(self) -> str:
        return self._launch_command("vllm", "serve", self._model)

    def stop(self) -> None:
        self._child.stop()
        self.cleanup.close()


def log_facts(lines: list[str]) -> dict[str, SettingInForce]:
    """What vLLM's log says about the cache and the attention backend; the first line of each counts."""
    found: dict[str, SettingInForce] = {}
    for line in map(plain, lines):
        for name, pattern in _LOG_FACTS:
            if name not in found and (match := pattern.search(line)) is not None:
                found[name] = SettingInForce(_number(match[1]), "reported", "log")
    return found


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text.replace(",", ""))
        except ValueError:
            continue
    return text


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
