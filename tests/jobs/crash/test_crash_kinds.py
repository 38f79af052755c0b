"""Jobs over other formats than JSON lines, and over duplicate lines, killed and run again."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.jobs.crash.child import Order
from tests.jobs.crash.forge import Forge
from tests.jobs.crash.scene import Scene, committed_lines

pytestmark = pytest.mark.crash

NUM_ROWS = 40
ROWS = [{"number": str(number), "text": f"row {number},\n{'x' * (number % 7)}"} for number in range(NUM_ROWS)]


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["number", "text"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)


def read_csv(path: Path) -> list[Any]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_gzip(path: Path) -> list[Any]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def read_zstd(path: Path) -> list[Any]:
    data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    return [json.loads(line) for line in data.splitlines()]


def read_parquet(path: Path) -> list[Any]:
    return list(pq.read_table(path).to_pylist())


KINDS: dict[str, tuple[str, Callable[[Path], None], str, Callable[[Path], list[Any]]]] = {
    "csv to parquet": ("in.csv", write_csv, "out.parquet", read_parquet),
    "gzip to zstd": ("in.jsonl.gz", write_gzip, "out.jsonl.zst", read_zstd),
    "parquet to gzip": ("in.parquet", write_parquet, "out.jsonl.gz", read_gzip),
    "gzip to csv": ("in.jsonl.gz", write_gzip, "out.csv", read_csv),
}


@pytest.mark.parametrize("step", ["written:3", "write-half:2", "merge-half", "merged", "output-renamed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_any_format_resumes_after_a_kill(forge: Forge, tmp_path: Path, kind: str, step: str) -> None:
    name, write, output_name, read = KINDS[kind]
    write(tmp_path / name)
    (tmp_path / "job").mkdir()
    order = Order(
        input=str(tmp_path / name),
        output=str(tmp_path / "job" / output_name),
        template={"prompt": "Say {text}"},
        options={"defaults": {"max_tokens": 3}, "keep_order": True},
    )
    output = Path(order.output)
    assert forge.run(replace(order, crash_at=step)).was_killed
    assert output.exists() == (step == "output-renamed")
    before = committed_lines(output)
    assert len(before) > 0
    (order.notes / "submitted").unlink()
    assert forge.run(order).code == 0
    path = order.notes / "submitted"
    submitted = [int(line) for line in path.read_text().split()] if path.exists() else []
    assert sorted([*before, *submitted]) == list(range(NUM_ROWS)), "a line was computed twice or not at all"
    rows = read(output)
    assert [int(row["index"]) for row in rows] == list(range(NUM_ROWS)), "the order is not the input's"
    carried = [json.loads(row["input"]) if isinstance(row.get("input"), str) else row["input"] for row in rows]
    assert carried == [{"text": row["text"]} for row in ROWS]
    assert [row["number"] for row in rows] == [row["number"] for row in ROWS]


@pytest.mark.parametrize("step", ["appended:9", "write-half:1", "written:1", "written:2", "synced"])
def test_duplicates_are_each_there_once_after_a_kill(forge: Forge, tmp_path: Path, step: str) -> None:
    """Duplicates are committed with their own index, whether or not their original was committed."""
    lines = [{"prompt": f"{number % 5}", "max_tokens": 2 + number % 5, "seed": 3} for number in range(60)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({**line, "number": place}) + "\n" for place, line in enumerate(lines)))
    (tmp_path / "job").mkdir()
    order = Order(input=str(source), output=str(tmp_path / "job" / "out.jsonl"))
    assert forge.run(replace(order, crash_at=step)).was_killed
    before = committed_lines(Path(order.output))
    assert forge.run(order).code == 0
    after = committed_lines(Path(order.output))
    assert {index: after[index] for index in before} == before
    rows = [json.loads(line) for line in Path(order.output).read_text().splitlines()]
    assert sorted((row["index"], row["number"]) for row in rows) == [(index, index) for index in range(60)]
    assert len({(row["index"] % 5, row["text"]) for row in rows}) == 5


def batch_line(number: int) -> str:
    """Mostly lines of several requests to the engine; the result of each is committed once."""
    prompts = [f"{number} {part}" for part in range(1 + number % 4)]
    text: dict[str, Any] = {"prompt": f"line {number}", "max_tokens": 1 + number % 7}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": prompts},
        "/v1/completions": text if number % 3 else {**text, "prompt": prompts, "n": 1 + number % 2},
    }
    tool = {"type": "function", "function": {"name": "f"}}
    bodies["/v1/responses"] = {"input": f"line {number}", "max_output_tokens": 1 + number % 7, "user": "me"}
    bodies["/v1/chat/completions"] = {
        "messages": [{"role": "user", "content": f"line {number}"}],
        "max_tokens": 20 + number % 7,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    url = list(bodies)[number // 2 % len(bodies)]
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": bodies[url]})


@pytest.mark.parametrize(
    "failure",
    [
        *({"crash_at": step} for step in ("appended:5", "write-half:2", "written:2", "synced", "merge-half")),
        {"kill_at_step": 5},
        {"kill_at_step": 9, "prepares_in_process": True},
        {"term_at_step": 6},
        {"dies_at_steps": (4, 8)},
    ],
    ids=lambda failure: " ".join(f"{name} {value}" for name, value in failure.items()),
)
def test_lines_of_several_requests_are_committed_once(forge: Forge, tmp_path: Path, failure: dict[str, Any]) -> None:
    scene = Scene(forge, tmp_path / "scene", [batch_line(number) for number in range(48)])
    end = scene.run(**failure)
    assert end.was_killed or end.code in (0, 75)
    scene.finish()
