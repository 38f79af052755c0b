"""Jobs in separate processes: engines that die, alone or with the process; full disks that get space; deadlines."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from headrace.jobs.spec import job_directory
from headrace.jobs.store.job_view import view_job
from tests.jobs.crash.forge import Forge
from tests.jobs.crash.scene import Scene, committed_lines, final_lines, make_lines
from tests.jobs.crash.torture import torture

pytestmark = pytest.mark.crash


def lines(num_lines: int) -> list[str]:
    return [json.dumps({"prompt": f"line {number}", "max_tokens": 3 + number % 5}) for number in range(num_lines)]


def poison_lines(scene: Scene) -> list[int]:
    return sorted(index for index, line in committed_lines(scene.output).items() if b'"poison_request"' in line)


@pytest.mark.parametrize("index", [0, 17, 39])
def test_a_line_that_kills_the_whole_process_is_found_by_repeating_the_command(
    forge: Forge, tmp_path: Path, index: int
) -> None:
    scene = Scene(forge, tmp_path / "scene", lines(40), poison=(f"line {index}",), poison_kills=True)
    scene.finish()
    assert poison_lines(scene) == [index]
    assert 4 <= scene.ends["killed"] <= 12
    failures = view_job(job_directory(scene.order.output)).as_json()["trouble"]
    assert failures["deaths"]["process"] == scene.ends["killed"]


def test_a_search_that_is_killed_continues_where_it_was(forge: Forge, tmp_path: Path) -> None:
    """Each run is killed after some steps, also within trials: enough steps for one line alone to end."""
    scene = Scene(forge, tmp_path / "scene", lines(40), poison=("line 17",))
    for _ in range(4):
        assert scene.run(kill_at_step=10).was_killed
    scene.finish()
    assert poison_lines(scene) == [17]


def test_lines_of_a_job_that_is_killed_for_other_reasons_are_not_blamed(forge: Forge, tmp_path: Path) -> None:
    scene = Scene(forge, tmp_path / "scene", lines(30))
    for _ in range(6):
        assert scene.run(kill_at_step=4).was_killed
    scene.finish()
    assert poison_lines(scene) == []


@pytest.mark.parametrize("max_file_bytes", [2_500, 6_000, 12_000])
def test_a_full_disk_that_gets_space_does_not_end_the_job(forge: Forge, tmp_path: Path, max_file_bytes: int) -> None:
    scene = Scene(forge, tmp_path / "scene", make_lines(Random(1), 120))
    assert scene.run(max_file_bytes=max_file_bytes, room_after=5).code == 3
    scene.finish()


@pytest.mark.parametrize("kill_at_call", [None, 3_000])
def test_expired_lines_are_repeated_by_a_later_run(forge: Forge, tmp_path: Path, kill_at_call: int | None) -> None:
    scene = Scene(forge, tmp_path / "scene", make_lines(Random(1), 60))
    scene.run(expires_at_step=8, kill_at_call=kill_at_call)
    if kill_at_call is None:
        assert 0 < len(final_lines(scene.output)) < len(committed_lines(scene.output))
    scene.finish()
    assert final_lines(scene.output) == committed_lines(scene.output)


@pytest.mark.parametrize("seed", range(6))
def test_a_job_survives_random_failures(forge: Forge, tmp_path: Path, seed: int) -> None:
    assert torture(forge, 20_000 + seed, tmp_path / "scene")["runs"] >= 2
