"""Crash tests at scale: for each seed, a job is killed several times in different ways and then finishes.

make torture                                          500 seeds, two at a time
python -m tests.jobs.crash.torture --seeds 50 --json torture.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from random import Random
from time import perf_counter
from typing import Any

from headrace.jobs.crash_points import STEPS
from headrace.version import __version__
from tests.jobs.crash.child import MAX_IN_FLIGHT
from tests.jobs.crash.forge import Forge
from tests.jobs.crash.scene import Scene, make_lines

MAX_CRASHES = 4
NUM_WORKERS = (1, 1, 2, 3)  # of a run; the next one may have another number
Failure = Callable[[Scene, Random], str]


def at_named_step(scene: Scene, random: Random) -> str:
    step = random.choice(STEPS)
    is_often = step in ("appended", "written", "write-half")
    scene.run(crash_at=f"{step}:{random.randint(1, 20 if is_often else 2)}")
    return f"step {step}"


def at_random_call(scene: Scene, random: Random) -> str:
    scene.run(kill_at_call=random.randint(1, scene.num_calls_left))
    return "random call"


def at_random_engine_step(scene: Scene, random: Random) -> str:
    scene.run(kill_at_step=random.randrange(scene.num_steps_left))
    return "random engine step"


def power_loss(scene: Scene, random: Random) -> str:
    scene.run(kill_at_call=random.randint(1, scene.num_calls_left))
    scene.tear(random.randint(1, 2_000))
    return "torn tail"


def drained(scene: Scene, random: Random) -> str:
    scene.order.options["grace_s"] = random.choice([0, 0, 1_000])
    scene.run(term_at_step=random.randrange(scene.num_steps_left))
    return "SIGTERM"


def full_disk(scene: Scene, random: Random) -> str:
    scene.run(max_file_bytes=random.randint(2_000, 20_000))
    return "full disk"


def disk_with_room_later(scene: Scene, random: Random) -> str:
    end = scene.run(max_file_bytes=random.randint(2_000, 20_000), room_after=random.randint(1, 8))
    assert end.was_killed or end.code in (0, 3), "a disk with free space again must not end the job"
    return "full disk, then room"


def dying_engine(scene: Scene, random: Random) -> str:
    """A few deaths, so far apart that a line running alone ends in between: no line may be blamed."""
    steps = [random.randrange(1, 20) + 40 * number for number in range(random.randint(1, 3))]
    kill = random.choice([None, None, random.randint(1, scene.num_calls_left)])
    scene.run(dies_at_steps=tuple(steps), kill_at_call=kill)
    return "engine deaths"


def past_deadline(scene: Scene, random: Random) -> str:
    kill = random.choice([None, None, random.randint(1, scene.num_calls_left)])
    scene.run(expires_at_step=random.randrange(scene.num_steps_left), kill_at_call=kill)
    return "deadline"


def dying_preparer(scene: Scene, random: Random) -> str:
    kill = random.choice([None, random.randint(1, scene.num_calls_left)])
    scene.run(prepares_in_process=True, kills_preparer=True, kill_at_call=kill)
    return "preparing process killed"


def wild_clock(scene: Scene, random: Random) -> str:
    scene.run(has_wild_clock=True, kill_at_call=random.randint(1, scene.num_calls_left))
    return "clock jumps"


FAILURES: list[Failure] = [
    at_named_step,
    at_named_step,
    at_random_call,
    at_random_call,
    at_random_engine_step,
    power_loss,
    drained,
    full_disk,
    disk_with_room_later,
    dying_engine,
    dying_engine,
    past_deadline,
    dying_preparer,
    wild_clock,
]


def torture(forge: Forge, seed: int, directory: Path) -> dict[str, Any]:
    """Run one seed. Raises an AssertionError if a check fails."""
    random = Random(seed)
    lines = make_lines(random, random.randint(20, 120))
    poison = _some_prompts(random, lines) if random.random() < 0.3 else ()
    poison_kills = bool(poison) and random.random() < 0.3
    keep_order = random.random() < 0.3
    scene = Scene(
        forge,
        directory,
        lines,
        poison=poison,
        poison_kills=poison_kills,
        prepares_in_process=random.random() < 0.4,
        workers=lambda: random.choice(NUM_WORKERS),
        keep_order=keep_order,
    )
    kinds = Counter(["poison lines, process killed" if poison_kills else "poison lines"] if poison else [])
    kinds.update(random.choice(FAILURES)(scene, random) for _ in range(random.randint(1, MAX_CRASHES)))
    scene.finish()
    return {
        "kinds": kinds,
        "ends": scene.ends,
        "runs": scene.num_runs,
        "apart": scene.num_with_process,
        "redone": scene.num_redone,
        "rows": len(lines),
    }


def _some_prompts(random: Random, lines: list[str]) -> tuple[str, ...]:
    numbers = [number for number, line in enumerate(lines) if line and line != '{"broken']
    return tuple(f"line {number}" for number in random.sample(numbers, min(len(numbers), random.randint(1, 2))))


def torture_all(seeds: Iterable[int], num_workers: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
    forges: SimpleQueue[Forge] = SimpleQueue()
    for _ in range(num_workers):
        forges.put(Forge())

    def one(seed: int) -> tuple[int, dict[str, Any] | str]:
        forge = forges.get()
        directory = Path(tempfile.mkdtemp(prefix=f"torture-{seed}-"))
        try:
            outcome: dict[str, Any] | str = torture(forge, seed, directory)
            shutil.rmtree(directory)
        except AssertionError as error:  # keep the directory for inspection
            outcome = f"{error} ({directory})"
        finally:
            forges.put(forge)
        return seed, outcome

    with ThreadPoolExecutor(num_workers) as workers:
        yield from workers.map(one, seeds)
    for _ in range(num_workers):
        forges.get().close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write the summary to this file")
    args = parser.parse_args()
    started = perf_counter()
    totals: dict[str, Counter[str]] = {"kinds": Counter(), "ends": Counter()}
    sums: Counter[str] = Counter()
    failures: dict[int, str] = {}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    outcomes = torture_all(seeds, args.workers)
    for number, (seed, outcome) in enumerate(outcomes, start=1):
        if isinstance(outcome, str):
            failures[seed] = outcome
            print(f"seed {seed}: {outcome}")
            continue
        for name, total in totals.items():
            total.update(outcome[name])
        sums.update({name: outcome[name] for name in ("runs", "apart", "redone", "rows")})
        if number % 50 == 0:
            print(f"{number} seeds, {sums['runs']:,} runs, {len(failures)} failures, {perf_counter() - started:.0f} s")
    summary = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", "-m", "tests.jobs.crash.torture", *sys.argv[1:]]),
        "versions": {"headrace": __version__, "python": platform.python_version()},
        "system": platform.system(),
        "seeds": args.seeds,
        "first_seed": args.first_seed,
        "failures": failures,
        "runs": sums["runs"],
        "runs_with_lines_prepared_apart": sums["apart"],
        "rows": sums["rows"],
        "crashes_by_kind": dict(totals["kinds"].most_common()),
        "runs_by_end": dict(totals["ends"].most_common()),
        "killed_runs": totals["ends"]["killed"],
        "rows_computed_again": sums["redone"],
        "rows_computed_again_per_killed_run": sums["redone"] / max(1, totals["ends"]["killed"]),
        "most_in_flight": MAX_IN_FLIGHT,
        "checked": [
            "every index exactly once in the output",
            "committed lines byte-identical after every crash",
            "no committed line computed again",
            "no more lines computed again than can be in flight",
            "the same answers as those of a job that was never interrupted",
        ],
        "seconds": perf_counter() - started,
    }
    print(json.dumps(summary, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
