"""The clients: what each is made of, and where its script is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

VLLM_PYTHON = "HEADRACE_VLLM_PYTHON"  # as for `make vllm-test`
HERE = Path(__file__).parent


def _lacks_nothing() -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client. `packages` are what pip installs into its environment; without them it needs none."""

    name: str
    packages: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()  # what its script installs with npm
    missing: Callable[[], str | None] = _lacks_nothing  # why it cannot run here
    python: Callable[[], str | None] = _lacks_nothing  # an interpreter that has the client already
    max_model_len: int = 512  # of its server
    shows_tools: bool = False  # the chat template of the model has a place for tools
    timeout_s: float = 600.0

    @property
    def module(self) -> str:
        return self.name.replace("-", "_") + "_client"

    @property
    def version(self) -> str:
        """The version of its first package, for the documentation."""
        packages = self.npm or self.packages
        return packages[0].replace("==", "@").rpartition("@")[2] if packages else "as installed"

    @property
    def script(self) -> Path:
        return HERE / f"{self.module}.py"


def _needs_vllm() -> str | None:
    return None if os.environ.get(VLLM_PYTHON) else f"set {VLLM_PYTHON} to the interpreter of an environment with vLLM"


def _needs_node() -> str | None:
    return None if shutil.which("npm") else "node and npm are not installed"


def _needs_ab() -> str | None:
    return None if shutil.which("ab") else "ab is not installed (Debian: apache2-utils)"


TORCH = next(line for line in (HERE.parents[1] / "constraints.txt").read_text().splitlines() if line[:7] == "torch==")
CLIENTS = (
    Client(name="openai", packages=("openai==3.49.0",)),
    Client(name="litellm", packages=("litellm==1.106.2", "mcp==2.3.0")),  # its responses() imports mcp
    Client(name="langchain-openai", packages=("langchain-openai==1.7.3",)),
    Client(
        name="llama-index",
        packages=("llama-index-llms-openai-like==0.8.1", "llama-index-embeddings-openai-like==0.4.0"),
    ),
    Client(name="instructor", packages=("instructor==1.17.0",)),
    Client(name="pydantic-ai", packages=("pydantic-ai-slim[openai]==2.66.0",)),
    Client(name="openai-agents", packages=("openai-agents==0.24.0",), max_model_len=2048, shows_tools=True),
    Client(
        name="ai-sdk",
        npm=("ai@6.0.326", "@ai-sdk/openai@3.0.139", "@ai-sdk/anthropic@3.0.138", "zod@4.6.7"),
        missing=_needs_node,
        max_model_len=2048,
        shows_tools=True,
    ),
    Client(name="codex-style", max_model_len=2048, shows_tools=True),
    Client(name="anthropic", packages=("anthropic==2.8.0",), max_model_len=2048, shows_tools=True),
    Client(name="llm", packages=("llm==0.36",)),
    Client(name="lm-eval", packages=("lm-eval[api]==0.4.13",)),
    Client(name="ab", missing=_needs_ab),
    Client(name="guidellm", packages=("guidellm==0.8.1", TORCH)),  # any torch: this one may be there without CUDA
    Client(name="vllm-bench", missing=_needs_vllm, python=lambda: os.environ.get(VLLM_PYTHON)),
    Client(name="aiperf", packages=("aiperf==0.13.0",)),
    # Random requests rarely limit their answers, so the context does.
    Client(name="schemathesis", packages=("schemathesis==4.32.5",), max_model_len=64),
)
