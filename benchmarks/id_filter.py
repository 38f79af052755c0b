"""Compares the filter of a job's ids with sqlite and with Python's own containers: time for a million ids, peak memory.

Usage: python benchmarks/id_filter.py [--millions 1 5 20] [--rounds 2] [--ids random sequential] [--output results.json]

Each container takes the same ids, a few of them for the second time, in batches, and has to say of each of those
with which line it came first (a set cannot: it only says that the id is there). Each run is a process of its own; runs
are interleaved. Only the container's calls are timed. Memory is the process's peak beyond what it had at the start.

    headrace        IdFilter: 64-bit hashes in a dictionary, then in sorted runs (long ones in a file) behind a filter
    set             the 8-byte digests of all ids
    dict            line number by 64-bit hash
    sqlite-*-text   (id TEXT PRIMARY KEY, line INTEGER) WITHOUT ROWID, INSERT OR IGNORE, one transaction, no journal
    sqlite-*-hash   the same by 64-bit hash: (id INTEGER PRIMARY KEY, line INTEGER)
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

from about import commit, cpu_name

BATCH = 4096
MILLION = 1_000_000
REPEAT_EVERY = 100_000  # one id of so many was there before: it is an error of the input, and rare
CACHE_KIB = 65_536  # of sqlite, in memory
MAX_RUN_S = 240.0  # after so long a run is stopped, and what it has done is reported

Found = list[int | None]
Add = Callable[[Sequence[str], Sequence[int]], Found]


# ---- the containers


def headrace(directory: str) -> Add:
    from headrace.jobs.input.id_filter import IdFilter

    return IdFilter(directory=Path(directory)).add


def digests(directory: str) -> Add:
    seen: set[bytes] = set()

    def add(ids: Sequence[str], numbers: Sequence[int]) -> Found:
        found: Found = []
        for name in ids:
            digest = blake2b(name.encode(), digest_size=8).digest()
            if digest in seen:
                found.append(-1)
            else:
                seen.add(digest)
                found.append(None)
        return found

    return add


def by_hash(directory: str) -> Add:
    seen: dict[int, int] = {}

    def add(ids: Sequence[str], numbers: Sequence[int]) -> Found:
        firsts = [seen.setdefault(hash(name), number) for name, number in zip(ids, numbers, strict=True)]
        return [None if first == number else first for first, number in zip(firsts, numbers, strict=True)]

    return add


def sqlite(address: str, *, is_hashed: bool) -> Add:
    """The answer to a batch is looked up only if one of its ids was there."""
    connection = sqlite3.connect(address, isolation_level=None)
    for pragma in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}", "locking_mode = EXCLUSIVE"):
        connection.execute(f"PRAGMA {pragma}")
    columns = "id INTEGER PRIMARY KEY, line INTEGER" if is_hashed else "id TEXT PRIMARY KEY, line INTEGER"
    connection.execute(f"CREATE TABLE seen ({columns}) {'' if is_hashed else 'WITHOUT ROWID'}")
    connection.execute("BEGIN")

    def add(ids: Sequence[str], numbers: Sequence[int]) -> Found:
        keys: Sequence[Any] = [hash(name) for name in ids] if is_hashed else ids
        before = connection.total_changes
        connection.executemany("INSERT OR IGNORE INTO seen VALUES (?, ?)", zip(keys, numbers, strict=True))
        if connection.total_changes - before == len(ids):
            return [None] * len(ids)
        look = "SELECT line FROM seen WHERE id = ?"
        firsts = [connection.execute(look, (key,)).fetchone()[0] for key in keys]
        return [None if first == number else first for first, number in zip(firsts, numbers, strict=True)]

    return add


CONTAINERS: dict[str, Callable[[str], Add]] = {
    "headrace": headrace,
    "set": digests,
    "dict": by_hash,
    "sqlite-memory-text": lambda directory: sqlite(":memory:", is_hashed=False),
    "sqlite-memory-hash": lambda directory: sqlite(":memory:", is_hashed=True),
    "sqlite-file-text": lambda directory: sqlite(f"{directory}/ids.sqlite", is_hashed=False),
    "sqlite-file-hash": lambda directory: sqlite(f"{directory}/ids.sqlite", is_hashed=True),
}


# ---- a run, in its own process


def id_of(number: int, kind: str) -> str:
    if kind == "sequential":
        return f"request-{number:09d}"
    return blake2b(number.to_bytes(8, "little"), digest_size=16).hexdigest()  # as long as a UUID, in no order


def original(number: int) -> int:
    """Which line's id a line has: its own, but one line in many has that of the middle of all before it."""
    return number // 2 if number % REPEAT_EVERY == 0 and number // 2 % REPEAT_EVERY else number


