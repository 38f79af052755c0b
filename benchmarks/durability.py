"""What it costs a batch job to survive: the same job with its journal, and with results plainly written to a file.

The engine is fake and takes no time, so that everything measured is the host's; beside a real one the share is smaller.
The two ways take turns, and which of them comes first. Wall time has the disk's syncs in it, CPU time does not; on a
busy machine look at the CPU time.

    python benchmarks/durability.py --json benchmarks/results/durability.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any, cast

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.config import EngineConfig
from headrace.engine.client import Deliver, EngineClient
from headrace.engine.core import EngineCore
from headrace.engine.progress import GenerateProgress
from headrace.engine.settings import Settings
from headrace.engine.start import Engine
from headrace.jobs.journal import Journal
from headrace.jobs.reader import open_input, read_batches
from headrace.jobs.run import JobRun, run_job
from headrace.jobs.spec import JobSpec
from headrace.jobs.writer import ResultWriter
from headrace.models import ModelSpec
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler
from headrace.text import Tokenizer
from headrace.text.pieces import BYTE_OF_CHARACTER
from headrace.version import __version__

ASCII = 128
SETTINGS = Settings(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    load_format="random",
    num_threads=1,
    max_model_len=4096,
    max_num_seqs=512,
    max_num_batched_tokens=8192,
    block_size=16,
    num_blocks=100_000,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    queue_policy="fcfs",
    capacity_policy="max_utilization",
    seed=0,
    choices=(),
)


@dataclass(frozen=True)
class Cost:
    wall_s: float
    cpu_s: float
    output_bytes: int


def byte_tokenizer() -> Tokenizer:
    spelled = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    backend = Backend(models.BPE(vocab={spelled[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def start(config: EngineConfig, deliver: Deliver) -> Engine:
    core = EngineCore(Scheduler(SETTINGS.limits), FakeRunner(max_num_seqs=SETTINGS.max_num_seqs, vocab_size=ASCII))
    return Engine(
        client=EngineClient(core, deliver),
        settings=SETTINGS,
        spec=cast(ModelSpec, SimpleNamespace(vocab_size=256)),
        tokenizer=byte_tokenizer(),
        eos_token_ids=(),
        model_name="fake",
        start_seconds=0.0,
    )


def run_plainly(job: JobSpec) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    engine = start(job.config, inbox.put)
    try:
        with (
            open_input(job.input) as source,
            ResultWriter.open(job.output) as writer,
            GenerateProgress(None, enabled=False) as progress,
        ):
            JobRun(job, engine, inbox, lines=read_batches(source), results=writer, progress=progress).run()
    finally:
        engine.close()


def run_durably(job: JobSpec) -> None:
    run_job(job, start=start, quiet=True)


def measure(run: Callable[[JobSpec], None], source: Path) -> Cost:
    directory = Path(tempfile.mkdtemp(dir=source.parent))
    job = JobSpec(input=str(source), output=str(directory / "out.jsonl"))
    os.sync()  # what earlier rounds left to be written is not this one's
    wall, cpu = perf_counter(), process_time()
    run(job)
    cost = Cost(perf_counter() - wall, process_time() - cpu, os.path.getsize(job.output))
    shutil.rmtree(directory)
    return cost


def append_rate(directory: Path, num_rows: int, row_bytes: int) -> float:
    """Rows a second that the journal alone takes, synced in groups."""
    result = b'{"text":"%b"}' % (b"x" * (row_bytes - 11))
    journal = Journal.open(directory, epoch=1)
    started = perf_counter()
    for index in range(num_rows):
        journal.append(index, result)
        if index % 16 == 15:
            journal.flush()
    journal.commit()
    rate = num_rows / (perf_counter() - started)
    journal.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", type=Path, help="write a record of the numbers to this file")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    source = root / "in.jsonl"
    with open(source, "w") as file:
        for number in range(args.rows):
            prompt = f"Row {number}: what follows from this, and why does it matter?"
            file.write(json.dumps({"prompt": prompt, "max_tokens": args.tokens, "number": number}) + "\n")
    ways = {"plain": run_plainly, "journal": run_durably}
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            cost = measure(ways[name], source)
            if number:  # the first round warms up
                costs[name].append(cost)
                print(
                    f"{name:<8} {args.rows / cost.wall_s:>9,.0f} rows/s {1e6 * cost.cpu_s / args.rows:>8.1f} us CPU/row"
                )
    alone = root / "alone"
    alone.mkdir()
    rate = append_rate(alone, 200_000, 1_400)
    shutil.rmtree(root)
    losses = {kind: loss(costs, kind) for kind in ("wall_s", "cpu_s")}
    print(json.dumps(losses, indent=2), f"\nthe journal alone: {rate:,.0f} rows/s of 1.4 kB")
    if args.json is not None:
        record = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "versions": {"headrace": __version__, "python": platform.python_version()},
            "cpu": cpu_model(),
            "rows": args.rows,
            "tokens_per_answer": args.tokens,
            "max_num_seqs": SETTINGS.max_num_seqs,
            "rounds": {name: [asdict(cost) for cost in each] for name, each in costs.items()},
            "loss_of_throughput": losses,
            "journal_alone_rows_per_s": rate,
        }
        args.json.write_text(json.dumps(record, indent=2) + "\n")


def loss(costs: dict[str, list[Cost]], kind: str) -> dict[str, float]:
    """Of throughput, pair by pair: what else the machine does changes from minute to minute."""
    pairs = zip(costs["plain"], costs["journal"], strict=True)
    losses = sorted(1 - getattr(plain, kind) / getattr(durable, kind) for plain, durable in pairs)
    quarter = len(losses) // 4
    return {"median": statistics.median(losses), "quartile_1": losses[quarter], "quartile_3": losses[-1 - quarter]}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
