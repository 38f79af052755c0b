"""What the markers mean, whose names are registered in pyproject.toml, and the small model that several tests run."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests import seeds

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
# Tests start many small models once each: to find out which kernels a start needs takes longer than to compile them.
os.environ.setdefault("HEADRACE_COMPILE_PROCESSES", "0")


seeds.load_hypothesis_profile()
RUN_SEED = seeds.run_seed()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before Hypothesis reads its option."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(RUN_SEED)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, bool, bool]:
    """The modules and tests of a whole run are 800,000 objects that stay to its end. The collector would visit them
    while they are made, at each start of an engine and in each full collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> str:
    return f"{seeds.VARIABLE}={RUN_SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure names the command that repeats it."""
    report = yield
    if report.failed:
        report.sections.append(("Random seed", f"{seeds.VARIABLE}={RUN_SEED} pytest '{item.nodeid}'"))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `gpu` or `interpreted` is skipped, with the reason, where it cannot run."""
    for item in items:
        if item.get_closest_marker("gpu") and not SEES_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch sees none"))
        if item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA GPUs"))
        if item.get_closest_marker("interpreted"):
            if SEES_GPU:
                item.add_marker(pytest.mark.skip(reason="with a GPU, kernels are compiled: make gpu-test"))
            elif sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="Triton is for Linux only"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture. A fixture of the session gets the same random numbers, whichever test first needs it.
    The first worker that needs the default model fetches it, while the others wait."""
    seeds.seed_all(RUN_SEED)
    if item.get_closest_marker("embedded"):
        from headrace.models.sources import locate

        with (Path(tempfile.gettempdir()) / f"headrace-tests-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locate("smollm2")


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """A test's random numbers do not depend on the tests before it, which differ between workers."""
    seeds.seed_all(seeds.seed_of(request.node.nodeid))


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Each start and each death of an engine collects garbage, and would visit all that earlier tests have left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    """An engine in this process sets the number of torch's threads, on which sums of later tests would depend."""
    num_threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Holds our own lines only: a thread of a library that another test started may log at any time."""

    def is_ours(record: logging.LogRecord) -> bool:
        return record.name.partition(".")[0] == "headrace"

    caplog.handler.addFilter(is_ours)
    yield caplog
    caplog.handler.removeFilter(is_ours)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer, on disk."""
    from tests.engine.tiny import save_model

    directory = tmp_path_factory.mktemp("tiny-llama")
    save_model(directory)
    return directory
