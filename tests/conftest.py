"""What the markers mean, whose names are registered in pyproject.toml, and the small model that several tests run."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

# Beside other workers of pytest-xdist, OpenMP gets a share of the cores, and its threads sleep while they wait: threads
# that spin would take the time of another worker. An engine sets its own number of threads, as it does for a user.
NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if NUM_WORKERS > 1:  # read by OpenMP when torch is imported
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // NUM_WORKERS)))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch  # noqa: E402

SEES_GPU = torch.cuda.is_available()
if not SEES_GPU:
    # Triton asks when a kernel, or Triton itself, is imported: before any test is.
    os.environ["TRITON_INTERPRET"] = "1"


def load_hypothesis_profile() -> None:
    """No test fails because the machine is slow: examples have no time limit. The rest is as in the current profile,
    which in CI is Hypothesis's own `ci`: the same examples in each run.
    """
    current = hypothesis.settings()
    hypothesis.settings.register_profile(
        "headrace",
        parent=current,
        deadline=None,
        suppress_health_check=[*current.suppress_health_check, hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("headrace")


load_hypothesis_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` or `interpreted` is skipped, with the reason, where it cannot run."""
    for item in items:
        if item.get_closest_marker("gpu") and not SEES_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))
        if item.get_closest_marker("interpreted"):
            if SEES_GPU:
                item.add_marker(pytest.mark.skip(reason="with a GPU, kernels are compiled: make gpu-test"))
            elif sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="Triton is for Linux only"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture. A test's random numbers do not depend on the tests before it, which differ between workers.
    The first worker that needs the default model fetches it, while the others wait."""
    torch.manual_seed(0)
    if item.get_closest_marker("embedded"):
        from headrace.models.sources import locate

        with (Path(tempfile.gettempdir()) / f"headrace-tests-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locate("smollm2")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, on disk."""
    from tests.engine.tiny import save_model

    directory = tmp_path_factory.mktemp("tiny-llama")
    save_model(directory)
    return directory
