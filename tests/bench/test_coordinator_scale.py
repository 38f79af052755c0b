"""The simulation of a coordinator with many workers runs, with tiny sizes, in this process."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.coordinator_scale import Cluster, Shape, measure_run, run, wire_bytes, write_input


def test_all_lines_are_answered_by_the_simulated_engines(tmp_path: Path) -> None:
    shape = Shape(num_workers=20, num_lines=300, slots=4, mean_tokens=3)
    record = measure_run(shape, write_input(tmp_path, shape.num_lines))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(answer["id"] for answer in answers) == list(range(300))
    assert record["lines_per_second"] > 0 and record["coordinator_cpu_us_per_line"] > 0


def test_lines_of_an_engine_that_dies_are_submitted_elsewhere(tmp_path: Path) -> None:
    """Answers take far longer than the time of the death, so the engine has lines when it dies."""
    shape = Shape(
        num_workers=4, num_lines=60, slots=4, mean_tokens=20, step_s=0.01, deaths=1, death_after_s=0.05, start_s=0.0
    )
    cluster = Cluster(shape)
    run(shape, write_input(tmp_path, shape.num_lines), cluster)
    assert cluster.num_died == 1 and not cluster.lost_at
    assert cluster.num_submitted >= shape.num_lines + len(cluster.waits_s)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == shape.num_lines


def test_a_line_costs_four_bytes_a_token_on_the_wire() -> None:
    small, large = wire_bytes(100, 200), wire_bytes(1100, 1200)
    assert 4000 <= large["bytes_out"] - small["bytes_out"] <= 4010
    assert 4000 <= large["bytes_back"] - small["bytes_back"] <= 4010
