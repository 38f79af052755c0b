"""How fast the disk tier writes and reads blocks, without a model: `kv_tiers.py` shows only what is left of it.

    python benchmarks/disk_tier.py --path /var/cache --save benchmarks/results/disk-tier-cpu.json

Each round writes all blocks, reads them from the page cache, and reads them again after their pages were dropped. The
host's memory is the limit of the first two, the disk that of the third. With `--busy` another thread runs Python all
the time, as the engine's does at its busiest.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from about import commit

from headrace.hardware.describe import machine_facts, package_versions
from headrace.kv.disk_tier import DiskTier

WAIT_S = 600.0


def main() -> None:
    given = _parse()
    rounds: list[dict[str, float]] = []
    memory = np.random.default_rng(1).integers(0, 256, (given.blocks, given.block_mib << 20), np.uint8)
    with _busy_thread() if given.busy else _no_thread():
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory(dir=given.path) as root:
                rounds.append(_round(Path(root), memory))
            print("  ".join(f"{name} {rate:.2f} GB/s" for name, rate in rounds[-1].items()), flush=True)
    medians = {name: round(median(each[name] for each in rounds), 2) for name in rounds[0]}
    print(f"medians: {medians}")
    if given.save:
        facts = {"commit": commit(), "machine": machine_facts(), "versions": package_versions()}
        record = {"benchmark": "disk_tier", "command": sys.argv, **facts, "arguments": vars(given)}
        record |= {"median_gb_per_s": medians, "rounds_gb_per_s": rounds}
        Path(given.save).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _round(root: Path, memory: np.ndarray) -> dict[str, float]:
    tier = DiskTier(root, b"d" * 32, memory=memory, wait_for_step=lambda *_: True, max_bytes=1 << 50)
    digests = [secrets.token_bytes(32) for _ in range(len(memory))]

    def write() -> None:
        for place, digest in enumerate(digests):
            assert tier.write(digest, place, 0), "the queue is full: give fewer blocks"
        assert tier.flush(WAIT_S)

    def read() -> None:
        num_read = 0
        for place, digest in enumerate(digests):
            tier.read(digest, place, 0)
        while num_read < len(digests):
            tier.wait(WAIT_S)
            num_read += sum(each.side == "read" and each.is_good for each in tier.finished())

    try:
        rates = {"write": _rate(write, memory), "read": _rate(read, memory)}
        _drop_pages(root)
        return {**rates, "read_cold": _rate(read, memory)}
    finally:
        tier.close()


def _rate(work: Callable[[], None], memory: np.ndarray) -> float:
    """GB/s"""
    began = perf_counter()
    work()
    return memory.nbytes / (perf_counter() - began) / 1e9


def _drop_pages(root: Path) -> None:
    for path in root.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # only pages that are on the disk can be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


@contextmanager
def _no_thread() -> Iterator[None]:
    yield


@contextmanager
def _busy_thread() -> Iterator[None]:
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-mib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="beside a thread that runs Python")
    parser.add_argument("--path", help="where the directory is made; default: the temporary directory")
    parser.add_argument("--save", help="write a record to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