def fill(name: str, kind: str, millions: list[int], directory: str, pipe: Any) -> None:
    add = CONTAINERS[name](directory)
    at_start = peak_mib()
    wall = cpu = 0.0
    number = 1
    for goal in millions:
        while number <= goal * MILLION and wall < MAX_RUN_S:
            numbers = list(range(number, min(number + BATCH, goal * MILLION + 1)))
            ids = [id_of(original(one), kind) for one in numbers]
            began, began_cpu = time.perf_counter(), time.process_time()
            found = add(ids, numbers)
            wall, cpu = wall + time.perf_counter() - began, cpu + time.process_time() - began_cpu
            check(name, numbers, found)
            number = numbers[-1] + 1
        on_disk = sum(entry.stat().st_size for entry in os.scandir(directory))
        pipe.send(
            {
                "ids": number - 1,
                "wall_s": round(wall, 3),
                "cpu_s": round(cpu, 3),
                "peak_mib": round(peak_mib() - at_start, 1),
                "named_files_mib": round(on_disk / 2**20, 1),
            }
        )
    pipe.close()


def check(name: str, numbers: list[int], found: Found) -> None:
    for number, first in zip(numbers, found, strict=True):
        expected = None if original(number) == number else original(number)
        assert first == (expected if expected is None or name != "set" else -1), f"{name}: {number} gave {first}"


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- all runs


def run(name: str, kind: str, millions: list[int]) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe()
        process = context.Process(target=fill, args=(name, kind, millions, directory, theirs))
        process.start()
        theirs.close()
        found = []
        try:
            while True:
                found.append(ours.recv())
        except EOFError:
            pass
        process.join()
        assert process.exitcode == 0, f"{name} ended with {process.exitcode}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ids", nargs="+", default=["random", "sequential"], choices=["random", "sequential"])
    parser.add_argument("--containers", nargs="+", default=list(CONTAINERS), choices=list(CONTAINERS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for kind in args.ids:
        for _ in range(args.rounds):
            for name in args.containers:
                found = run(name, kind, sorted(args.millions))
                results.setdefault(kind, {}).setdefault(name, []).append(found)
                shown = "   ".join(
                    f"{one['ids'] / MILLION:.1f} M: {one['wall_s'] * MILLION / one['ids']:.2f} s/M, "
                    f"{one['peak_mib']:,.0f} MiB"
                    for one in found
                )
                print(f"{kind:<12}{name:<20}{shown}", flush=True)
                write(args, results)


def write(args: argparse.Namespace, results: dict[str, dict[str, list[list[dict[str, Any]]]]]) -> None:
    """After each run: a long benchmark that is stopped has still measured something."""
    if args.output is None:
        return
    record = {
        "command": f"python benchmarks/id_filter.py {' '.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "batch": BATCH,
        "sqlite_cache_kib": CACHE_KIB,
        "medians_by_ids_container_and_count": {
            kind: {name: medians(runs) for name, runs in by_name.items()} for kind, by_name in results.items()
        },
        "runs": results,
    }
    args.output.write_text(json.dumps(record, indent=2) + "\n")


def medians(runs: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    by_count: dict[int, list[dict[str, Any]]] = {}
    for one in (one for found in runs for one in found):
        by_count.setdefault(one["ids"], []).append(one)
    return {
        f"{count:,}": {
            "wall_s_per_million": round(median(one["wall_s"] * MILLION / count for one in ones), 3),
            "cpu_s_per_million": round(median(one["cpu_s"] * MILLION / count for one in ones), 3),
            "peak_mib": round(median(one["peak_mib"] for one in ones), 1),
        }
        for count, ones in by_count.items()
    }


if __name__ == "__main__":
    main()
