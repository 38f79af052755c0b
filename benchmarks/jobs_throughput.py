"""What a job costs without a model: reader, parser, tokenizer, a fake engine, writer. Lines a second, and memory.

The fake engine answers every request with a few tokens at once, and refuses what the real one would. Lines are made
on the fly by a second process and come through a pipe, so that no disk is measured on the way in; the time of that
process is the machine's too.

    python benchmarks/jobs_throughput.py --lines 1000000 --json benchmarks/results/jobs-throughput.json
    python benchmarks/jobs_throughput.py --lines 20000000 --kind chat --json ... --plot docs/jobs-memory.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.config import EngineConfig
from headrace.engine.checks import RequestChecks
from headrace.engine.client import Deliver
from headrace.engine.core import EngineStats
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.jobs.run import run_job
from headrace.jobs.spec import JobSpec
from headrace.models import ModelSpec
from headrace.sched import SchedulerStats
from headrace.text import ChatTemplate, Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER
from headrace.types import Request, SequenceEvent
from headrace.version import __version__

KINDS = ("plain", "chat")
ANSWER_LEN = 8
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[reply]"
TEXT = "the quick brown fox jumps over a lazy dog and runs along the river bank until night falls"
WORDS = TEXT.split()


@dataclass
class Record:
    kind: str
    num_lines: int
    num_errors: int
    bytes_in: int
    bytes_out: int
    seconds: float
    lines_per_second: float
    cpu_seconds: float  # of the job's process; the generator's is not in it
    rss_mb_at_start: float
    rss_mb_peak: float
    samples: list[tuple[int, float]] = field(default_factory=list)  # lines written, MB


class FakeClient:
    """Answers on a thread of its own, all that has been submitted at once."""

    def __init__(self, deliver: Deliver, checks: RequestChecks) -> None:
        self._deliver = deliver
        self._checks = checks
        self._news = threading.Condition()
        self._submitted: list[Request] = []
        self._is_closed = False
        self.num_answered = 0
        self.failure = None
        self._tokens = np.frombuffer(b" Berlin.", np.uint8).astype(np.int32)
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(SchedulerStats(), 0.0, 0.0)

    def submit(self, request: Request) -> None:
        self._checks.check(request)
        with self._news:
            self._submitted.append(request)
            self._news.notify()

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def limit_running(self, num_seqs: int | None) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def close(self) -> None:
        with self._news:
            self._is_closed = True
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                while not self._submitted and not self._is_closed:
                    self._news.wait()
                requests, self._submitted = self._submitted, []
            if self._is_closed:
                return
            self.num_answered += len(requests)
            self._deliver([SequenceEvent(request.request_id, 0, self._tokens, "length") for request in requests])


def byte_tokenizer() -> Tokenizer:
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    words = {spelled[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:  # each word of the prompts is one token, as it would be in a large vocabulary
        token = spelled[32]
        for character in word:
            if token + character not in words:
                words[token + character] = len(words)
                merges.append((token, character))
            token += character
    backend = Backend(models.BPE(vocab=words, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, chat_template=ChatTemplate(TEMPLATE))


def start(config: EngineConfig, deliver: Deliver) -> Engine:
    settings = Settings(
        device="none",
        dtype="float32",
        kv_dtype="float32",
        load_format="random",
        num_threads=1,
        max_model_len=4096,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        block_size=16,
        num_blocks=200_000,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        queue_policy="fcfs",
        capacity_policy="max_utilization",
        seed=0,
        choices=(),
    )
    tokenizer = byte_tokenizer()
    return Engine(
        client=FakeClient(deliver, RequestChecks(settings.limits, (), 4096)),
        settings=settings,
        spec=cast(ModelSpec, SimpleNamespace(vocab_size=4096)),
        tokenizer=tokenizer,
        eos_token_ids=(),
        model_name="fake",
        start_seconds=0.0,
    )


def lines(kind: str, num_lines: int) -> Iterator[bytes]:
    """In pieces of a thousand."""
    texts = [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(24)) for i in range(len(WORDS))]
    for begin in range(0, num_lines, 1000):
        numbers = range(begin, min(begin + 1000, num_lines))
        if kind == "plain":
            rows = [f'{{"prompt": "{texts[i % len(texts)]} {i}", "max_tokens": 8, "id": {i}}}\n' for i in numbers]
        else:
            rows = [
                f'{{"custom_id": "row-{i}", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "fake",'
                f' "messages": [{{"role": "system", "content": "Answer in one word."}}, {{"role": "user", "content": '
                f'"{texts[i % len(texts)]} {i}"}}], "max_tokens": 8, "temperature": 0}}}}\n'
                for i in numbers
            ]
        yield "".join(rows).encode()


def measure(kind: str, num_lines: int, output: str, every: float) -> Record:
    process = psutil.Process()
    receiver, sender = os.pipe()
    command = [sys.executable, __file__, "--generate", kind, "--lines", str(num_lines)]
    generator = subprocess.Popen(command, stdout=sender)
    os.close(sender)
    samples: list[tuple[int, float]] = []
    engines: list[Engine] = []
    is_over = threading.Event()

    def started(config: EngineConfig, deliver: Deliver) -> Engine:
        engines.append(start(config, deliver))
        return engines[-1]

    def sample() -> None:
        while not is_over.wait(every):
            if engines:
                samples.append((cast(Any, engines[0].client).num_answered, process.memory_info().rss / 1e6))

    beside = threading.Thread(target=sample, daemon=True)
    at_start, cpu = process.memory_info().rss / 1e6, process_time()
    began = perf_counter()
    beside.start()
    job = JobSpec(input=f"/dev/fd/{receiver}", output=output, overwrite=True)
    report = run_job(job, start=started, quiet=True)
    seconds = perf_counter() - began
    is_over.set()
    beside.join()
    os.close(receiver)
    generator.wait()
    assert report.tally.num_done == num_lines, report.tally
    return Record(
        kind=kind,
        num_lines=num_lines,
        num_errors=report.tally.num_failed,
        bytes_in=sum(map(len, lines(kind, 1000))) * num_lines // 1000,
        bytes_out=os.stat(output).st_size,
        seconds=round(seconds, 2),
        lines_per_second=round(num_lines / seconds),
        cpu_seconds=round(process_time() - cpu, 2),
        rss_mb_at_start=round(at_start, 1),
        rss_mb_peak=round(max([at_start, *(mb for _, mb in samples)]), 1),
        samples=[(count, round(mb, 1)) for count, mb in samples],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--output", default="/dev/null", help="where the answers go")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks at the memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--generate", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.generate:
        for piece in lines(given.generate, given.lines):
            sys.stdout.buffer.write(piece)
        return
    records = []
    for kind in KINDS if given.kind == "all" else [given.kind]:
        record = measure(kind, given.lines, given.output, given.every)
        print(
            f"{kind}: {record.num_lines:,} lines in {record.seconds} s, {record.lines_per_second:,} lines/s, "
            f"memory {record.rss_mb_at_start} MB at start, {record.rss_mb_peak} MB at most",
            flush=True,
        )
        records.append(asdict(record))
    if given.json:
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "headrace": __version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "records": records,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
