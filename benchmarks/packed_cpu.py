"""Output tokens per second of few sequences on this CPU, with weights packed as a GGUF file stores them.

python benchmarks/packed_cpu.py --json benchmarks/results/packed-cpu.json

packed      what Headrace does
float32     the same with weights that are dequantized at load
int8        quantization="int8"
llama.cpp   llama-cpp-python on the same file, if it is installed (--llama-python names another interpreter with it):
            one sequence a slot, one batch for each step, prompts one after the other

Each runs in its own process, one after the other, in rounds; medians count. Prompts are random tokens, answers are
greedy and have all the same length. With --busy N, so many other processes compute on the same cores meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

ENGINES = ("packed", "float32", "int8", "llama.cpp")
MARK = "RESULT "
WARM_UPS = 1


def prompts_of(num_seqs: int, prompt_len: int, seed: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(seed).integers(100, 40_000, (num_seqs, prompt_len)).tolist()
    return found


def run_headrace(engine: str, given: argparse.Namespace) -> dict[str, Any]:
    from headrace import LLM, SamplingParams
    from headrace.kernels import ops

    if engine == "float32":
        ops.takes_groups = lambda device, dtype: False  # type: ignore[assignment]
    started = perf_counter()
    llm = LLM(given.model, quantization="int8" if engine == "int8" else None)
    ready = perf_counter() - started
    rates, tokens = {}, {}
    params = SamplingParams(temperature=0, max_tokens=given.answer_len, ignore_eos=True)
    for num_seqs in given.seqs:
        for seed in range(WARM_UPS + 1):
            prompts = [{"prompt_token_ids": ids} for ids in prompts_of(num_seqs, given.prompt_len, seed)]
            started = perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            rates[num_seqs] = num_seqs * given.answer_len / (perf_counter() - started)
        tokens[num_seqs] = [output.outputs[0].token_ids for output in outputs]
    return {"start_seconds": ready, "peak_mib": peak_mib(), "tokens_per_s": rates, "tokens": tokens}


class LlamaCpp:
    """A context of llama.cpp for so many sequences, by its low-level calls."""

    def __init__(
        self,
        model: Any,
        num_seqs: int,
        *,
        max_len: int,
        threads: int,
        cache_type: int | None = None,
    ) -> None:
        """`cache_type`: of keys and values, one of ggml's; None: its default, float16."""
        import llama_cpp.llama_cpp as c

        settings = c.llama_context_default_params()
        settings.n_ctx = num_seqs * (max_len + 8)
        settings.n_seq_max = num_seqs
        settings.n_threads = settings.n_threads_batch = threads
        if cache_type is not None:
            settings.type_k = settings.type_v = cache_type
        self._c, self._context = c, c.llama_init_from_model(model, settings)
        self._max_tokens = int(settings.n_batch)  # of one call
        self._batch = c.llama_batch_init(max(self._max_tokens, num_seqs), 0, 1)
        self._vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))

    def generate(self, prompts: list[list[int]], answer_len: int) -> None:
        self.extend(self.fill(prompts), len(prompts[0]), answer_len - 1)

    def fill(self, prompts: list[list[int]]) -> list[int]:
        """Computes prompts, one after the other, and returns the first token of each answer."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        found = []
        for sequence, ids in enumerate(prompts):
            rows = [(token, at, sequence, at == len(ids) - 1) for at, token in enumerate(ids)]
            for start in range(0, len(rows), self._max_tokens):
                chunk = rows[start : start + self._max_tokens]
                self._decode(chunk)
            found.append(self._best(len(chunk) - 1))
        return found

    def extend(self, last: list[int], length: int, num_tokens: int) -> None:
        """Decodes further tokens of sequences that have this length."""
        for at in range(length, length + num_tokens):
            self._decode([(token, at, sequence, True) for sequence, token in enumerate(last)])
            last = [self._best(index) for index in range(len(last))]

    def close(self) -> None:
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:  # token, position, sequence, whether it samples
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, samples) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, samples
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        assert self._c.llama_decode(self._context, batch) == 0

    def _best(self, index: int) -> int:
        logits = self._c.llama_get_logits_ith(self._context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def run_llama_cpp(given: argparse.Namespace) -> dict[str, Any]:
    import llama_cpp.llama_cpp as c

    silent = c.llama_log_callback(lambda level, text, data: None)
    c.llama_log_set(silent, None)
    c.llama_backend_init()
    started = perf_counter()
    model = c.llama_model_load_from_file(given.model_path.encode(), c.llama_model_default_params())
    ready = perf_counter() - started
    rates = {}
    for num_seqs in given.seqs:
        engine = LlamaCpp(model, num_seqs, max_len=given.prompt_len + given.answer_len, threads=given.threads)
        for seed in range(WARM_UPS + 1):
            started = perf_counter()
            engine.generate(prompts_of(num_seqs, given.prompt_len, seed), given.answer_len)
            rates[num_seqs] = num_seqs * given.answer_len / (perf_counter() - started)
        engine.close()
    return {"start_seconds": ready, "peak_mib": peak_mib(), "tokens_per_s": rates, "version": llama_version()}


def llama_version() -> str:
    import llama_cpp

    return f"llama-cpp-python {llama_cpp.__version__}"


def peak_mib() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def in_process(engine: str, given: argparse.Namespace, arguments: list[str]) -> dict[str, Any] | None:
    python = given.llama_python if engine == "llama.cpp" else sys.executable
    done = subprocess.run(
        [python, __file__, *arguments, "--engine", engine, "--model-path", model_path(given.model)],
        capture_output=True,
        text=True,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        print(f"{engine}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        return None
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def model_path(model: str) -> str:
    from headrace.models.sources import locate

    return str(locate(model))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the default model")
    parser.add_argument(
        "--seqs", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64, 128]
    )
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--answer-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="other processes that compute")
    parser.add_argument("--engines", default=",".join(ENGINES), help="some of them, separated by commas")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model-path", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engine:
        found = run_llama_cpp(given) if given.engine == "llama.cpp" else run_headrace(given.engine, given)
        print(MARK + json.dumps(found))
        return
    arguments = [part for part in sys.argv[1:] if part]
    rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    with busy_processes(given.busy):
        for number in range(given.rounds):
            for engine in given.engines.split(","):
                found = in_process(engine, given, arguments)
                if found is not None:
                    rounds[engine].append(found)
                    print(number, engine, {n: round(rate, 1) for n, rate in found["tokens_per_s"].items()}, flush=True)
    from about import commit, cpu_name  # llama.cpp's interpreter has no Headrace

    record = {
        "command": " ".join(["python benchmarks/packed_cpu.py", *arguments]),
        "unit": "output tokens/s, prompts included",
        "model": Path(given.model).name,
        "prompt_len": given.prompt_len,
        "answer_len": given.answer_len,
        "threads": given.threads,
        "busy_processes": given.busy,
        "machine": platform.machine(),
        "cpu": f"{cpu_name()}, {given.threads} cores",
        "commit": commit(),
        "engines": {engine: summary(each) for engine, each in rounds.items() if each},
        "answers_as_in_float32": share_of_equal_answers(rounds["packed"], rounds["float32"]),
    }
    print(json.dumps(record["engines"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


def share_of_equal_answers(packed: list[dict[str, Any]], wide: list[dict[str, Any]]) -> dict[str, float] | None:
    """Of the last round, by number of sequences. One token that differs makes the rest of an answer another one."""
    if not packed or not wide:
        return None
    pairs = {n: zip(answers, wide[-1]["tokens"][n], strict=True) for n, answers in packed[-1]["tokens"].items()}
    return {n: statistics.mean(one == other for one, other in each) for n, each in pairs.items()}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    seqs = rounds[0]["tokens_per_s"]
    rates = {n: [round(each["tokens_per_s"][n], 1) for each in rounds] for n in seqs}
    return {
        "median": {n: statistics.median(values) for n, values in rates.items()},
        "rounds": rates,
        "peak_mib": [each["peak_mib"] for each in rounds],
        "start_seconds": [round(each["start_seconds"], 2) for each in rounds],
        **({"version": rounds[0]["version"]} if "version" in rounds[0] else {}),
    }


if __name__ == "__main__":
    main()
