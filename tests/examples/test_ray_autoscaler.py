"""examples/ray_autoscaler.py on a real Ray of this machine, with servers that have no model (make ray-test)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'headrace[ray]'")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # ray's own
]

ROOT = Path(__file__).parents[2]
MAX_WAIT_S = 120.0


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    """The module, which Ray's workers can import too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "examples"), str(ROOT / "src")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(str(ROOT / "examples"))
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        import ray_autoscaler

        yield ray_autoscaler
        ray.shutdown()


class Scene:
    """A policy, and a router that says what the test wants."""

    def __init__(self, example: Any, file: Path) -> None:
        self.file = file
        self.desired: int | None = 0
        command = [sys.executable, str(Path(__file__).with_name("fake_server.py"))]
        self.policy = example.Policy(command, file, router="http://router", num_gpus=0, num_cpus=1)
        self._page_of = example.page_of

    def page_of(self, address: str, path: str) -> str | None:
        if address != "http://router":
            return self._page_of(address, path)  # type: ignore[no-any-return]
        return None if self.desired is None else f"headrace:desired_replicas {float(self.desired)}\n"

    @property
    def addresses(self) -> list[str]:
        return self.file.read_text().split() if self.file.exists() else []

    def pid_of(self, address: str) -> int:
        return int(self._page_of(address, "/ready"))

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + MAX_WAIT_S
        while not is_so():
            assert time.monotonic() < deadline, "waited too long"
            self.policy.step()
            time.sleep(0.05)


@pytest.fixture
def scene(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(example, tmp_path / "replicas.txt")
    monkeypatch.setattr(example, "page_of", made.page_of)
    yield made
    made.policy.close()


def test_the_number_of_servers_follows_the_router(scene: Scene) -> None:
    scene.desired = 2
    scene.until(lambda: len(scene.addresses) == 2)
    kept, stopped = scene.addresses
    pid = scene.pid_of(stopped)

    scene.desired = None  # the router does not answer
    scene.policy.step()
    assert scene.addresses == [kept, stopped]

    scene.desired = 1
    scene.until(lambda: scene.addresses == [kept])
    scene.until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert scene.pid_of(kept)


def test_a_server_that_has_died_is_replaced(scene: Scene) -> None:
    scene.desired = 1
    scene.until(lambda: len(scene.addresses) == 1)
    (first,) = scene.addresses
    os.kill(scene.pid_of(first), signal.SIGKILL)
    scene.until(lambda: len(scene.addresses) == 1 and scene.addresses != [first])
    assert scene.pid_of(scene.addresses[0])
