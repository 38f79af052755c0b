"""A pytest plugin that lets SGLang's server tests run against Headrace: stands for the modules that they import."""

from __future__ import annotations

import os
import signal
import unittest
from typing import Any
from urllib.parse import urlsplit

import compat_server
import pytest
import stand_ins
from stand_ins import pytest_collectreport, pytest_runtest_logreport, pytest_runtest_logstart

__all__ = [
    "pytest_collectreport",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
]  # hooks that pytest finds here

_PARSERS = {"llama3": "hermes", "qwen25": "hermes", "qwen": "hermes"}  # the format of the model that is served


def launch(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: list[str] | None = None,
    env: dict[str, str] | None = None,
    **others: Any,
) -> Any:
    """What the tests know as `popen_launch_server`."""
    flags = compat_server.translated([_PARSERS.get(word, word) for word in other_args or []], "sglang")
    if "--reasoning-parser" not in flags:  # SGLang's default, and models that do not reason
        flags += ["--reasoning-parser", "none", "--default-chat-template-kwargs", '{"enable_thinking": false}']
    if api_key is not None:
        flags += ["--api-key", api_key]
    server = compat_server.Server([model], [*flags, "--port", str(urlsplit(base_url).port)], environment=env)
    server.wait_until_ready(f"{base_url}/health")
    return server.process


def kill(pid: int, *args: Any, **kwargs: Any) -> None:
    os.killpg(pid, signal.SIGTERM)
    os.waitpid(pid, 0)


_URL = f"http://127.0.0.1:{compat_server.free_port()}"
_KNOWN: dict[str, dict[str, Any]] = {
    "sglang.srt.utils": {"kill_process_tree": kill},
    "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": stand_ins.tokenizer},
    "sglang.utils": {"is_in_ci": lambda: False},
    "sglang.test.ci.ci_register": {
        name: lambda *args, **kwargs: None for name in ("register_cuda_ci", "register_amd_ci", "register_cpu_ci")
    },
    "sglang.test.test_utils": {
        "CustomTestCase": unittest.TestCase,
        "DEFAULT_SMALL_MODEL_NAME_FOR_TEST": "small-model",
        "DEFAULT_MODEL_NAME_FOR_TEST": "model",
        "DEFAULT_SMALL_MODEL_NAME_FOR_TEST_QWEN": "qwen-model",
        "DEFAULT_SMALL_CROSS_ENCODER_MODEL_NAME_FOR_TEST": "cross-encoder",
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": compat_server.START_TIMEOUT_S,
        "DEFAULT_URL_FOR_TEST": _URL,
        "is_in_ci": lambda: False,
        "is_in_amd_ci": lambda: False,
        "is_rust_server_built": lambda: False,
        "popen_launch_server": launch,
    },
}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py of the checkout is imported."""
    folder = early_config.rootpath / "python/sglang/test/kits"
    stand_ins.replace_tokenizers()
    stand_ins.install(("sglang",), _KNOWN, from_files={"sglang.test.kits": folder})
