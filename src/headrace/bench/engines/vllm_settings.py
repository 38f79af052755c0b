"""Settings for vLLM: from the names that Headrace shares with it to those of the installed version, and back.

Names are checked against the installed version's own list. What only Headrace has is mapped where vLLM has the same
thing under another name or always does it, and refused by name otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.engines.base import EngineFailure, SettingInForce
from headrace.bench.engines.vllm_installation import Installation
from headrace.errors import nearest

ENVIRONMENT_PREFIXES = ("VLLM_", "OMP_", "CUDA_", "NCCL_", "HF_", "TORCH", "TRITON_", "FLASHINFER_")
LOAD_FORMATS = {"random": "dummy"}
# What vLLM does anyway: these values of settings that it does not have are left out.
NEUTRAL = {
    "capacity_policy": ("max_utilization",),
    "device": ("auto",),
    "num_threads": (None,),
    "cpu_affinity": ("auto",),
}
# Sections of vLLM's config in which a setting is looked for, the likeliest first.
SECTIONS = ("cache_config", "scheduler_config", "model_config", "parallel_config", "load_config", "device_config")
RENAMED = {"kv_cache_dtype": "cache_dtype", "scheduling_policy": "policy"}
SERVER_ALWAYS = {"host": None, "port": 8000}  # names that every version has
UNDECIDED = (None, "auto")


@dataclass(frozen=True)
class VllmSettings:
    """Settings as vLLM gets them."""

    settings: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)  # as the user gave them
    automatic: dict[str, str] = field(default_factory=dict)  # set by the benchmark: the reason

    def flags(self) -> list[str]:
        """False is `--no-...`; None is left out; lists are several values, objects are JSON."""
        flags = []
        for name, value in self.settings.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, (list, tuple)):
                flags += [f"--{flag}", *map(str, value)]
            elif value is not None:
                flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return flags


def translate(
    given: Mapping[str, Any], vllm: Installation, *, serves: bool, own: Mapping[str, Any] | None = None
) -> VllmSettings:
    """Settings for this version. `own` are the benchmark's, which the user's override."""
    arguments = vllm.arguments()
    known = {**arguments.engine, **({**SERVER_ALWAYS, **arguments.server} if serves else {})}
    is_checked_by_server = serves and not arguments.server
    settings: dict[str, Any] = {name: value for name, value in (own or {}).items() if name in known}
    automatic = {name: "set by the benchmark" for name in settings if name not in given}
    env: dict[str, str] = {}
    for name, value in given.items():
        if name.startswith(ENVIRONMENT_PREFIXES):
            env[name] = str(value)
        elif name in known or (is_checked_by_server and name not in NEUTRAL):
            settings[name] = LOAD_FORMATS.get(value, value) if name == "load_format" else value
        elif name in NEUTRAL and value in NEUTRAL[name]:
            continue
        else:
            env |= _as_environment(name, value, vllm, arguments.server, known)
    return VllmSettings(settings, env, dict(given), automatic)


def _as_environment(
    name: str, value: Any, vllm: Installation, server: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, str]:
    """What vLLM's CPU build takes from the environment; otherwise raises."""
    if vllm.is_cpu_build and name == "num_threads" and isinstance(value, int):
        return {"OMP_NUM_THREADS": str(value), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if vllm.is_cpu_build and name == "device" and value == "cpu":
        return {}
    if name in server:
        raise EngineFailure("unsupported", f"{name} is a setting of vLLM's server, and here it runs in process")
    raise EngineFailure("unsupported", f"vLLM {vllm.version} has no setting {name!r}{nearest(name, known)}")


def in_force(
    asked: VllmSettings, config: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, SettingInForce]:
    """Every setting of this version, with the value of the running engine's config where it has one."""
    found = {}
    for name, default in defaults.items():
        known = _look_up(name, config)
        value = asked.settings.get(name, default) if known is None else known[0]
        if name in asked.automatic:
            found[name] = SettingInForce(value, "automatic", asked.automatic[name])
        elif asked.settings.get(name) is not None:
            found[name] = SettingInForce(value, "given")
        elif value == default:
            found[name] = SettingInForce(value, "default")
        else:
            why = "chosen by vLLM" if default in UNDECIDED else f"changed by vLLM; its default is {default!r}"
            found[name] = SettingInForce(value, "automatic", why)
    for name in asked.given.keys() - found.keys():
        reason = "environment" if name in asked.env else "what vLLM does anyway, or takes from the environment"
        found[name] = SettingInForce(asked.given[name], "given", reason)
    blocks = _look_up("num_gpu_blocks", config)
    if blocks is not None and blocks[0] is not None:
        found["num_gpu_blocks"] = SettingInForce(blocks[0], "reported", "vLLM's cache_config")
    return found


def _look_up(name: str, config: Mapping[str, Mapping[str, Any]]) -> tuple[Any] | None:
    for section in (*SECTIONS, *(each for each in config if each not in SECTIONS)):
        values = config.get(section)
        if isinstance(values, Mapping):
            for key in (RENAMED.get(name, name), name):
                if key in values:
                    value = values[key]
                    return (value.removeprefix("torch.") if isinstance(value, str) else value,)
    return None
