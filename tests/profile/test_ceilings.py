from __future__ import annotations

import msgspec
import pytest

from headrace.profile.ceilings import ceilings_of, work_of_step
from headrace.profile.trace import Ceilings
from tests.profile.builders import CEILINGS, MODEL, step


def test_gemms_count_each_token_and_the_head_only_for_sampled_ones() -> None:
    work = work_of_step(step(num_tokens=100, num_samples=3), MODEL)["gemm"]
    assert work.flops == 2 * 1_000_000 * 100 + 2 * 64 * 1000 * 3
    assert work.num_bytes == 2_000_000 + 128_000
    assert work_of_step(step(num_samples=0), MODEL)["gemm"].num_bytes == 2_000_000


def test_few_rows_read_copies_of_some_matrices() -> None:
    model = msgspec.structs.replace(MODEL, few_rows=16, few_weight_bytes=1_500_000, few_head_bytes=64_000)
    sizes = {(16, 16): 1_564_000, (17, 16): 2_064_000, (100, 17): 2_128_000, (16, 0): 1_500_000}
    for (num_tokens, num_samples), num_bytes in sizes.items():
        found = work_of_step(step(num_tokens=num_tokens, num_samples=num_samples), model)["gemm"]
        assert found.num_bytes == num_bytes


def test_decode_attention_reads_its_contexts() -> None:
    assert work_of_step(step(kv_tokens=1000.0), MODEL)["decode_attention"].num_bytes == 256_000


def test_small_steps_are_limited_by_the_weights_and_large_ones_by_their_flops() -> None:
    small = ceilings_of([step()], MODEL, CEILINGS)["gemm"]
    assert small.limit == "bandwidth"
    assert small.seconds == pytest.approx(2_128_000 / 1e12)
    large = ceilings_of([step(num_tokens=4096, pairs=1e6)], MODEL, CEILINGS)
    assert large["gemm"].limit == "GEMM rate"
    assert large["prefill_attention"].seconds == pytest.approx(4 * 2 * 64 * 1e6 / 1e14)


def test_a_mixture_of_steps_adds_the_ceiling_of_each() -> None:
    small, large = step(), step(num_tokens=4096)
    apart = [ceilings_of([one], MODEL, CEILINGS)["gemm"].seconds for one in (small, large)]
    assert ceilings_of([small, large], MODEL, CEILINGS)["gemm"].seconds == pytest.approx(sum(filter(None, apart)))


def test_where_attention_is_not_split_a_mixed_steps_decode_counts_as_prefill() -> None:
    steps = [step(num_tokens=108, num_seqs=9, pairs=5050.0), step()]
    split = ceilings_of(steps, MODEL, CEILINGS)
    joined = ceilings_of(steps, MODEL, CEILINGS, splits_attention=False)
    assert joined["decode_attention"].seconds == pytest.approx(800 * 256 / 1e12)
    assert split["decode_attention"].seconds == pytest.approx(2 * 800 * 256 / 1e12)
    added = (joined["prefill_attention"].seconds or 0) - (split["prefill_attention"].seconds or 0)
    assert added == pytest.approx(800 * 256 / 1e12)


def test_without_measured_ceilings_there_are_none() -> None:
    found = ceilings_of([step()], MODEL, Ceilings())
    assert found["gemm"].seconds is None
    assert found["decode_attention"].seconds is None


def test_parts_without_work_have_no_ceiling() -> None:
    assert "prefill_attention" not in ceilings_of([step(pairs=0.0)], MODEL, CEILINGS)
