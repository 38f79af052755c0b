"""How workers divide a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine import shares as engine_shares
from headrace.engine.fake_settings import fake_settings
from headrace.engine.settings import Choice
from headrace.engine.shares import shares_here, shares_of
from headrace.errors import ConfigError
from headrace.hardware.topology import read_topology
from headrace.jobs.spec import JobSpec
from tests.hardware.machines import container_with_a_quota, two_sockets_with_smt


def test_one_worker_gets_the_whole_machine() -> None:
    config = EngineConfig()
    (share,) = shares_of(config, 1, num_cores=8, gpus=("0", "1"))
    assert share.config is config
    assert (share.environment, share.reasons) == ({}, {})


@pytest.mark.parametrize("num_workers, threads", [(2, [4, 4]), (3, [3, 3, 2]), (16, [1] * 16)])
def test_cores_and_memory_of_a_cpu_are_divided(num_workers: int, threads: list[int]) -> None:
    shares = shares_of(EngineConfig(), num_workers, num_cores=8, gpus=())
    assert [share.config.num_threads for share in shares] == threads
    memory = [share.config.gpu_memory_utilization or 1.0 for share in shares]
    assert sum(memory) == pytest.approx(0.5)
    assert all(share.environment == {} for share in shares)


def test_workers_go_round_the_visible_gpus_and_share_the_memory_of_each() -> None:
    shares = shares_of(EngineConfig(), 5, num_cores=8, gpus=("2", "GPU-7f"))
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares] == ["2", "GPU-7f", "2", "GPU-7f", "2"]
    assert [share.num_sharing for share in shares] == [3, 2, 3, 2, 3]
    for gpu in ("2", "GPU-7f"):
        assert sum(s.config.gpu_memory_utilization or 1 for s in shares if s.gpu == gpu) == pytest.approx(0.92)


def test_a_worker_alone_on_its_gpu_keeps_the_share_of_the_user() -> None:
    shares = shares_of(EngineConfig(gpu_memory_utilization=0.8), 2, num_cores=2, gpus=("0", "1"))
    assert [share.config.gpu_memory_utilization for share in shares] == [0.8, 0.8]
    shares = shares_of(EngineConfig(gpu_memory_utilization=0.8), 2, num_cores=2, gpus=("0",))
    assert [share.config.gpu_memory_utilization for share in shares] == [0.4, 0.4]


def test_sizes_that_the_user_gives_are_of_each_worker() -> None:
    config = EngineConfig(num_threads=3, kv_cache_memory_bytes=1 << 20)
    shares = shares_of(config, 2, num_cores=4, gpus=())
    assert all(share.config == config for share in shares)
    assert "num_threads=3 for each of 2 workers is more than the 4 cores" in shares[0].warnings[0]


def test_divided_settings_say_so() -> None:
    settings = fake_settings(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_blocks=64,
        choices=(
            Choice("device", "cuda", "H200"),
            Choice("num_threads", "1", "as set"),
            Choice("num_blocks", "64", "1.00 GiB: 46% of 2 GiB"),
            Choice("dtype", "bfloat16", "as set"),
        ),
    )
    share = shares_of(EngineConfig(), 2, num_cores=2, gpus=("3",))[0]
    assert [choice.reason for choice in share.explained(settings).choices] == [
        "H200; GPU 3 of 1 visible ones, with 2 workers on it",
        "its part of 2 cores, which 2 workers share",
        "1.00 GiB: 46% of 2 GiB; 2 workers divide 92% of the GPU",
        "as set",
    ]


def test_a_number_of_workers_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be between 1 and 256, got 0"):
        JobSpec(input="-", output="-", workers=0)


def test_a_worker_gets_as_many_gpus_as_its_model_is_divided_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_shares, "visible_gpus", lambda: ("0", "1", "2", "3", "4"))
    shares = shares_here(EngineConfig(tensor_parallel_size=2), None)
    assert [share.environment for share in shares] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]


def test_workers_on_a_cpu_get_their_own_cores_of_one_numa_node(tmp_path: Path) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path))
    shares = shares_of(EngineConfig(), 4, num_cores=32, gpus=(), topology=topology)
    assert [share.config.cpu_affinity for share in shares] == ["0-3", "8-11", "4-7", "12-15"]
    assert [share.config.num_threads for share in shares] == [4] * 4
    assert shares[1].reasons["cpu_affinity"] == "its own physical cores, on NUMA node 1"
    uneven = shares_of(EngineConfig(), 3, num_cores=32, gpus=(), topology=topology)
    assert [share.config.cpu_affinity for share in uneven] == ["0-3", "8-15", "4-7"]


@pytest.mark.parametrize(
    "config, num_workers",
    [(EngineConfig(cpu_affinity="none"), 2), (EngineConfig(num_threads=2), 2), (EngineConfig(), 17)],
)
def test_cores_are_not_divided_if_the_user_says_so_or_there_are_too_few(
    tmp_path: Path, config: EngineConfig, num_workers: int
) -> None:
    topology = read_topology(two_sockets_with_smt(tmp_path))
    shares = shares_of(config, num_workers, num_cores=32, gpus=(), topology=topology)
    assert {share.config.cpu_affinity for share in shares} == {config.cpu_affinity}


def test_workers_in_a_container_with_a_quota_are_not_pinned(tmp_path: Path) -> None:
    topology = read_topology(container_with_a_quota(tmp_path, "600000 100000"))
    shares = shares_of(EngineConfig(), 2, num_cores=6, gpus=(), topology=topology)
    assert [(share.config.num_threads, share.config.cpu_affinity) for share in shares] == [(3, "auto")] * 2
