"""A pytest plugin that lets llama.cpp's server tests run against Headrace: their `ServerProcess` starts `headrace
serve`.

The paths that llama.cpp has with and without /v1 are asked with it. Tests of llama.cpp's own API are skipped with that
reason. A server answers under the names of models that the tests ask for, since llama.cpp's answers under any. Every
test starts a server; here those that follow each other with the same flags share one.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compat_server
import pytest
import stand_ins
from stand_ins import pytest_collectreport, pytest_runtest_logreport, pytest_runtest_logstart

__all__ = [
    "pytest_collectreport",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
]  # hooks that pytest finds here

TESTS = "tools/server/tests"
PREFIXED = ("/chat/completions", "/completions", "/models", "/responses")  # here only below /v1
SHARED = (*PREFIXED, "/", "/health", "/metrics", "/rerank")  # and all below /v1 but streams that go on
# Attributes of `ServerProcess` that have a flag here. Others are about its own cache, threads and device.
FLAGS = {"seed": "--seed", "api_key": "--api-key", "n_slots": "--max-num-seqs"}
POOLING = {"none": "ALL", "mean": "MEAN", "cls": "CLS", "last": "LAST"}

_asked_names: list[str] = []  # of models, by the tests of the file


def flags_of(process: Any) -> list[str]:
    """The command line of `headrace serve` for what a test has set."""
    found: list[str] = []
    for name, flag in FLAGS.items():
        value = getattr(process, name)
        if value is not None:
            found += [flag, str(value)]
    if process.chat_template_file is not None:  # from the folder in which their tests are started
        found += ["--chat-template", str(Path(sys.modules["utils"].__file__ or "").parent / process.chat_template_file)]
    if process.n_ctx is not None:  # there, all slots share it
        found += ["--max-model-len", str(process.n_ctx // (process.n_slots or 1))]
    if process.pooling is not None:
        found += ["--pooler-config", json.dumps({"pooling_type": POOLING[process.pooling]})]
    if not (process.server_embeddings or process.server_reranking):  # models that do not reason
        found += ["--reasoning-parser", "none", "--default-chat-template-kwargs", '{"enable_thinking": false}']
    return found


class Shared:
    """Owns the one server that runs, for all tests in a row that want the same."""

    def __init__(self) -> None:
        self._command: list[str] = []
        self._server: compat_server.Server | None = None
        self._port = 0

    def port_of(self, names: Sequence[str], flags: Sequence[str]) -> int:
        """The port of a server with these flags. The one that ran with others is stopped."""
        command = [*names, *flags]
        if self._server is None or self._server.process.poll() is not None or self._command != command:
            self.stop()
            self._command, self._port = command, compat_server.free_port()
            self._server = compat_server.Server(names, [*flags, "--port", str(self._port)])
            self._server.wait_until_ready(f"http://127.0.0.1:{self._port}/health")
        return self._port

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


_shared = Shared()


def start(process: Any, timeout_seconds: float = compat_server.START_TIMEOUT_S) -> None:
    """In place of `ServerProcess.start`."""
    names = list(dict.fromkeys([process.model_alias or "model", *_asked_names]))
    process.server_port = _shared.port_of(names, flags_of(process))
    process.ready = True


def with_prefix(request: Callable[..., Any]) -> Callable[..., Any]:
    def prefixed(process: Any, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        return request(process, method, f"/v1{path}" if path in PREFIXED else path, *args, **kwargs)

    return prefixed


def own_path(source: str) -> str | None:
    """The first path in a test's source that only llama.cpp has."""
    for path in re.findall(r"\"(?:GET|POST|DELETE|OPTIONS)\",\s*f?\"(/[^\"?]*)", source):
        if path not in SHARED and (not path.startswith("/v1/") or path == "/v1/stream"):
            return str(path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before their conftest.py is imported."""
    sys.modules["wget"] = types.ModuleType("wget")  # nothing is downloaded
    sys.path.insert(0, str(early_config.rootpath / TESTS))
    import utils

    utils.ServerProcess.start = start
    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, with_prefix(getattr(utils.ServerProcess, name)))
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # starts a server for each model to fetch it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without those that their own runs leave out too, since they fetch large models."""
    items[:] = [item for item in items if item.get_closest_marker("slow") is None]
    for item in items:
        if (path := own_path(source_of(item))) is not None:
            item.add_marker(pytest.mark.skip(f"{stand_ins.OWN_CODE}{path}"))
        _asked_names[:] = dict.fromkeys([*_asked_names, *models_in(source_of(item))])


def pytest_unconfigure() -> None:
    _shared.stop()


def source_of(item: pytest.Item) -> str:
    return inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""


def models_in(source: str) -> Sequence[str]:
    return re.findall(r"\bmodel\"?\s*[:=]\s*\"([^\"]+)\"", source)
