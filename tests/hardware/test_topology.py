"""Cores, NUMA nodes and limits, read from fake trees of several machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.hardware import read_facts
from headrace.hardware.cgroups import CgroupLimits, MemoryLimit, read_limits
from headrace.hardware.cpu_list import cpu_list, parse_cpu_list
from headrace.hardware.gpu_topology import read_gpu_topology
from headrace.hardware.topology import Core, read_topology
from tests.hardware import machines
from tests.hardware.machines import GIB, FakeNvml


def test_siblings_share_a_core_and_nodes_have_their_memory(tmp_path: Path) -> None:
    topology = read_topology(machines.two_sockets_with_smt(tmp_path))
    assert len(topology.cores) == 16 and len(topology.cpus) == 32
    assert topology.cores[0] == Core((0, 16), socket=0, node=0)
    assert topology.cores[8] == Core((8, 24), socket=1, node=1)
    assert [node.total_bytes for node in topology.nodes] == [64 * GIB, 64 * GIB]
    assert topology.describe() == "16 cores of 2 sockets, 32 logical CPUs, 2 NUMA nodes"


def test_the_affinity_mask_leaves_only_its_cores(tmp_path: Path) -> None:
    topology = read_topology(machines.two_sockets_with_smt(tmp_path), frozenset({2, 18, 9}))
    assert topology.cores == (Core((2, 18), 0, 0), Core((9,), 1, 1))


def test_a_quota_above_this_process_counts(tmp_path: Path) -> None:
    topology = read_topology(machines.container_with_a_quota(tmp_path))
    assert topology.limits.cpu_quota == 1.5
    assert len(topology.cores) == 8
    assert topology.describe().endswith("a quota of 1.5 CPUs")


def test_files_that_were_read_once_do_not_count_as_used_memory(tmp_path: Path) -> None:
    limits = read_limits(machines.container_with_a_quota(tmp_path))
    assert limits.memory == MemoryLimit(4 * GIB, GIB)
    facts = read_facts(tmp_path)
    assert facts.total_memory == 4 * GIB and facts.free_memory <= 3 * GIB
    assert facts.num_cores == 2


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    limits = read_limits(machines.cgroup_v1(tmp_path))
    assert limits == CgroupLimits(4.0, frozenset(range(8)), MemoryLimit(2 * GIB, GIB))


def test_a_container_that_sees_the_hosts_path_uses_what_is_mounted(tmp_path: Path) -> None:
    machines.write(tmp_path, machines.cpus_of(1, 4))
    machines.write(tmp_path, {"proc/self/cgroup": "0::/../host/path", "sys/fs/cgroup/cpu.max": "200000 100000"})
    assert read_limits(tmp_path).cpu_quota == 2.0


def test_a_cpuset_may_have_holes(tmp_path: Path) -> None:
    topology = read_topology(machines.cpuset_with_holes(tmp_path))
    assert topology.cpus == {1, 3, 4, 5, 17}
    assert topology.cores[0].cpus == (1, 17) and len(topology.cores) == 4


def test_a_machine_without_topology_has_one_core_per_cpu(tmp_path: Path) -> None:
    topology = read_topology(machines.vm_without_topology(tmp_path))
    assert [core.cpus for core in topology.cores] == [(0,), (1,), (2,), (3,)]
    assert not topology.is_known and topology.nodes == ()


@pytest.mark.parametrize("text", ["", "garbage", "-1", "5-2", "max", "9" * 40, "0-99999999", "\x00"])
def test_wrong_files_are_as_good_as_missing(tmp_path: Path, text: str) -> None:
    for name in [path.relative_to(tmp_path) for path in machines.cgroup_v1(tmp_path).rglob("*") if path.is_file()]:
        machines.write(tmp_path, {str(name): text})
    topology = read_topology(tmp_path, frozenset({0, 1}))
    assert topology.cpus == {0, 1}
    assert topology.limits.memory is None and topology.limits.cpus is None


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert topology.cpus <= os.sched_getaffinity(0) and topology.cores
    assert read_facts().free_memory > 0


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8,10-11", "1,3-5,17"])
def test_lists_of_cpus_are_read_and_written(text: str) -> None:
    assert cpu_list(parse_cpu_list(text)) == text


# ---- GPUs


def test_gpus_on_switches_are_all_connected(tmp_path: Path) -> None:
    root, nvml = machines.eight_gpus_with_nvswitch(tmp_path)
    topology = read_gpu_topology(root, nvml)
    assert topology is not None and nvml.num_shutdowns == 1
    assert topology.describe() == "8 GPUs: all pairs by nvswitch"
    assert [gpu.node for gpu in topology.gpus] == [0] * 4 + [1] * 4
    assert topology.gpus[7].local_cpus == frozenset(range(32, 64))
    assert topology.gpus[0].num_nvlinks == 18


def test_gpus_without_nvlink_are_told_apart_by_their_pcie_roots(tmp_path: Path) -> None:
    topology = read_gpu_topology(*machines.four_gpus_on_two_roots(tmp_path))
    assert topology is not None
    assert (topology.links[0, 1], topology.links[2, 3], topology.links[0, 3]) == ("pcie switch", "pcie root", "system")
    assert [gpu.node for gpu in topology.gpus] == [0, 0, 1, 1]
    assert topology.describe() == "4 GPUs: 1 pairs by pcie switch, 4 pairs by system, 1 pairs by pcie root"


def test_a_bridge_of_nvlink_connects_two_gpus(tmp_path: Path) -> None:
    nvml = FakeNvml(["00000000:3B:00.0", "00000000:5E:00.0"], links={0: ["00000000:5E:00.0"] * 4})
    topology = read_gpu_topology(tmp_path, nvml)
    assert topology is not None and topology.links[0, 1] == "nvlink"
    assert topology.gpus[0].node is None  # sysfs does not have it


def test_without_a_driver_there_is_no_topology(tmp_path: Path) -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise machines.NVMLError("Driver Not Loaded")

    assert read_gpu_topology(tmp_path, Broken([])) is None
