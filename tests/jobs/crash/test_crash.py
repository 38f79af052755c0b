"""Jobs in separate processes that are killed, have no disk space, or run twice at once. At scale: `make torture`."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from time import sleep

import pytest

from headrace.jobs.crash_points import STEPS
from headrace.jobs.spec import job_directory
from headrace.jobs.store.job_view import view_job
from headrace.jobs.store.status_file import read_status
from tests.jobs.crash.child import MAX_IN_FLIGHT
from tests.jobs.crash.forge import Forge
from tests.jobs.crash.scene import Scene, committed_lines, make_lines
from tests.jobs.crash.torture import torture

pytestmark = pytest.mark.crash

PUBLISHING = STEPS[STEPS.index("input-ended") :]


@pytest.fixture
def scene(forge: Forge, tmp_path: Path) -> Scene:
    return Scene(forge, tmp_path / "scene", make_lines(Random(1), 60))


def wait_for(path: Path) -> None:
    for _ in range(60_000):
        if path.exists():
            return
        sleep(0.001)
    raise AssertionError(f"{path} never came")


@pytest.mark.parametrize("step", STEPS)
def test_a_job_killed_at_any_step_gives_the_same_output(scene: Scene, step: str) -> None:
    if step == "tail-cut":
        scene.run(crash_at="written:3")
    assert scene.run(crash_at=step).was_killed
    scene.finish()
    if step in PUBLISHING:
        assert not (scene.order.notes / "submitted").exists(), "the engine was started although only the merge was left"


@pytest.mark.parametrize("seed", range(6))
def test_a_job_survives_random_failures(forge: Forge, tmp_path: Path, seed: int) -> None:
    assert torture(forge, 10_000 + seed, tmp_path / "scene")["runs"] >= 2


def test_a_job_that_is_killed_repeatedly_makes_progress(scene: Scene) -> None:
    for _ in range(3):
        before = len(scene.committed)
        assert scene.run(crash_at="written:2").was_killed
        assert len(scene.committed) > before
    scene.finish()


def test_a_torn_last_record_is_cut_and_computed_again(scene: Scene) -> None:
    scene.run(crash_at="written:5")
    segment = scene.last_segment
    assert segment is not None
    last_len = len(segment.read_bytes().splitlines(keepends=True)[-1])
    kept = segment.parent.parent / "kept"
    shutil.copytree(segment.parent, kept)
    for num_bytes in (1, last_len // 2, last_len + 1):
        shutil.rmtree(segment.parent)
        scene.output.unlink(missing_ok=True)
        shutil.copytree(kept, segment.parent)
        scene.tear(num_bytes)
        scene.finish()


def test_a_full_disk_stops_the_job_which_can_be_resumed(scene: Scene) -> None:
    end = scene.run(max_file_bytes=9_000)
    assert end.code == 75
    assert "make room, then run the same command again" in (scene.order.notes / "error").read_text()
    assert scene.committed, "what fitted is kept"
    scene.finish()


def test_a_disk_that_is_full_at_the_merge_stops_the_job(scene: Scene) -> None:
    scene.run(crash_at="input-ended")
    num_bytes = sum(len(line) + 1 for line in scene.committed.values())
    assert scene.run(max_file_bytes=num_bytes - 1).code == 75
    assert not scene.output.exists()
    scene.finish()


@pytest.mark.parametrize("name", ["job", "job/out.jsonl.job"])
def test_a_directory_that_cannot_be_written_refuses_the_job_and_keeps_it(forge: Forge, name: str) -> None:
    with tempfile.TemporaryDirectory() as root:  # not pytest's, which other users cannot enter
        scene = Scene(forge, Path(root) / "scene", make_lines(Random(1), 30))
        scene.run(crash_at="written:5")
        for path in (Path(root), *Path(root).rglob("*")):
            path.chmod(0o777)
        place = Path(root) / "scene" / name
        place.chmod(0o555)
        for lock in place.glob("lock"):
            lock.chmod(0o444)
        assert scene.run(is_nobody=True).code == 1
        assert "cannot be written: " in (scene.order.notes / "error").read_text()
        assert scene.committed
        place.chmod(0o777)
        scene.finish()


def test_the_time_of_day_does_not_matter(scene: Scene) -> None:
    assert scene.run(has_wild_clock=True, crash_at="written:5").was_killed
    assert scene.run(has_wild_clock=True).code == 3
    scene.finish()


def test_a_second_process_is_refused_with_the_name_of_the_holder(forge: Forge, scene: Scene) -> None:
    held = replace(scene.order, hold_at_step=5)
    pid = forge.start(held)
    wait_for(held.notes / "held")
    assert view_job(job_directory(scene.order.output)).state == "running"
    second = replace(scene.order, options={"overwrite": True})  # not even with this
    assert forge.run(second).code == 1
    assert f"is running already: process {pid} on " in (second.notes / "error").read_text()
    (held.notes / "go").touch()
    assert forge.wait(pid).code == 3
    scene.finish()


def test_a_process_that_has_lost_its_job_writes_nothing_more(forge: Forge, scene: Scene) -> None:
    """As on a file system that loses locks: the lock file is removed while the first process is paused."""
    held = replace(scene.order, hold_at_step=5)
    pid = forge.start(held)
    wait_for(held.notes / "held")
    directory = job_directory(scene.order.output)
    (directory / "lock").unlink()
    assert forge.run(scene.order).code == 3
    published, lines = scene.output.read_bytes(), committed_lines(scene.output)
    (held.notes / "go").touch()
    assert forge.wait(pid).code == 1
    assert "another process has taken over the job" in (held.notes / "error").read_text()
    assert (scene.output.read_bytes(), committed_lines(scene.output)) == (published, lines)
    assert read_status(directory / "status.json").state == "finished", "written by a process that had lost the job"
    scene.finish()


def test_a_killed_job_is_interrupted_and_loses_only_lines_in_flight(scene: Scene) -> None:
    scene.run(kill_at_step=20)
    found = view_job(job_directory(scene.order.output))
    assert (found.state, found.committed.num_done) == ("interrupted", len(scene.committed))
    assert 0 < scene.num_redone <= MAX_IN_FLIGHT
