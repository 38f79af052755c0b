"""Headrace as the measured engine: `LLM` in a worker process, or `headrace serve`."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import headrace
from headrace.bench.engines.base import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.engines.http import ServerClient, counters_of_server
from headrace.bench.engines.processes import Child, shown
from headrace.bench.engines.shapes import MAX_MODEL_LEN, SHAPES, model_identity, shape_directory
from headrace.bench.engines.workers import Worker
from headrace.bench.workloads import Workload
from headrace.config import EMBEDDED_MODEL
from headrace.hardware.describe import package_versions

NAME = "headrace"
START_S = 600.0
SERVING = re.compile(r"headrace: serving .* on (https?://\S+)")
# Keys of the user's own servers: the one that is started here listens on this machine only, and needs none.
_KEYS = ("HEADRACE_API_KEY", "VLLM_API_KEY")
_OF_BENCH = frozenset({"port", "served_model_name"})
_KEY_OPTIONS = frozenset({"api_key", "api_key_file", "admin_key"})


class HeadraceEngine(Engine):
    """Starts Headrace from this installation. `model` may be one of SHAPES, which gets random weights."""

    name = NAME

    def __init__(
        self,
        model: str = EMBEDDED_MODEL,
        *,
        start_timeout_s: float = START_S,
        run_timeout_s: float | None = None,
    ) -> None:
        self._model = model
        self._start_timeout_s = start_timeout_s
        self._run_timeout_s = run_timeout_s

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        given = dict(settings)
        model = str(given.pop("model", self._model))
        with ExitStack() as stack:
            path, own = model, dict[str, Any]()
            if model in SHAPES:
                path = str(stack.enter_context(shape_directory(model)))
                own = {"load_format": "random", "max_model_len": MAX_MODEL_LEN}
            start = self._serve if serves else self._start_worker
            running = start(_Launch(model, path, given, own, default_model=self._model))
            running.cleanup = stack.pop_all()
            return running

    def _start_worker(self, launch: _Launch) -> _HeadraceWorker:
        started = perf_counter()
        worker = Worker([sys.executable, "-m", "headrace.bench.engines.headrace_worker"], name=NAME, env=environment())
        try:
            told = worker.call("start", model=launch.path, settings=launch.all, timeout_s=self._start_timeout_s)
        except BaseException:
            worker.stop()
            raise
        running = _HeadraceWorker(launch, worker, told, self._run_timeout_s, self._start_timeout_s)
        running.start_s = perf_counter() - started
        return running

    def _serve(self, launch: _Launch) -> _HeadraceServer:
        started = perf_counter()
        admin_key = secrets.token_hex(16)
        for name in _KEY_OPTIONS & launch.given.keys():
            raise EngineFailure(
                "unsupported", f"{name}: a server that a benchmark starts listens on this machine only and has no keys"
            )
        defaults = {"port": 0, "served_model_name": launch.model}
        flags = as_flags({name: value for name, value in defaults.items() if name not in launch.given})
        child = Child(
            [sys.executable, "-m", "headrace", "serve", *launch.flags(launch.path), *flags],
            name="headrace serve",
            env={**environment(), "HEADRACE_ADMIN_KEY": admin_key, **dict.fromkeys(_KEYS)},
        )
        try:
            found = child.wait_until(lambda: child.find_in_log(SERVING), timeout_s=self._start_timeout_s)
            running = _HeadraceServer(launch, child, found[1], admin_key)
        except BaseException:
            child.stop()
            raise
        running.start_s = perf_counter() - started
        return running


class _Launch:
    """What an engine is started with."""

    def __init__(
        self, model: str, path: str, given: dict[str, Any], own: dict[str, Any], *, default_model: str
    ) -> None:
        self.model = model  # as the user names it
        self.path = path  # as the engine finds it
        self.given = given
        self.all = {**own, **given}
        self._own = own
        self._default_model = default_model

    def changed(self, settings: Mapping[str, Any]) -> _Launch | None:
        """The same model with other settings; None: they ask for another model."""
        given = dict(settings)
        model = str(given.pop("model", self._default_model))
        if model != self.model:
            return None
        return _Launch(model, self.path, given, self._own, default_model=self._default_model)

    def flags(self, model: str) -> list[str]:
        return ["--model", model, *as_flags(self.all)]

    def named(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, SettingInForce]:
        """Settings as an engine tells them, with those that were given marked, and the user's name of the model."""
        settings = {name: SettingInForce(**setting) for name, setting in found.items()}
        for name in self.given.keys() & settings.keys():
            settings[name] = replace(settings[name], source="given", reason="")
        for name in self.all.keys() - self.given.keys():
            settings[name] = replace(settings[name], source="automatic", reason="a shape with random weights")
        for name in settings.keys() & _OF_BENCH - self.given.keys():
            settings[name] = replace(settings[name], source="automatic", reason="set by the benchmark")
        return settings | {"model": SettingInForce(self.model, "given")}


