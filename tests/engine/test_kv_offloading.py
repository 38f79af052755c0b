"""Tiers below the KV cache, end to end: answers are those of an engine that never evicts anything."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.engine.fake_settings import fake_settings
from headrace.engine.kv_offloading import about_of
from headrace.engine.resolve import resolve, resolve_here
from headrace.errors import ConfigError
from headrace.hardware import read_facts
from headrace.models import open_checkpoint
from headrace.sched import SchedulerStats
from tests.engine.tiny import SHAPE, save_model
from tests.sched.trust import trust_disk

LARGE: dict[str, Any] = {"num_gpu_blocks_override": 400}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 36, "kv_offload_gib": 0.002}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
OPEN_ENDED = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(10**6,))


@pytest.fixture(autouse=True)
def trusted_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_disk(monkeypatch)


def rounds() -> list[list[list[int]]]:
    """Six prefixes of ten blocks, three times: more than the small cache holds. One call of `generate` would order
    them by prefix."""
    rng = random.Random(1)
    prefixes = [[rng.randrange(1, SHAPE["vocab_size"]) for _ in range(80)] for _ in range(6)]
    return [[[*prefix, *(rng.randrange(1, 300) for _ in range(n + 1))] for prefix in prefixes] for n in range(3)]


def answers(model: Path, *, params: SamplingParams = GREEDY, **settings: Any) -> tuple[list[list[int]], SchedulerStats]:
    with LLM(
        str(model),
        max_num_seqs=4,
        max_model_len=176,
        block_size=8,
        max_num_batched_tokens=100,
        num_threads=1,
        **settings,
    ) as llm:
        found = [output for prompts in rounds() for output in llm.generate(prompts, params, use_tqdm=False)]
        return [list(output.outputs[0].token_ids) for output in found], llm.stats.scheduler


def test_blocks_of_an_fp8_cache_with_other_keys_are_not_read(tiny_directory: Path) -> None:
    """Blocks that were written before keys were in e3m4 have the same type and size."""
    spec, config = open_checkpoint(str(tiny_directory)).spec, EngineConfig(model=str(tiny_directory))
    about = {
        kv_dtype: about_of(fake_settings(kv_dtype=kv_dtype), config, spec, tiny_directory, 4096)
        for kv_dtype in ("float32", "float8_e4m3fn")
    }
    assert "e3m4" in str(about["float8_e4m3fn"]["keys"])
    assert "keys" not in about["float32"]


@pytest.fixture(scope="module")
def expected(tiny_directory: Path) -> list[list[int]]:
    return answers(tiny_directory, **LARGE)[0]


def test_a_prefix_workload_larger_than_the_cache_keeps_its_hits_and_its_answers(
    tiny_directory: Path, expected: list[list[int]]
) -> None:
    plain = {**SMALL, "kv_offload_gib": None}
    without, lost = answers(tiny_directory, **plain)
    found, kept = answers(tiny_directory, **SMALL)
    assert without == found == expected
    assert lost.num_prefix_hit_tokens == 0
    assert kept.num_prefix_hit_tokens == kept.num_tier_hit_tokens == 12 * 80
    assert kept.tiers.num_loaded == 12 * 10


@pytest.mark.parametrize("kv_cache_dtype", ["float16", "fp8"])
def test_blocks_of_narrower_caches_come_back_as_they_were(
    tiny_directory: Path, tmp_path: Path, kv_cache_dtype: str
) -> None:
    wanted, _ = answers(tiny_directory, **LARGE, kv_cache_dtype=kv_cache_dtype)
    settings = {**SMALL, "kv_cache_dtype": kv_cache_dtype, "kv_offload_path": str(tmp_path / "kv")}
    for _ in range(2):
        found, stats = answers(tiny_directory, **settings)
        assert found == wanted
        assert stats.num_tier_hit_tokens > 0
    assert stats.tiers.num_disk_hits > 0


def test_prefixes_survive_a_restart_on_disk(tiny_directory: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    settings = {**SMALL, "kv_offload_path": str(tmp_path / "kv")}
    assert answers(tiny_directory, **settings)[0] == expected
    found, stats = answers(tiny_directory, **settings)
    assert found == expected
    assert stats.num_prefix_hit_tokens == 18 * 80
    assert stats.tiers.num_disk_hits == 6 * 10


@pytest.mark.slow
def test_preempted_sequences_get_their_blocks_back(tiny_directory: Path) -> None:
    wanted, _ = answers(tiny_directory, params=OPEN_ENDED, **LARGE)
    found, stats = answers(tiny_directory, params=OPEN_ENDED, **SMALL)
    assert found == wanted
    assert stats.num_preemptions > 0 and stats.tiers.num_loaded > stats.num_tier_hit_tokens // 8


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "gemma3", "gemma3n", "gpt_oss"])
def test_latents_windows_and_shared_layers_are_kept_too(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    wanted, _ = answers(tmp_path, **LARGE)
    found, stats = answers(tmp_path, **SMALL, kv_offload_path=str(tmp_path / "kv"))
    again, from_disk = answers(tmp_path, **SMALL, kv_offload_path=str(tmp_path / "kv"))
    assert found == again == wanted
    assert stats.num_tier_hit_tokens > 0 and from_disk.tiers.num_disk_hits > 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_process_leaves_what_it_had_evicted(
    tiny_directory: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    settings = {**SMALL, "kv_offload_path": str(tmp_path / "kv")}
    program = f"""
