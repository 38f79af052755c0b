"""Tiers below the KV cache of a GPU: blocks come back as they were, whatever is in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.kernels.layout import LayerCache
from headrace.sched import SchedulerStats
from headrace.steps import BlockTransfers
from tests.engine.tiny import MIXTURES, SHAPE, save_model
from tests.sched.trust import trust_disk

pytestmark = pytest.mark.gpu

LARGE: dict[str, Any] = {"num_gpu_blocks_override": 800}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 60, "kv_offload_gib": 0.01}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
MAX_ERROR = 0.1  # of a log-probability, as `test_gpu_engine.py` finds between batches of different sizes
MIN_SHARE = 0.9  # of answers within it: in a mixture, rounding sends a token to another expert now and then


@pytest.fixture(autouse=True)
def trusted_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    trust_disk(monkeypatch)


def transfers(out: dict[int, int], back: dict[int, int], *, is_urgent: bool = False) -> BlockTransfers:
    """Copies block -> place, and place -> block."""
    arrays = [np.array(list(numbers), np.int64) for numbers in (out, out.values(), back, back.values())]
    return BlockTransfers(*arrays, is_urgent=is_urgent)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies_are_made_in_the_order_of_the_plans_without_the_host(dtype: torch.dtype) -> None:
    from headrace.runner.gpu.gpu_host_blocks import GpuHostBlocks

    device = torch.device("cuda")
    sides = [torch.randn(12, 2, 16, 64, device=device).to(dtype) for _ in range(8)]
    layers = [LayerCache(keys, values) for keys, values in zip(sides[::2], sides[1::2], strict=True)]
    host = GpuHostBlocks(layers, 4, device)
    assert host.memory.shape == (4, sum(side[0].nbytes for side in sides))
    kept = [side[3].clone() for side in sides]
    host.begin(0, transfers({3: 1}, {}))
    torch.cuda._sleep(20_000_000)  # a step that is longer than the copies
    host.begin(1, None)
    for side in sides:  # the step of plan 1 may overwrite what plan 0 copied out
        side[3].fill_(1.0)
    host.begin(2, transfers({}, {1: 7}, is_urgent=True))
    for side, old in zip(sides, kept, strict=True):
        assert torch.equal(side[7].view(torch.uint8), old.view(torch.uint8))
    assert host.wait(2, 10.0) and not host.wait(3, 0.01)
    torch.cuda.synchronize()
    host.close()


def answers(model: Path, **settings: Any) -> tuple[list[list[int]], list[float], SchedulerStats]:
    rng = random.Random(1)
    prefixes = [[rng.randrange(1, SHAPE["vocab_size"]) for _ in range(160)] for _ in range(8)]
    rounds = [[[*prefix, *(rng.randrange(1, 300) for _ in range(n + 1))] for prefix in prefixes] for n in range(3)]
    with LLM(str(model), max_num_seqs=4, max_model_len=256, max_num_batched_tokens=256, **settings) as llm:
        found = [each.outputs[0] for prompts in rounds for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
        first = [answer.logprobs[0].logprob for answer in found if answer.logprobs]
        return [list(answer.token_ids) for answer in found], first, llm.stats.scheduler


def share_of_near(ours: list[float], theirs: list[float]) -> float:
    return sum(abs(a - b) <= MAX_ERROR for a, b in zip(ours, theirs, strict=True)) / len(theirs)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "gemma3"])
def test_a_prefix_workload_larger_than_the_cache_keeps_its_hits_and_its_answers(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    wanted, probabilities, _ = answers(tmp_path, **LARGE)
    for settings in (SMALL, {**SMALL, "kv_offload_path": str(tmp_path / "kv")}):
        found, own, stats = answers(tmp_path, **settings)
        assert stats.num_tier_hit_tokens >= 8 * 160
        assert share_of_near(own, probabilities) >= (MIN_SHARE if family in MIXTURES else 1.0)
        assert sum(one[0] == other[0] for one, other in zip(found, wanted, strict=True)) >= 0.9 * len(wanted)
    _, own, stats = answers(tmp_path, **SMALL, kv_offload_path=str(tmp_path / "kv"))
    assert stats.tiers.num_disk_hits >= 8 * 10
    assert share_of_near(own, probabilities) >= (MIN_SHARE if family in MIXTURES else 1.0)


def test_an_eight_bit_cache_is_kept_too(tmp_path: Path) -> None:
    save_model(tmp_path)
    _, probabilities, _ = answers(tmp_path, **LARGE, kv_cache_dtype="fp8")
    _, own, stats = answers(tmp_path, **SMALL, kv_cache_dtype="fp8")
    assert stats.num_tier_hit_tokens >= 8 * 160
    assert own == pytest.approx(probabilities, abs=MAX_ERROR)
