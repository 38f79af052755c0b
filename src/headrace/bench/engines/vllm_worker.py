"""The worker that runs vLLM's `LLM` for a benchmark, with vLLM's own interpreter: python vllm_worker.py FD.

Only the standard library and vllm: Headrace is not installed there. workers.py has the protocol; `arguments` and
`convert` are two more commands, for workers that start no engine.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from time import perf_counter
from typing import Any

# Where versions of vLLM declare the settings of the server.
FRONTEND_MODULES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
SCALARS = (str, int, float, bool, type(None))


class VllmWorker:
    """Owns the engine, once it is started."""

    _llm: Any = None

    def arguments(self) -> dict[str, Any]:
        """The names of vLLM's settings, with their defaults: of engines, and of the server."""
        from vllm.engine.arg_utils import EngineArgs

        return {"engine": _defaults(EngineArgs), "server": self._server_arguments()}

    def _server_arguments(self) -> dict[str, Any]:
        """Empty if this version has them elsewhere; the server then checks names itself."""
        for module in FRONTEND_MODULES:
            try:
                return _defaults(importlib.import_module(module).FrontendArgs)
            except (ImportError, AttributeError, TypeError):
                continue
        return {}

    def convert(self, source: str, target: str) -> dict[str, Any]:
        """Write a GGUF file as a Hugging Face directory, which is what vLLM reads."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory, name = os.path.split(source)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name)
        # The weights are not quantized any more, but the model is still marked as if they were.
        model.hf_quantizer, model.is_quantized = None, False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model = model.float()
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        return {}

    def start(self, model: str, settings: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        self._llm = LLM(model=model, **settings)
        return {"config": _plain_config(self._llm.llm_engine.vllm_config)}

    def run(self, path: str) -> dict[str, Any]:
        from vllm import SamplingParams

        with open(path) as file:
            requests = json.load(file)
        params = [SamplingParams(**request["params"]) for request in requests]
        is_chat = [request["messages"] is not None for request in requests]
        if any(is_chat) and not all(is_chat):
            raise ValueError("a workload has either messages or prompts, not both")
        prompts = [_prompt(request["prompt"]) for request in requests]
        before = self.counters()
        started = perf_counter()
        if all(is_chat):
            outputs = self._llm.chat([request["messages"] for request in requests], params, use_tqdm=False)
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - started
        after = self.counters()
        return {
            "seconds": seconds,
            "output_lens": [sum(len(answer.token_ids) for answer in output.outputs) for output in outputs],
            "prompt_lens": [len(output.prompt_token_ids) for output in outputs],
            "counters": {name: value - before.get(name, 0) for name, value in after.items()},
        }

    def counters(self) -> dict[str, float]:
        """vLLM's counters under its own names, summed over their labels."""
        try:
            metrics = self._llm.get_metrics()
        except (AttributeError, AssertionError, NotImplementedError):  # versions or settings without metrics
            return {}
        sums: dict[str, float] = {}
        for metric in metrics:
            value = getattr(metric, "value", None)
            if isinstance(value, (int, float)):
                sums[metric.name] = sums.get(metric.name, 0) + value
        return sums

    def reset_prefix_cache(self) -> dict[str, Any]:
        return {"was_reset": self._llm.reset_prefix_cache() is not False}


def _prompt(prompt: Any) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _defaults(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in dataclasses.fields(owner):
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found[field.name] = None if default is dataclasses.MISSING else _plain(default)
    return found


def _plain_config(config: Any) -> dict[str, dict[str, Any]]:
    """The sections of vLLM's config, with the values that JSON has."""
    sections = {}
    for name, section in vars(config).items():
        if name.endswith("_config") and hasattr(section, "__dict__"):
            sections[name] = {key: _plain(value) for key, value in vars(section).items() if not key.startswith("_")}
    return sections


def _plain(value: Any) -> Any:
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, SCALARS) for each in value):
        return list(value)
    return str(value).removeprefix("torch.")  # torch.dtype


def main(fd: int) -> None:
    os.set_inheritable(fd, False)
    worker = VllmWorker()
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
    # The modules beside this file must not shadow those of vLLM's environment.
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != own]
    main(int(sys.argv[1]))
