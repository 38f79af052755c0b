"""Jobs in processes of their own whose engine dies, with or without them; disks that have room again; deadlines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from headrace.jobs.spec import job_directory
from headrace.jobs.store.job_view import view_job
from tests.jobs.crash.forge import Forge
from tests.jobs.crash.scene import Scene, committed_rows, final_rows, make_lines
from tests.jobs.crash.torture import torture


@pytest.fixture(scope="module")
def forge() -> Iterator[Forge]:
    with Forge() as forge:
        yield forge


def lines(num_lines: int) -> list[str]:
    return [json.dumps({"prompt": f"line {number}", "max_tokens": 3 + number % 5}) for number in range(num_lines)]


def poison_rows(scene: Scene) -> list[int]:
    return sorted(index for index, row in committed_rows(scene.output).items() if b'"poison_request"' in row)


@pytest.mark.parametrize("row", [0, 17, 39])
def test_a_row_that_kills_the_whole_process_is_found_by_running_the_same_command(
    forge: Forge, tmp_path: Path, row: int
) -> None:
    scene = Scene(forge, tmp_path / "scene", lines(40), poison=(f"line {row}",), poison_kills=True)
    scene.finish()
    assert poison_rows(scene) == [row]
    assert 4 <= scene.ends["killed"] <= 12
    trouble = view_job(job_directory(scene.order.output)).as_json()["trouble"]
    assert trouble["deaths"]["process"] == scene.ends["killed"]


def test_a_search_that_is_killed_goes_on_where_it_was(forge: Forge, tmp_path: Path) -> None:
    """Each run is killed after some steps, in the middle of trials too: enough for one row alone to end."""
    scene = Scene(forge, tmp_path / "scene", lines(40), poison=("line 17",))
    for _ in range(4):
        assert scene.run(kill_at_step=10).was_killed
    scene.finish()
    assert poison_rows(scene) == [17]


def test_rows_of_a_job_that_is_killed_for_other_reasons_are_not_blamed(forge: Forge, tmp_path: Path) -> None:
    scene = Scene(forge, tmp_path / "scene", lines(30))
    for _ in range(6):
        assert scene.run(kill_at_step=4).was_killed
    scene.finish()
    assert poison_rows(scene) == []


@pytest.mark.parametrize("max_file_bytes", [2_500, 6_000, 12_000])
def test_a_disk_that_has_room_again_does_not_end_the_job(forge: Forge, tmp_path: Path, max_file_bytes: int) -> None:
    scene = Scene(forge, tmp_path / "scene", make_lines(Random(1), 120))
    assert scene.run(max_file_bytes=max_file_bytes, room_after=5).code == 3
    scene.finish()


@pytest.mark.parametrize("kill_at_call", [None, 3_000])
def test_expired_rows_are_done_by_a_later_run(forge: Forge, tmp_path: Path, kill_at_call: int | None) -> None:
    scene = Scene(forge, tmp_path / "scene", make_lines(Random(1), 60))
    scene.run(expires_at_step=8, kill_at_call=kill_at_call)
    if kill_at_call is None:
        assert 0 < len(final_rows(scene.output)) < len(committed_rows(scene.output))
    scene.finish()
    assert final_rows(scene.output) == committed_rows(scene.output)


@pytest.mark.parametrize("seed", range(6))
def test_a_job_survives_what_a_seed_brings(forge: Forge, tmp_path: Path, seed: int) -> None:
    assert torture(forge, 20_000 + seed, tmp_path / "scene")["runs"] >= 2
