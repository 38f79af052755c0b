"""Writes a small package `vllm` and an interpreter that finds it, so that tests need no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

VERSION = "9.9.0"

_FILES = {
    "__init__.py": """
        import types

        class SamplingParams:
            def __init__(self, max_tokens=16, temperature=1.0, ignore_eos=False, detokenize=True):
                self.max_tokens = max_tokens

        class LLM:
            def __init__(self, model, **settings):
                if settings.get("max_model_len", 0) > 4096:
                    raise ValueError("User-specified max_model_len is greater than the model's own")
                if settings.get("max_num_seqs") == 13:
                    why = "torch.OutOfMemoryError: CUDA out of memory"
                    print("(EngineCore pid=7) ERROR 11-16 12:00:00 [core.py:1]", why, flush=True)
                    raise RuntimeError("Engine core initialization failed. See root cause above.")
                print("INFO 11-16 12:00:00 [kv.py:1] GPU KV cache size: 12,800 tokens", flush=True)
                config = types.SimpleNamespace
                self.llm_engine = config(vllm_config=config(
                    cache_config=config(block_size=16, cache_dtype="auto", num_gpu_blocks=800),
                    scheduler_config=config(max_num_seqs=settings.get("max_num_seqs") or 256, policy="fcfs"),
                    model_config=config(dtype=Dtype(), max_model_len=settings.get("max_model_len")),
                ))
                self._num_tokens = 0

            def generate(self, prompts, params, use_tqdm):
                self._num_tokens += sum(each.max_tokens for each in params)
                made = types.SimpleNamespace
                answers = [made(token_ids=[0] * each.max_tokens) for each in params]
                return [made(outputs=[answer], **prompt) for prompt, answer in zip(prompts, answers)]

            def get_metrics(self):
                metric = types.SimpleNamespace
                return [metric(name="vllm:generation_tokens", value=self._num_tokens),
                        metric(name="vllm:num_preemptions", value=0), metric(name="vllm:e2e", values=[1])]

            def reset_prefix_cache(self):
                return True

        class Dtype:
            def __str__(self):
                return "torch.bfloat16"
    """,
    "engine/__init__.py": "",
    "engine/arg_utils.py": """
        from dataclasses import dataclass, field

        @dataclass
        class EngineArgs:
            model: str = "m"
            served_model_name: str = None
            dtype: str = "auto"
            load_format: str = "auto"
            max_model_len: int = None
            max_num_seqs: int = None
            block_size: int = None
            kv_cache_dtype: str = "auto"
            scheduling_policy: str = "fcfs"
            enable_prefix_caching: bool = None
            disable_log_stats: bool = False
            compilation_config: dict = field(default_factory=dict)
            cudagraph_capture_sizes: list = None
    """,
    "entrypoints/__init__.py": "",
    "entrypoints/openai/__init__.py": "",
    "entrypoints/openai/cli_args.py": """
        from dataclasses import dataclass

        @dataclass
        class FrontendArgs:
            host: str = None
            port: int = 8000
            chat_template: str = None
    """,
    "entrypoints/cli/__init__.py": "",
    "entrypoints/cli/main.py": """
        import importlib.metadata, json, os, sys
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        CONFIG = {"cache_config": {"block_size": 16}, "scheduler_config": {"max_num_seqs": 256}}
        PAGES = {
            "/health": "",
            "/server_info?config_format=json": json.dumps({"vllm_config": CONFIG}),
            "/metrics": 'vllm:num_preemptions_total{engine="0"} 3\\nvllm:cache_config_info{swap="1"} 1\\n',
        }

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = PAGES.get(self.path, "")
                self.send_response(200 if self.path in PAGES or self.path == "/reset_prefix_cache" else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())
            do_GET = do_POST = answer

        def main():
            print("version", importlib.metadata.version("vllm"))
            arguments = sys.argv[1:]
            print("arguments", arguments, "mode", os.environ["VLLM_SERVER_DEV_MODE"], flush=True)
            if "--block-size" in arguments:
                print("vllm serve: error: argument --block-size: invalid choice: 3", file=sys.stderr)
                return 2
            port = int(arguments[arguments.index("--port") + 1])
            print("INFO 11-16 12:00:00 [kv.py:1] GPU KV cache size: 12,800 tokens, Maximum concurrency for 4,096 "
                  "tokens per request: 3.12x", flush=True)
            ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """,
}


def write_fake_vllm(directory: Path, distribution: str = "vllm") -> Path:
    """Returns the interpreter."""
    from textwrap import dedent

    packages = directory / "packages"
    for name, text in _FILES.items():
        file = packages / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))
    info = packages / f"{distribution.replace('-', '_')}-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {VERSION}\n")
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    return python
