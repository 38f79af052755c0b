"""A job under test: its input, its expected results, and the checks after each crash and at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from headrace.jobs.spec import job_directory
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.manifest import read_manifest
from tests.jobs.crash.child import MAX_IN_FLIGHT, Order
from tests.jobs.crash.forge import End, Forge

MAX_POISON_RUNS = 40


def make_lines(random: Random, num_lines: int) -> list[str]:
    """Mostly answers of 1 to 12 tokens; some lines are blank, broken, in OpenAI's format, or repeat an id."""
    return [_make_line(random, number) for number in range(num_lines)]


def _make_line(random: Random, number: int) -> str:
    kind = random.random()
    max_tokens = random.choice([1, 2, 3, 5, 8, 12])
    if kind < 0.05:
        return ""
    if kind < 0.1:
        return '{"broken'
    if kind < 0.3:
        custom_id = f"id-{random.randrange(number + 5)}"
        body = {"prompt": f"line {number}", "max_tokens": max_tokens}
        return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})
    return json.dumps({"prompt": f"line {number}", "max_tokens": max_tokens, "number": number})


class Scene:
    """Everything under one directory. `run` gives a child an order and checks what it leaves on disk."""

    def __init__(
        self,
        forge: Forge,
        directory: Path,
        lines: list[str],
        *,
        poison: tuple[str, ...] = (),
        poison_kills: bool = False,
        prepares_in_process: bool = False,
        workers: Callable[[], int] = lambda: 1,
        **options: Any,
    ) -> None:
        """`workers`: how many each run has."""
        self._forge = forge
        self._workers = workers
        (directory / "job").mkdir(parents=True)
        (directory / "reference").mkdir()
        source = directory / "in.jsonl"
        source.write_text("".join(f"{line}\n" for line in lines))
        self.order = Order(
            input=str(source),
            output=str(directory / "job" / "out.jsonl"),
            options=options,
            poison=poison,
            poison_kills=poison_kills,
            prepares_in_process=prepares_in_process,
        )
        self.num_runs = self.num_redone = self.num_with_process = 0
        self.ends: Counter[str] = Counter()
        self._committed: dict[int, bytes] = {}
        self._has_expired = False
        reference = replace(
            self.order, output=str(directory / "reference" / "out.jsonl"), options=dict(options), poison_kills=False
        )
        reference = replace(reference, prepares_in_process=False)
        end = forge.run(reference)
        assert end.code in (0, 3), (end, _error(reference))
        self._num_calls, self._num_steps = map(int, (reference.notes / "counts").read_text().split())
        self._expected = {index: _content(line) for index, line in committed_lines(Path(reference.output)).items()}
        assert len(self._expected) == sum(bool(line) for line in lines)

    @property
    def output(self) -> Path:
        return Path(self.order.output)

    @property
    def last_segment(self) -> Path | None:
        return max(job_directory(self.order.output).glob("seg-*.jsonl"), default=None)

    @property
    def committed(self) -> dict[int, bytes]:
        return dict(self._committed)

    @property
    def num_calls_left(self) -> int:
        """Estimated function calls of a run that does the remaining lines."""
        share_left = 1 - len(self._committed) / len(self._expected)
        return int(self._num_calls * (0.1 + 0.9 * share_left))

    @property
    def num_steps_left(self) -> int:
        return 1 + int(self._num_steps * (1 - len(self._committed) / len(self._expected)))

    def run(self, **failure: Any) -> End:
        """Later runs repeat lines that have expired."""
        order = replace(self.order, **{"workers": self._workers(), **failure})
        if self._has_expired:
            order = replace(order, options={**order.options, "redo": "error=batch_expired"})
        for name in ("submitted", "preparer"):
            (order.notes / name).unlink(missing_ok=True)
        end = self._forge.run(order)
        assert end.was_killed or end.code in (0, 1, 3, 75), (end, _error(order))
        self.num_runs += 1
        self.num_with_process += (order.notes / "preparer").exists()
        self.ends["killed" if end.was_killed else f"exit {end.code}"] += 1
        self._check_step(order)
        return end

    def tear(self, num_bytes: int) -> None:
        """Truncate the last segment, as a power loss would."""
        segment = self.last_segment
        if segment is not None:
            with open(segment, "r+b") as file:
                file.truncate(max(0, segment.stat().st_size - num_bytes))
        self._committed = final_lines(self.output)

    def finish(self) -> None:
        """The last run, without failures except those of poison lines, and all checks of the output."""
        end = self.run()
        for _ in range(MAX_POISON_RUNS if self.order.poison_kills else 0):
            if end.was_killed:
                end = self.run()
        assert end.code in (0, 3), (end, _error(self.order))
        published = self.output.read_bytes().splitlines()
        by_index = committed_lines(self.output)
        assert sorted(published) == sorted(by_index.values()), "the output is not what is committed"
        if self.order.options.get("keep_order"):
            assert published == [by_index[index] for index in sorted(by_index)], "the order is not the input's"
        assert {index: _content(line) for index, line in by_index.items()} == self._expected
        left = {path.name for path in job_directory(self.order.output).iterdir() if path.suffix == ".tmp"}
        assert not left, left

    def _check_step(self, order: Order) -> None:
        before, now = self._committed, final_lines(self.output)
        self._has_expired = self._has_expired or any(map(_has_expired, committed_lines(self.output).values()))
        changed = {index for index, line in before.items() if now.get(index) != line}
        assert not changed, f"lines {sorted(changed)} were committed and have changed"
        path = order.notes / "submitted"
        submitted = Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter[int]()
        assert not submitted.keys() & before.keys(), "a committed line was computed again"
        if not order.may_repeat:
            assert all(count == 1 for count in submitted.values()), "a line was computed twice in one run"
        lost = submitted.keys() - now.keys()
        max_in_flight = order.workers * MAX_IN_FLIGHT
        assert len(lost) <= max_in_flight, f"{len(lost)} lines are lost, {max_in_flight} can be in flight"
        self.num_redone += len(lost)
        self._committed = now


def committed_lines(output: Path) -> dict[int, bytes]:
    """The output lines in the journal now, by index."""
    directory = job_directory(str(output))
    if not directory.exists() or read_manifest(directory) is None:
        return {}
    found = [(record.index, record.result) for record in view_job(directory).records()]
    assert len(found) == len(dict(found)), "a line is there twice"
    return dict(found)


def final_lines(output: Path) -> dict[int, bytes]:
    """The same without lines that have expired, which may change."""
    return {index: line for index, line in committed_lines(output).items() if not _has_expired(line)}


def _has_expired(line: bytes) -> bool:
    return b'"code":"batch_expired"' in line


def _content(line: bytes) -> Any:
    """Without ids, times and cache counts, which differ between jobs."""
    decoded = json.loads(line)
    if b'"code":"poison_request"' in line:
        return decoded.get("index"), decoded.get("custom_id"), "poison"
    names = {"id", "request_id", "created", "created_at", "prompt_tokens_details", "input_tokens_details"}
    return _without(decoded, names)


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(item, names) for name, item in value.items() if name not in names}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


def _error(order: Order) -> str:
    path = order.notes / "error"
    return path.read_text() if path.exists() else "no error"
