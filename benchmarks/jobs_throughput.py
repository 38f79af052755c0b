"""What a job costs without a model: reader, parser, tokenizer, a fake engine, writer. Lines a second, and memory.

The fake engine answers every request with a few tokens at once, and refuses what the real one would; the tokenizer
knows whole words. Lines are made on the fly by a second process and come through a pipe, so that no disk is measured on
the way in; the time of that process is the machine's too.

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
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
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
from headrace.engine.fake_settings import fake_settings
from headrace.engine.start import Engine
from headrace.jobs.index import Bitmap
from headrace.jobs.run import run_job
from headrace.jobs.sources import open_source
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
            if len(self._submitted) == 1:
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


def word_tokenizer() -> Tokenizer:
    """Whole words, digits and single bytes, as cheap as a tokenizer can be: it is not what is measured. Prompts that
    differ by a number have different tokens."""
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    tokens = {spelled[byte]: byte for byte in range(256)}
    for word in WORDS:
        tokens.setdefault(word, len(tokens))
    backend = Backend(models.WordLevel(tokens, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(individual_digits=True)]
    )
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, special_tokens={}, chat_template=ChatTemplate(TEMPLATE))


def start(config: EngineConfig, deliver: Deliver) -> Engine:
    settings = fake_settings(
        device="none", max_model_len=4096, max_num_seqs=1024, max_num_batched_tokens=8192, num_blocks=200_000
    )
    tokenizer = word_tokenizer()
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
        seconds=round(seconds, 2),
        lines_per_second=round(num_lines / seconds),
        cpu_seconds=round(process_time() - cpu, 2),
        rss_mb_at_start=round(at_start, 1),
        rss_mb_peak=round(max([at_start, *(mb for _, mb in samples)]), 1),
        samples=[(count, round(mb, 1)) for count, mb in samples],
    )


def plot(records: list[dict[str, Any]]) -> str:
    """Memory against lines, as SVG."""
    width, height, left, top, right, bottom = 720, 320, 64, 24, 16, 48
    most_lines = max(record["num_lines"] for record in records)
    most_mb = max(100, 50 * -(-max(mb for record in records for _, mb in record["samples"]) // 50))
    colours = ("#1f6feb", "#d1570b")

    def x(count: float) -> float:
        return left + (width - left - right) * count / most_lines

    def y(mb: float) -> float:
        return height - bottom - (height - top - bottom) * mb / most_mb

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        '<g font-family="sans-serif" font-size="12" fill="#444">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for step in range(5):
        mb, count = most_mb * step / 4, most_lines * step / 4
        parts.append(f'<path d="M{left} {y(mb):.1f}H{width - right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(mb) + 4:.1f}" text-anchor="end">{mb:.0f} MB</text>')
        anchor = "end" if step == 4 else "middle"
        parts.append(
            f'<text x="{x(count):.1f}" y="{height - bottom + 18}" text-anchor="{anchor}">{count / 1e6:g} M</text>'
        )
    parts.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">lines answered</text>')
    for place, record in enumerate(records):
        points = " ".join(f"{x(count):.1f},{y(mb):.1f}" for count, mb in record["samples"])
        colour = colours[place % len(colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        text = f"{record['kind']} lines: {record['lines_per_second']:,} a second"
        parts.append(f'<text x="{left + 8}" y="{top + 14 * place}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def measure_skipping(num_lines: int) -> dict[str, float]:
    """How fast lines that are done are passed over: a local file, and a bitmap that has them all."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        for piece in lines("plain", num_lines):
            file.write(piece)
        file.flush()
        done = Bitmap(range(num_lines))
        with closing(open_source(file.name)) as source:
            began = perf_counter()
            assert not [line for batch in source.read_batches(skip=done.__contains__) for line in batch]
            skipped = perf_counter() - began
            source.line_at(num_lines - 1)
            indexed = perf_counter() - began - skipped
            source.identity()
            hashed = perf_counter() - began - skipped - indexed
        return {
            "num_lines": num_lines,
            "skipped_lines_per_second": round(num_lines / skipped),
            "indexed_lines_per_second": round(num_lines / indexed),
            "hashed_mb_per_second": round(os.stat(file.name).st_size / hashed / 1e6),
            "bitmap_bytes": done.num_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--output", default="/dev/null", help="where the answers go")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks at the memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the memory against the lines, as SVG")
    parser.add_argument("--generate", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.generate:
        for piece in lines(given.generate, given.lines):
            sys.stdout.buffer.write(piece)
        return
    load = os.getloadavg()
    skipping = measure_skipping(min(given.lines, 1_000_000))
    print(f"done lines passed over: {skipping['skipped_lines_per_second']:,} lines/s", flush=True)
    records = []
    for kind in KINDS if given.kind == "all" else [given.kind]:
        record = measure(kind, given.lines, given.output, given.every)
        print(
            f"{kind}: {record.num_lines:,} lines in {record.seconds} s, {record.lines_per_second:,} lines/s, "
            f"{record.cpu_seconds} s of CPU, "
            f"memory {record.rss_mb_at_start} MB at start, {record.rss_mb_peak} MB at most",
            flush=True,
        )
        records.append(asdict(record))
    if given.plot:
        given.plot.write_text(plot(records))
    if given.json:
        facts = {
            "command": " ".join(["python", *sys.argv]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
            "headrace": __version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": {"before": load, "after": os.getloadavg()},  # more than the cores: others ran beside it
            "skipping": skipping,
            "records": records,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
