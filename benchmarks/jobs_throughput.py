"""Measures a whole job without a model: lines are read, parsed, rendered, tokenized, planned, submitted, answered,
journaled with group syncs and published. Lines per second, CPU time, memory and disk.

The fake engine accepts and refuses requests like the real one; a step takes five milliseconds and answers all submitted
requests with a few tokens. The tokenizer knows whole words, and all prompts differ. The input is written to a temporary
file first, which is not measured; each kind of line is measured in a process of its own, with its children. The free
disk space is checked before anything is written.

    python benchmarks/jobs_throughput.py --lines 1000000 --json benchmarks/results/jobs-throughput.json
    python benchmarks/jobs_throughput.py --lines 20000000 --json ... --plot docs/jobs-memory.svg
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time, sleep
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
from headrace.jobs.formats import open_source
from headrace.jobs.formats.line_index import Bitmap
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.models import ModelSpec
from headrace.sched import SchedulerStats
from headrace.text import ChatTemplate, Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER
from headrace.types import Request, SequenceEvent
from headrace.version import __version__

KINDS = ("plain", "chat")
STEP_SECONDS = 0.005
MAX_SAMPLES = 100
BYTES_OF_RESULT = {"plain": 240, "chat": 520}  # in the journal
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[reply]"
TEXT = "the quick brown fox jumps over a lazy dog and runs along the river bank until night falls"
WORDS = TEXT.split()


@dataclass
class Sample:
    num_answered: int
    rss_mb: float  # of the job's process
    children_rss_mb: float
    disk_mb: float  # the journal, and the output while it is merged


@dataclass
class Record:
    kind: str
    num_lines: int
    num_errors: int
    bytes_in: int
    bytes_out: int
    seconds: float  # from the command to the published output
    answering_seconds: float  # of these, until the last result was written
    lines_per_second: float
    cpu_seconds: float
    children_cpu_seconds: float
    cpu_us_per_line: float  # of all processes
    rss_mb_at_start: float
    rss_mb_peak: float  # with children
    disk_mb_peak: float  # the input not counted
    samples: list[Sample] = field(default_factory=list)


class FakeClient:
    """Answers all submitted requests in each step, on a thread of its own."""

    def __init__(self, deliver: Deliver, checks: RequestChecks) -> None:
        self._deliver = deliver
        self._checks = checks
        self._changed = threading.Condition()
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
        with self._changed:
            self._submitted.append(request)
            if len(self._submitted) == 1:
                self._changed.notify()

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def limit_running(self, num_seqs: int | None) -> None:
        pass

    def forget_prefixes(self) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._submitted and not self._is_closed:
                    self._changed.wait()
            sleep(STEP_SECONDS)
            with self._changed:
                requests, self._submitted = self._submitted, []
            if self._is_closed:
                return
            self.num_answered += len(requests)
            self._deliver([SequenceEvent(request.request_id, 0, self._tokens, "length") for request in requests])


def word_tokenizer() -> Tokenizer:
    """Whole words, numbers of three digits and single bytes: as cheap as possible, since it is not measured."""
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    tokens = {spelled[byte]: byte for byte in range(256)}
    for word in [*WORDS, *(f"{number:03}" for number in range(1000))]:
        tokens.setdefault(word, len(tokens))
    backend = Backend(models.WordLevel(tokens, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
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
    """In blocks of a thousand lines."""
    texts = [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(24)) for i in range(len(WORDS))]
    for begin in range(0, num_lines, 1000):
        numbers = range(begin, min(begin + 1000, num_lines))
        prompts = [f"{texts[i % len(texts)]} {i // 1_000_000:03} {i // 1000 % 1000:03} {i % 1000:03}" for i in numbers]
        if kind == "plain":
            lines = [f'{{"prompt": "{prompts[i - begin]}", "max_tokens": 8, "id": {i}}}\n' for i in numbers]
        else:
            lines = [
                f'{{"custom_id": "row-{i}", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "fake",'
                f' "messages": [{{"role": "system", "content": "Answer in one word."}}, {{"role": "user", "content": '
                f'"{prompts[i - begin]}"}}], "max_tokens": 8, "temperature": 0}}}}\n'
                for i in numbers
            ]
        yield "".join(lines).encode()


class Sampler:
    """Samples memory and disk on a thread of its own. With too many samples, every second one is dropped."""

    def __init__(self, output: Path, every: float) -> None:
        self._output = output
        self._every = every
        self._process = psutil.Process()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self.engine: Engine | None = None
        self.samples: list[Sample] = []
        self.rss_mb_peak = self.disk_mb_peak = 0.0
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._is_over.wait(self._every):
            self._look()
            if len(self.samples) > MAX_SAMPLES:
                del self.samples[1::2]
                self._every *= 2

    def _look(self) -> None:
        num_answered = 0 if self.engine is None else cast(Any, self.engine.client).num_answered
        own, children = _rss_mb(self._process), sum(map(_rss_mb, self._process.children(recursive=True)))
        files = [self._output, *(self._output.parent / f"{self._output.name}.job").glob("*")]
        disk = sum(map(_size_mb, files))
        self.rss_mb_peak = max(self.rss_mb_peak, own + children)
        self.disk_mb_peak = max(self.disk_mb_peak, disk)
        self.samples.append(Sample(num_answered, round(own, 1), round(children, 1), round(disk, 1)))


def _rss_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss / 1e6)
    except psutil.Error:
        return 0.0  # it has just ended


def _size_mb(path: Path) -> float:
    try:
        return path.stat().st_size / 1e6
    except OSError:
        return 0.0  # it has just been renamed


def measure(kind: str, num_lines: int, source: Path, every: float) -> Record:
    output = source.parent / "answers.jsonl"
    at_start, cpu, children = _rss_mb(psutil.Process()), process_time(), _children_seconds()
    sampler = Sampler(output, every)

    def started(config: EngineConfig, deliver: Deliver) -> Engine:
        sampler.engine = start(config, deliver)
        return sampler.engine

    began = perf_counter()
    report = run_job(JobSpec(input=str(source), output=str(output)), start=started, quiet=True)
    seconds = perf_counter() - began
    cpu, children = process_time() - cpu, _children_seconds() - children
    sampler.stop()
    assert report.tally.num_done == num_lines and not report.saved.duplicate_lines, report.tally
    return Record(
        kind=kind,
        num_lines=num_lines,
        num_errors=report.tally.num_failed,
        bytes_in=source.stat().st_size,
        bytes_out=output.stat().st_size,
        seconds=round(seconds, 2),
        answering_seconds=round(report.seconds, 2),
        lines_per_second=round(num_lines / seconds),
        cpu_seconds=round(cpu, 2),
        children_cpu_seconds=round(children, 2),
        cpu_us_per_line=round(1e6 * (cpu + children) / num_lines, 1),
        rss_mb_at_start=round(at_start, 1),
        rss_mb_peak=round(sampler.rss_mb_peak, 1),
        disk_mb_peak=round(sampler.disk_mb_peak, 1),
        samples=sampler.samples[1:][-MAX_SAMPLES:],
    )


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure_apart(kind: str, num_lines: int, every: float, where: str | None) -> dict[str, Any]:
    """In a process of its own, so that memory left by another kind does not count."""
    check_room(kind, num_lines, where)
    with tempfile.TemporaryDirectory(dir=where) as directory:
        source = Path(directory) / "in.jsonl"
        with open(source, "wb") as file:
            for piece in lines(kind, num_lines):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        command = [sys.executable, __file__, "--measure", kind, "--lines", str(num_lines), "--every", str(every)]
        found = subprocess.run([*command, "--input", str(source)], stdout=subprocess.PIPE, check=True)
        record: dict[str, Any] = json.loads(found.stdout)
    return record


def check_room(kind: str, num_lines: int, where: str | None) -> None:
    """Input, journal and output are on the disk at the same time."""
    input_bytes = sum(map(len, lines(kind, 1000))) // 1000
    needed = num_lines * (input_bytes + 2 * BYTES_OF_RESULT[kind])
    free = shutil.disk_usage(where or tempfile.gettempdir()).free
    print(f"{kind}: {needed / 1e9:.1f} GB of disk will be needed, {free / 1e9:.1f} GB are free", flush=True)
    if needed > 0.9 * free:
        sys.exit("that is too little room: give another --directory, or fewer --lines")


def plot(records: list[dict[str, Any]]) -> str:
    """A plot of memory over lines, as SVG."""
    width, height, left, top, right, bottom = 720, 320, 64, 24, 16, 48
    most_lines = max(record["num_lines"] for record in records)
    most_mb = max(100, 50 * -(-max(record["rss_mb_peak"] for record in records) // 50))
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
        points = " ".join(
            f"{x(sample['num_answered']):.1f},{y(sample['rss_mb'] + sample['children_rss_mb']):.1f}"
            for sample in record["samples"]
        )
        colour = colours[place % len(colours)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        text = f"{record['kind']} lines: {record['lines_per_second']:,} a second"
        parts.append(f'<text x="{left + 8}" y="{top + 14 * place}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def measure_skipping(num_lines: int) -> dict[str, float]:
    """How fast done lines are skipped: a local file, and a bitmap in which all lines are set."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        for piece in lines("plain", num_lines):
            file.write(piece)
        file.flush()
        done = Bitmap(range(num_lines))
        with closing(open_source(file.name)) as source:
            began = perf_counter()
            assert not [line for batch in source.read_batches(skip=done.__contains__) for line in batch]
            skipped = perf_counter() - began
            source.identity()
            hashed = perf_counter() - began - skipped
        return {
            "num_lines": num_lines,
            "skipped_lines_per_second": round(num_lines / skipped),
            "hashed_mb_per_second": round(os.stat(file.name).st_size / hashed / 1e6),
            "bitmap_bytes": done.num_bytes,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--directory", help="where input, journal and output are; the default is for temporary files")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two looks at the memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the memory against the lines, as SVG")
    parser.add_argument("--measure", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--input", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(asdict(measure(given.measure, given.lines, given.input, given.every))))
        return
    load = os.getloadavg()
    skipping = measure_skipping(min(given.lines, 1_000_000))
    print(f"done lines passed over: {skipping['skipped_lines_per_second']:,} lines/s", flush=True)
    records = []
    for kind in KINDS if given.kind == "all" else [given.kind]:
        record = measure_apart(kind, given.lines, given.every, given.directory)
        print(
            f"{kind}: {record['num_lines']:,} lines in {record['seconds']} s, {record['lines_per_second']:,} lines/s, "
            f"{record['cpu_us_per_line']} us of CPU a line ({record['children_cpu_seconds']:g} of "
            f"{record['cpu_seconds'] + record['children_cpu_seconds']:.4g} s by children), memory "
            f"{record['rss_mb_at_start']} MB at start, {record['rss_mb_peak']} MB at most, "
            f"disk {record['disk_mb_peak']} MB",
            flush=True,
        )
        records.append(record)
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
            "load": {"before": load, "after": os.getloadavg()},  # more than the number of cores: other work ran too
            "skipping": skipping,
            "records": records,
        }
        given.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
