"""How many threads an engine has and where they run, on several machines; and that they do run there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.settings import Settings
from headrace.engine.start import host_cpus
from headrace.engine.threads import Threads, choose_threads
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts, MachineFacts
from headrace.hardware.affinity import pinned_to
from headrace.hardware.gpu_topology import place_of
from headrace.hardware.topology import read_topology
from tests.hardware import machines
from tests.hardware.machines import GIB


def chosen(root: Path, *, weight_bytes: int = GIB, gpu: str | None = None, **config: object) -> Threads:
    topology = read_topology(root)
    facts = MachineFacts("a cpu", len(topology.cpus), 128 * GIB, 64 * GIB, topology=topology)
    if gpu is not None:
        facts = replace(facts, gpu=GpuFacts("a gpu", 80 * GIB, 79 * GIB, (9, 0), place=place_of(gpu, root)))
    given = EngineConfig(**config)  # type: ignore[arg-type]
    return choose_threads(given, facts, on_gpu=gpu is not None, weight_bytes=weight_bytes)


def test_a_cpu_engine_runs_on_the_physical_cores_of_one_socket(tmp_path: Path) -> None:
    threads = chosen(machines.two_sockets_with_smt(tmp_path))
    assert (threads.num_threads, threads.cpu_affinity) == (8, "0-7")  # node 0 has the most free memory
    assert "physical cores of socket 0" in threads.reason and "the other 8" in threads.reason


def test_it_goes_where_memory_is_free(tmp_path: Path) -> None:
    machines.two_sockets_with_smt(tmp_path)
    machines.write(tmp_path, {"sys/devices/system/node/node0/meminfo": "MemTotal: 67108864 kB\nMemFree: 1024 kB"})
    assert chosen(tmp_path).cpu_affinity == "8-15"


def test_weights_that_fit_no_socket_use_all_cores(tmp_path: Path) -> None:
    threads = chosen(machines.two_sockets_with_smt(tmp_path), weight_bytes=60 * GIB)
    assert (threads.num_threads, threads.cpu_affinity) == (16, "0-15")
    assert "the memory of all 2 sockets" in threads.reason


def test_siblings_stay_free_on_one_socket(tmp_path: Path) -> None:
    threads = chosen(machines.write(tmp_path, machines.cpus_of(1, 4, threads=2)))
    assert (threads.num_threads, threads.cpu_affinity) == (4, "0-3")
    assert "SMT siblings" in threads.reason


@pytest.mark.parametrize(
    ("machine", "num_threads", "reason"),
    [
        (machines.container_with_a_quota, 1, "quota of CPU time"),
        (machines.cgroup_v1, 4, "quota of CPU time"),
        (machines.vm_without_topology, 4, "does not tell its topology"),
        (lambda root: machines.write(root, machines.cpus_of(1, 4)), 4, "pinning would change nothing"),
    ],
)
def test_nothing_is_pinned_where_it_could_do_harm_or_nothing(
    tmp_path: Path, machine: Callable[[Path], Path], num_threads: int, reason: str
) -> None:
    threads = chosen(machine(tmp_path))
    assert (threads.num_threads, threads.cpu_affinity) == (num_threads, "none")
    assert reason in threads.affinity_reason


def test_a_cpuset_with_holes_gives_its_own_cores(tmp_path: Path) -> None:
    threads = chosen(machines.cpuset_with_holes(tmp_path))
    assert (threads.num_threads, threads.cpu_affinity) == (4, "1,3-5")


def test_what_the_user_sets_is_kept(tmp_path: Path) -> None:
    machines.two_sockets_with_smt(tmp_path)
    assert chosen(tmp_path, cpu_affinity="none").cpu_affinity == "none"
    assert chosen(tmp_path, cpu_affinity="none").num_threads == 8
    assert chosen(tmp_path, num_threads=12).cpu_affinity == "0-15"
    assert chosen(tmp_path, num_threads=20).cpu_affinity == "none"
    assert chosen(tmp_path, num_threads=4).cpu_affinity == "none"  # several engines may share the machine
    threads = chosen(tmp_path, cpu_affinity="4-7,20-23,8")
    assert (threads.num_threads, threads.cpu_affinity) == (5, "4-8,20-23")
    with pytest.raises(
        ConfigError, match="cpu_affinity='30-40' has CPUs that this process may not use: it may use 0-31"
    ):
        chosen(tmp_path, cpu_affinity="30-40")
    with pytest.raises(ConfigError, match="cpu_affinity must be 'auto', 'none' or a list of CPUs"):
        EngineConfig(cpu_affinity="0..7")


def test_the_host_threads_of_a_gpu_engine_run_on_its_node(tmp_path: Path) -> None:
    machines.four_gpus_on_two_roots(tmp_path)
    near_first = chosen(tmp_path, gpu="0000:3b:00.0")
    near_last = chosen(tmp_path, gpu="0000:d8:00.0")
    assert (near_first.cpu_affinity, near_last.cpu_affinity) == ("0-7,16-23", "8-15,24-31")
    assert (near_first.num_threads, near_first.reason) == (16, "CPUs near the GPU")
    assert "NUMA node 1, where the GPU is" in near_last.affinity_reason
    assert chosen(tmp_path, gpu="0000:00:00.0").affinity_reason.startswith("the system does not tell")
    assert chosen(tmp_path, gpu="0000:3b:00.0", cpu_affinity="none").cpu_affinity == "none"


def test_a_gpu_far_from_the_allowed_cpus_is_said(tmp_path: Path) -> None:
    root, _ = machines.eight_gpus_with_nvswitch(tmp_path)
    machines.write(root, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpuset.cpus.effective": "0-15"})
    far = chosen(root, gpu="0000:48:00.0")
    assert far.cpu_affinity == "none"
    assert far.affinity_reason == "this process may use CPUs 0-15, and those near the GPU are 32-63"
    assert chosen(root, gpu="0000:10:00.0").affinity_reason == "all CPUs that this process may use are near the GPU"


def test_a_mask_that_the_system_refuses_is_logged_and_the_start_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    with pinned_to({60_000}):
        assert os.sched_getaffinity(0) == before
    assert "threads are not pinned" in caplog.text


@pytest.fixture
def last_cpu() -> Iterator[int]:
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one CPU: there is nothing to choose")
    yield max(cpus)
    assert os.sched_getaffinity(0) == cpus  # the caller's own mask is as before


def test_model_threads_run_on_the_cpus_that_the_settings_name(tiny_directory: Path, last_cpu: int) -> None:
    everything = os.sched_getaffinity(0)
    with LLM(str(tiny_directory), cpu_affinity=str(last_cpu), max_num_seqs=2) as llm:
        llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)
        masks = {thread.name: os.sched_getaffinity(thread.native_id or 0) for thread in threading.enumerate()}
        assert next(mask for name, mask in masks.items() if name.startswith("headrace-device")) == {last_cpu}
        assert masks["headrace-engine"] == everything  # the scheduler's thread
        assert llm.settings.cpu_affinity == str(last_cpu)
        assert {choice.name: choice.reason for choice in llm.settings.choices}["cpu_affinity"] == "as set"


def test_only_a_gpu_engines_loop_is_pinned() -> None:
    from headrace.engine.fake_settings import fake_settings

    settings: Settings = fake_settings(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=64)
    pinned = replace(settings, cpu_affinity="0-3")
    assert host_cpus(replace(pinned, device="cuda")) == {0, 1, 2, 3}
    assert host_cpus(replace(pinned, device="cpu")) == frozenset()
