"""A pytest plugin that lets vLLM's server tests run against Headrace: stands for the modules that they import.

- `tests.utils` has a `RemoteOpenAIServer` that starts `headrace serve`.
- `vllm` and its modules: a few functions that tests call to prepare a request, and the version of the server; see
  `stand_ins` for the others.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Sequence
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


LORA_RANKS = 1024  # of all adapters together: vLLM registers any number and loads some; here all are loaded


class RemoteServer:
    """What the tests know as `RemoteOpenAIServer`: a server for the time of a `with` block."""

    DUMMY_API_KEY = "a-key"

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        flags = compat_server.translated(vllm_serve_args, "vllm", has_lora=compat_server.settings()["has_lora"])
        if "--max-lora-rank" in flags:
            rank = int(flags[flags.index("--max-lora-rank") + 1])
            flags += ["--max-loras", str(LORA_RANKS // rank)]
        if override_hf_configs is not None:
            flags += ["--hf-overrides", json.dumps(override_hf_configs)]
        if "--reasoning-parser" not in flags:
            flags += ["--reasoning-parser", "none"]  # vLLM's default
        self.model = model
        self.host = "127.0.0.1"
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        self.port = int(flags[flags.index("--port") + 1]) if not auto_port else compat_server.free_port()
        if auto_port:
            flags += ["--port", str(self.port)]
        self.server = compat_server.Server([model], [*flags, "--seed", str(seed)], environment=env_dict)
        self.proc = self.server.process
        self.show_hidden_metrics = False
        timeout_s = max_wait_seconds or compat_server.START_TIMEOUT_S
        self.server.wait_until_ready(self.url_for("health"), timeout_s, uds=self.uds)

    def __enter__(self) -> RemoteServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.server.stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts)])

    def _arguments(self, given: dict[str, Any], *, path: str) -> dict[str, Any]:
        defaults = {"base_url": self.url_for(*path.split()), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return {"timeout": 600, **defaults, **given}

    def get_client(self, **given: Any) -> Any:
        import openai

        return openai.OpenAI(**self._arguments(given, path="v1"))

    def get_async_client(self, **given: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**self._arguments(given, path="v1"))

    def get_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._arguments(given, path=""))

    def get_async_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._arguments(given, path=""))


class _Platform:
    """A machine with an NVIDIA GPU, as far as a test asks: it then takes its usual path."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: name == "is_cuda"


class _Environment:
    """vLLM's variables: those that are not set are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return os.environ.get(name, "") not in ("", "0")


class _Hub:
    """Stands for the hub: nothing is downloaded. The repositories that tests ask for are LoRA adapters."""

    def snapshot_download(self, repo_id: str, **kwargs: Any) -> str:
        return str(compat_server.settings()["adapter"] or repo_id)

    def hf_hub_download(self, *args: Any, **kwargs: Any) -> Any:
        return stand_ins.skip("a download from the hub")


def _config_only(*args: Any, **kwargs: Any) -> str:
    """A download without weights and tokenizer: a folder with the configuration of the model."""
    folder = tempfile.mkdtemp()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(Path(compat_server.settings()["model"]) / name, folder)
    return folder


class _ModelConfig:
    """As far as tests ask it: the size of the vocabulary."""

    def __init__(self, **settings: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(stand_ins.tokenizer())


_ENVIRONMENT = _Environment()
_KNOWN: dict[str, dict[str, Any]] = {
    "vllm": {"envs": _ENVIRONMENT},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": stand_ins.tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.config": {"ModelConfig": _ModelConfig},
    "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": _config_only},
    "vllm.version": {"_prev_minor_version": lambda: "0.31"},
    "vllm.utils.network_utils": {"get_open_port": compat_server.free_port},
}


def _tests_utils(checkout: Path) -> types.ModuleType:
    module = stand_ins.StandIn("tests.utils")
    module.RemoteOpenAIServer = RemoteServer  # type: ignore[attr-defined]
    module.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    module.VLLM_PATH = checkout  # type: ignore[attr-defined]
    module.multi_gpu_only = lambda **needs: pytest.mark.skip("needs several GPUs")  # type: ignore[attr-defined]
    module.requires_fp8 = pytest.mark.skip("needs a GPU with FP8")  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="session")
def local_asset_server() -> None:
    """Images, for the tests of multimodal models, which are not run."""


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before any conftest.py of the checkout is imported."""
    stand_ins.replace_tokenizers()
    version = {"__version__": compat_server.settings()["version"], **_KNOWN["vllm.version"]}  # of the tested server
    package = {**_KNOWN["vllm"], "version": types.SimpleNamespace(**version)}  # `from vllm import version`
    stand_ins.install(("vllm", "tests.conftest"), {**_KNOWN, "vllm": package, "vllm.version": version})
    sys.modules["vllm.envs"] = _ENVIRONMENT  # type: ignore[assignment]
    sys.modules["tests.utils"] = _tests_utils(early_config.rootpath)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:  # servers of a GPU machine are told to wait for it; here nobody has one
        item.own_markers = [mark for mark in item.own_markers if mark.name != "skipif"]