import os, pathlib, signal
from tests.engine import test_kv_offloading
from headrace.engine.core import EngineCore
EngineCore.close = lambda self: (self._disk.flush(60), os.kill(os.getpid(), signal.SIGKILL))
test_kv_offloading.answers(pathlib.Path({str(tiny_directory)!r}), **{settings!r})
"""
    killed = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    found, stats = answers(tiny_directory, **settings)
    assert found == expected
    assert stats.tiers.num_disk_hits > 0


@pytest.mark.slow
def test_damaged_files_cost_hits_and_no_answer(
    tiny_directory: Path, tmp_path: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {**SMALL, "kv_offload_path": str(tmp_path)}
    answers(tiny_directory, **settings)
    files = sorted(tmp_path.rglob("*.kv"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[100 + number] ^= 0xFF
        file.write_bytes(content[: None if number % 2 else 300])
    found, stats = answers(tiny_directory, **settings)
    assert found == expected
    assert stats.tiers.num_disk_hits == 0 and stats.tiers.num_unreadable > 0
    assert sum("KV block on disk was dropped" in record.message for record in caplog.records) == 1


# ---- settings


def resolved(model: Path, **settings: Any) -> Any:
    config = EngineConfig(model=str(model), device="cpu", **settings)
    return resolve_here(config, open_checkpoint(str(model)).spec, read_facts())


def test_sizes_are_chosen_with_their_reasons(tiny_directory: Path) -> None:
    settings = resolved(tiny_directory, num_gpu_blocks_override=64, kv_offload_path="/x")
    reasons = {choice.name: (choice.value, choice.reason) for choice in settings.choices}
    assert reasons["kv_offload_gib"][0] == "4" and "on their way" in reasons["kv_offload_gib"][1]
    assert reasons["kv_offload_disk_gib"][0] == "64" and "the default" in reasons["kv_offload_disk_gib"][1]
    assert settings.limits.num_host_blocks == settings.num_host_blocks == (4 << 30) // (3 * 2 * 2 * 16 * 4 * 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_offload_gib": 1, "enable_prefix_caching": False}, "enable_prefix_caching is off; leave it out"),
        ({"kv_offload_gib": 1e-6}, "holds 0 blocks of 0.0000 GiB; give"),
        ({"kv_offload_gib": 1e6}, "is more than the .* GiB of host memory that are free"),
        ({"kv_offload_gib": -1}, "kv_offload_gib must be a number of GiB, got -1"),
        ({"kv_offload_disk_gib": 1}, "limits the size of kv_offload_path, which is not set"),
        ({"kv_offload_path": "/x", "kv_offload_gib": 0}, "needs a size above 0"),
        ({"kv_offload_path": ""}, "must be a directory, got ''"),
        ({"kv_offload_path": "/x", "tensor_parallel_size": 2}, "not supported with tensor_parallel_size"),
        ({"kv_offload_gib": 1, "enable_lora": True}, "not supported with enable_lora"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], message: str, tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(tiny_directory, num_gpu_blocks_override=64, **given)


def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "lfm2")
    config = EngineConfig(model=str(tmp_path), device="cpu", kv_offload_gib=1)
    with pytest.raises(ConfigError, match="layers of the model have a recurrent state, so none are cached"):
        resolve(config, open_checkpoint(str(tmp_path)).spec, read_facts())


def test_nothing_is_offloaded_by_default(tiny_directory: Path) -> None:
    assert resolved(tiny_directory).num_host_blocks == 0
    assert resolved(tiny_directory, kv_offload_gib=0).num_host_blocks == 0