class _Running(RunningEngine):
    name = NAME

    def __init__(self, launch: _Launch, model_shape: Mapping[str, Any]) -> None:
        self.cleanup = ExitStack()
        self.model_name = str(launch.given.get("served_model_name", launch.model))
        self._launch = launch
        self._model_facts = {**model_identity(launch.model), **model_shape}

    def versions(self) -> dict[str, str]:
        return package_versions()

    def model_facts(self) -> dict[str, Any]:
        return dict(self._model_facts)


class _HeadraceWorker(_Running):
    """`LLM` in a worker."""

    def __init__(
        self,
        launch: _Launch,
        worker: Worker,
        told: Mapping[str, Any],
        run_timeout_s: float | None,
        start_timeout_s: float,
    ) -> None:
        super().__init__(launch, told["model"])
        self._worker = worker
        self._settings = launch.named(told["settings"])
        self._run_timeout_s = run_timeout_s
        self._start_timeout_s = start_timeout_s

    def settings_in_force(self) -> dict[str, SettingInForce]:
        return dict(self._settings)

    def run_offline(self, workload: Workload) -> OfflineRun:
        return self._worker.run_offline(workload, timeout_s=self._run_timeout_s)

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        launch = self._launch.changed(settings)
        if launch is None:
            return False
        told = self._worker.call("reconfigure", model=launch.path, settings=launch.all, timeout_s=self._start_timeout_s)
        if told["settings"] is None:
            return False
        self._launch, self._settings, self.start_s = launch, launch.named(told["settings"]), None
        return True

    def counters(self) -> dict[str, float]:
        return self._worker.call("counters")

    def reset_prefix_cache(self) -> bool:
        self._worker.call("reset_prefix_cache")
        return True

    def is_alive(self) -> bool:
        return self._worker.child.is_alive

    def failure(self) -> EngineFailure | None:
        return None if self.is_alive() else self._worker.child.failure("while it was measured")

    def pids(self) -> list[int]:
        return self._worker.child.pids()

    def log_tail(self) -> str:
        return self._worker.child.log_tail()

    def launch_command(self) -> str:
        return shown(["headrace", "run", "INPUT", "-o", "OUTPUT", *self._launch.flags(self._launch.model)])

    def stop(self) -> None:
        self._worker.stop()
        self.cleanup.close()


class _HeadraceServer(_Running):
    """`headrace serve` on a free port of this machine."""

    def __init__(self, launch: _Launch, child: Child, address: str, admin_key: str) -> None:
        self._child = child
        self._client = ServerClient(address)
        self._admin_key = admin_key
        told = self._client.get_json("/server_info")
        shape = {name: value for name, value in told["model"].items() if name != "name"}
        super().__init__(launch, shape)
        self.address = self._client.address
        self._settings = launch.named(told["settings"])

    def settings_in_force(self) -> dict[str, SettingInForce]:
        return dict(self._settings)

    def counters(self) -> dict[str, float]:
        return counters_of_server(self, self._client)

    def failure(self) -> EngineFailure | None:
        return None if self.is_alive() else self._child.failure("while it was measured")

    def reset_prefix_cache(self) -> bool:
        self._client.post("/admin/reset_prefix_cache", headers={"X-Api-Key": self._admin_key})
        return True

    def is_alive(self) -> bool:
        return self._child.is_alive

    def pids(self) -> list[int]:
        return self._child.pids()

    def log_tail(self) -> str:
        return self._child.log_tail()

    def launch_command(self) -> str:
        return shown(["headrace", "serve", *self._launch.flags(self._launch.model)])

    def stop(self) -> None:
        self._child.stop()
        self.cleanup.close()


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as command-line flags. False is `--no-...`; None is left out; 0 is a value like any other."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return flags


def environment() -> dict[str, str]:
    """So that a child imports this installation, wherever it is started from."""
    root = str(Path(headrace.__file__).resolve().parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
