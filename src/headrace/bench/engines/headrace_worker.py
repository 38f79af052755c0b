"""The worker that runs `LLM` for a benchmark (see workers.py): python -m headrace.bench.engines.headrace_worker FD."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.core import EngineStats
    from headrace.engine.llm import LLM


class HeadraceWorker:
    """Owns the engine, once it is started."""

    _llm: LLM

    def start(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        from headrace.engine.in_force import shape_of
        from headrace.engine.llm import LLM

        self._llm = llm = LLM(model, **settings)
        return {"settings": self._in_force(model, settings), "model": shape_of(llm.spec)}

    def reconfigure(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        """The settings in force then; None: they need other weights, and nothing has changed."""
        from headrace.engine.reconfigure import OtherWeightsError, defaults_of_the_model

        options: Any = defaults_of_the_model() | settings
        try:
            self._llm.reconfigure(**options)
        except OtherWeightsError:
            return {"settings": None}
        return {"settings": self._in_force(model, settings)}

    def _in_force(self, model: str, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
        from headrace.config import EngineConfig
        from headrace.engine.in_force import settings_in_force

        config = EngineConfig(model=model, **settings)
        found = settings_in_force(self._llm.settings, config, ["model", *settings])
        return {name: asdict(setting) for name, setting in found.items()}

    def run(self, path: str) -> dict[str, Any]:
        from headrace.types import RequestOutput, SamplingParams

        with open(path) as file:
            requests = json.load(file)
        params = [SamplingParams(**request["params"]) for request in requests]
        is_chat = [request["messages"] is not None for request in requests]
        if any(is_chat) and not all(is_chat):
            raise ValueError("a workload has either messages or prompts, not both")
        llm = self._llm
        before = llm.stats
        started = perf_counter()
        outputs: Sequence[RequestOutput]
        if all(is_chat):
            outputs = llm.chat([request["messages"] for request in requests], params, use_tqdm=False)
        else:
            outputs = llm.generate([request["prompt"] for request in requests], params, use_tqdm=False)
        seconds = perf_counter() - started
        return {
            "seconds": seconds,
            "output_lens": [sum(len(answer.token_ids) for answer in output.outputs) for output in outputs],
            "prompt_lens": [len(output.prompt_token_ids) for output in outputs],
            "counters": counters_of_run(before, llm.stats),
        }

    def counters(self) -> dict[str, float]:
        return lifetime_counters(self._llm.stats)

    def reset_prefix_cache(self) -> dict[str, Any]:
        self._llm.forget_prefixes()
        return {}


def lifetime_counters(stats: EngineStats) -> dict[str, float]:
    scheduler = stats.scheduler
    return {
        "num_steps": scheduler.num_steps,
        "num_preemptions": scheduler.num_preemptions,
        "num_prompt_tokens": scheduler.num_prompt_tokens,
        "num_generated_tokens": scheduler.num_generated_tokens,
        "num_recomputed_tokens": scheduler.num_recomputed_tokens,
        "prefix_queried_tokens": scheduler.num_prefix_queried_tokens,
        "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
        "host_seconds": stats.host_seconds,
        "wait_seconds": stats.wait_seconds,
        "steady_host_seconds": stats.steady_host_seconds,
        "num_steady_steps": stats.num_steady_steps,
    }


def counters_of_run(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """The differences over a run; times are per step."""
    earlier = lifetime_counters(before)
    run = {name: value - earlier[name] for name, value in lifetime_counters(after).items()}
    num_steps, num_steady = max(1, run["num_steps"]), max(1, run.pop("num_steady_steps"))
    return {
        **run,
        "host_ms_per_step": 1e3 * run.pop("host_seconds") / num_steps,
        "host_ms_per_steady_step": 1e3 * run.pop("steady_host_seconds") / num_steady,
        "wait_ms_per_step": 1e3 * run.pop("wait_seconds") / num_steps,
    }


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    worker = HeadraceWorker()
    with os.fdopen(fd, "w") as replies:
        for line in sys.stdin:
            command = json.loads(line)
            try:
                reply = {"ok": getattr(worker, command.pop("do"))(**command)}
            except Exception as error:  # noqa: BLE001  reported to the benchmark, which decides
                reply = {"error": {"type": type(error).__name__, "message": str(error)}}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
