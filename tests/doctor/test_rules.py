"""Every rule, on both sides of its threshold."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.doctor.diagnosis import Diagnosis, diagnose
from headrace.doctor.evidence import ClientCost, Evidence
from headrace.doctor.findings import Finding
from headrace.doctor.rules import RULES
from headrace.plan.gpus import find_gpu
from headrace.plan.source import find_shape
from tests.doctor.builders import ON_H200, job, live, offline, online, planned


def found(evidence: Evidence, rule: str) -> Finding | None:
    return next((finding for finding in diagnose(evidence).findings if finding.rule == rule), None)


H100 = find_gpu("H100")
HELD: dict[str, Any] = {  # 4 sequences of 20 tokens, in a cache of 128 tokens for 12 slots
    "output_tokens": 400.0,
    "num_steps": 100.0,
    "tokens_per_step": 5.0,
    "prompt_len": 8.0,
    "output_len": 12.0,
    "settings": {"max_num_seqs": 12, "num_gpu_blocks": 32, "block_size": 4},
}
FEW_SLOTS: dict[str, Any] = {  # 3.5 of 4 slots busy, which need 80 of 4,096 tokens of cache
    "output_tokens": 350.0,
    "num_steps": 100.0,
    "tokens_per_step": 5.0,
    "prompt_len": 8.0,
    "output_len": 12.0,
    "is_on_cpu": True,
    "settings": {"max_num_seqs": 4, "num_gpu_blocks": 256, "block_size": 16},
}
CASES: dict[str, tuple[Evidence, Evidence]] = {  # rule: what triggers it, and what just does not
    "client": (online(client=ClientCost(cpu_share=0.81)), online(client=ClientCost(cpu_share=0.8))),
    "refusals": (live(num_refused=5.0, num_answered=495.0), live(num_refused=4.0, num_answered=496.0)),
    "disk": (
        job(limited_by_seconds={"disk": 3.0, "decode": 7.0}),
        job(limited_by_seconds={"disk": 2.9, "decode": 7.1}),
    ),
    "tokenizer": (
        job(limited_by_seconds={"reading": 3.0, "decode": 7.0}),
        job(limited_by_seconds={"reading": 2.9, "decode": 7.1}),
    ),
    "job-host": (
        job(limited_by_seconds={"host": 3.0, "decode": 7.0}),
        job(limited_by_seconds={"host": 2.9, "decode": 7.1}),
    ),
    "cache-evicting": (
        live(prompt_tokens=40_000.0, evicted_tokens=20_000.0, prefix_queried_tokens=40_000.0, prefix_hit_tokens=0.0),
        live(prompt_tokens=40_000.0, evicted_tokens=19_999.0, prefix_queried_tokens=40_000.0, prefix_hit_tokens=0.0),
    ),
    "front": (live(event_loop_lag_p95_s=0.1), live(event_loop_lag_p95_s=0.099)),
    "stalled": (
        live(output_tokens=0.0, prompt_tokens=0.0, num_running=1.0),
        live(output_tokens=0.0, prompt_tokens=0.0, num_running=0.0),
    ),
    "job-tail": (
        job(limited_by_seconds={"tail": 3.0, "decode": 7.0}),
        job(limited_by_seconds={"tail": 2.9, "decode": 7.1}),
    ),
    "queue": (
        live(engine="vllm", settings={"max_num_queued_reqs": None}),
        live(engine="vllm", settings={"max_num_queued_reqs": 1024}),
    ),
    "cache-preempting": (
        live(num_preemptions=9.0, recomputed_tokens=1_600.0),
        live(num_preemptions=9.0, recomputed_tokens=1_400.0),
    ),
    "cache-full": (live(kv_use=0.9, num_waiting=3.0), live(kv_use=0.89, num_waiting=3.0)),
    "offline-cache": (offline(**HELD, num_requests=24.0), offline(**HELD, num_requests=23.0)),
    "job-cache": (
        job(limited_by_seconds={"cache": 3.0, "decode": 7.0}),
        job(limited_by_seconds={"cache": 2.9, "decode": 7.1}),
    ),
    "slots-full": (
        live(num_running=244.0, num_waiting=9.0, kv_use=0.49),
        live(num_running=244.0, num_waiting=9.0, kv_use=0.5),
    ),
    "slots-recorded": (offline(**FEW_SLOTS, num_requests=8.0), offline(**FEW_SLOTS, num_requests=7.0)),
    "small-load": (live(num_running=63.0), live(num_running=64.0)),
    "host": (live(host_seconds=5.0, wait_seconds=5.0), live(host_seconds=4.9, wait_seconds=5.1)),
    "prefill": (
        live(prompt_tokens=150_000.0, tokens_per_step=4_096.0),
        live(prompt_tokens=150_000.0, tokens_per_step=4_095.0),
    ),
    "decode": (live(), live(prompt_tokens=150_000.0, tokens_per_step=4_096.0)),
    "stalls": (live(token_gap_p99_s=0.1), live(token_gap_p99_s=0.099)),
    "gpu-idle": (offline(gpu_utilization=0.84), offline(gpu_utilization=0.85)),
    "prefix-unused": (live(prefix_hit_tokens=999.0), live(prefix_hit_tokens=1_000.0)),
    "chunked-short": (
        live(longest_prompts=512.0, settings={"max_num_batched_tokens": 511}),
        live(longest_prompts=513.0, settings={"max_num_batched_tokens": 511}),
    ),
    "tensor-parallel": (
        live(engine="vllm", model=find_shape("qwen3-8b"), settings={"tensor_parallel_size": 2}),
        live(engine="vllm", model=find_shape("llama-3.3-70b"), settings={"tensor_parallel_size": 2}),
    ),
    "drafts": (
        live(draft_tokens=1_000.0, accepted_tokens=399.0),
        live(draft_tokens=1_000.0, accepted_tokens=400.0),
    ),
    "eager": (planned("vllm serve qwen3-8b --enforce-eager"), planned("vllm serve qwen3-8b")),
    "memory-low": (
        live(settings={"gpu_memory_utilization": 0.84}),
        live(settings={"gpu_memory_utilization": 0.85}),
    ),
    "memory-high": (
        live(settings={"gpu_memory_utilization": 0.96}),
        live(settings={"gpu_memory_utilization": 0.95}),
    ),
    "fit": (planned("vllm serve llama-3.3-70b", gpu=H100), planned("vllm serve qwen3-8b", gpu=H100)),
    "slots-over-cache": (
        planned("vllm serve qwen3-8b --max-num-seqs 512", gpu=H100),
        planned("vllm serve qwen3-8b --max-num-seqs 256", gpu=H100),
    ),
    "unknown-flag": (
        planned("vllm serve m --enable-prefix-cache"),
        planned("vllm serve m --enable-prefix-caching"),
    ),
    "impossible-value": (
        planned("vllm serve m --max-num-batched-tokens 0"),
        planned("vllm serve m --max-num-batched-tokens 1"),
    ),
    "contradiction": (
        planned("vllm serve m --gpu-memory-utilization 0.9 --gpu-memory-utilization 0.95"),
        planned("vllm serve m --gpu-memory-utilization 0.9 --gpu-memory-utilization 0.9"),
    ),
    "chunked-as-prefix": (
        planned("vllm serve m --enable-chunked-prefill  # prefix caching for shared prompts"),
        planned("vllm serve m --enable-chunked-prefill  # long prompts"),
    ),
    "large-budget": (
        planned("vllm serve m --max-model-len 4096 --max-num-batched-tokens 8192"),
        planned("vllm serve m --max-model-len 4096 --max-num-batched-tokens 8191"),
    ),
}


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({"num_requests": 400.0}, True),
        ({"num_requests": 400.0, "output_tokens": 190.0}, False),  # half of the slots are empty
        ({"num_requests": 400.0, "prompt_len": 600.0}, False),  # four sequences need more than half of the cache
        ({"num_requests": 400.0, "num_preemptions": 9.0, "recomputed_tokens": 1e5}, False),
    ],
)
def test_few_slots_of_an_offline_run_are_named_if_nothing_else_holds_it_back(
    changes: dict[str, Any], is_found: bool
) -> None:
    assert (found(offline(**{**FEW_SLOTS, **changes}), "slots-recorded") is not None) == is_found


def test_an_offline_run_is_not_advised_more_slots_than_it_has_requests_or_its_device_uses() -> None:
    few = found(offline(**FEW_SLOTS, num_requests=12.0), "slots-recorded")
    assert few is not None and few.advice[0].value == 12
    many = {"settings": {**FEW_SLOTS["settings"], "max_num_seqs": 128, "num_gpu_blocks": 65_536}}
    busy = {**FEW_SLOTS, "output_tokens": 12_000.0, "num_requests": 10_000.0}
    assert found(offline(**{**busy, **many}), "slots-recorded") is None


def test_few_slots_of_a_closed_loop_are_named() -> None:
    assert found(online(**FEW_SLOTS, num_in_flight=12.0), "slots-recorded") is not None
    assert found(online(**FEW_SLOTS, num_in_flight=7.0), "slots-recorded") is None
    assert found(online(**FEW_SLOTS, num_in_flight=None), "slots-recorded") is None


def test_every_rule_has_a_case() -> None:
    assert sorted(CASES) == sorted(rule.id for rule in RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_what_is_over_its_threshold(rule: str) -> None:
    finding = found(CASES[rule][0], rule)
    assert finding is not None
    assert finding.numbers and finding.why and finding.threshold
    assert finding.rule == rule


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_is_silent_below_its_threshold(rule: str) -> None:
    assert found(CASES[rule][1], rule) is None


def problems(evidence: Evidence) -> list[str]:
    return [finding.rule for finding in diagnose(evidence).problems]


def settings_advised(diagnosis: Diagnosis, rule: str) -> dict[str | None, Any]:
    finding = next(finding for finding in diagnosis.findings if finding.rule == rule)
    return {advice.setting: advice.value for advice in finding.advice}


# The cache.


def test_preemptions_are_judged_by_requests_where_tokens_are_not_counted() -> None:
    vllm = live(engine="vllm", recomputed_tokens=None, settings={"max_num_queued_reqs": 8})
    assert problems(Evidence(**{**vars(vllm), "num_preemptions": 4.0})) == ["cache-preempting"]
    assert problems(Evidence(**{**vars(vllm), "num_preemptions": 3.0})) == []


def test_a_preempting_cache_is_answered_with_as_many_slots_as_it_holds() -> None:
    """16,000 tokens of cache, sequences of 850: 16 of them at 90 %."""
    seen = live(num_preemptions=50.0, recomputed_tokens=20_000.0, settings={"num_gpu_blocks": 1000})
    advised = settings_advised(diagnose(seen), "cache-preempting")
    assert advised["max_num_seqs"] == 16
    assert advised["capacity_policy"] == "guaranteed_no_evict"
    assert advised["kv_cache_dtype"] == "fp8"


def test_an_fp8_cache_is_advised_on_a_cpu_too_by_what_it_saves_there() -> None:
    seen = live(num_preemptions=50.0, recomputed_tokens=20_000.0, is_on_cpu=True, settings={"cache_dtype": "float32"})
    finding = found(seen, "cache-preempting")
    assert finding is not None
    assert any("fp8 holds four times as many tokens" in advice.text for advice in finding.advice)


def test_the_gain_of_no_preemptions_is_the_work_done_twice() -> None:
    finding = found(live(num_preemptions=50.0, recomputed_tokens=37_500.0), "cache-preempting")
    assert finding is not None and finding.gain == pytest.approx(0.25)


def test_an_fp8_cache_is_not_advised_twice() -> None:
    seen = live(num_preemptions=50.0, recomputed_tokens=20_000.0, settings={"cache_dtype": "float8_e4m3fn"})
    assert "kv_cache_dtype" not in settings_advised(diagnose(seen), "cache-preempting")


def test_a_low_memory_share_is_a_problem_only_if_the_cache_is_full() -> None:
    low = {"gpu_memory_utilization": 0.7}
    relaxed = found(live(settings=low), "memory-low")
    assert relaxed is not None and relaxed.severity == "note"
    full = live(settings=low, num_preemptions=50.0, recomputed_tokens=20_000.0)
    assert problems(full) == ["cache-preempting", "memory-low"]


def test_memory_shares_of_a_cpu_are_not_judged() -> None:
    assert found(live(is_on_cpu=True, settings={"gpu_memory_utilization": 0.5}), "memory-low") is None


def test_a_queue_whose_limit_is_not_known_is_not_judged() -> None:
    diagnosis = diagnose(live(engine="vllm", num_waiting=500.0))
    assert "queue" in {each.rule for each in diagnosis.not_judged}
    assert found(live(engine="vllm", num_waiting=500.0), "queue") is None


def test_requests_that_wait_beside_free_slots_and_a_half_used_cache_wait_for_the_cache() -> None:
    held = {"num_running": 3.0, "num_waiting": 9.0, "kv_use": 0.75, "tokens_per_step": 4.0}
    tight = {"max_num_seqs": 12, "max_num_batched_tokens": 512}
    finding = found(live(**held, settings=tight), "cache-full")
    assert finding is not None and finding.limit == "cache"
    assert found(live(**{**held, "kv_use": 0.4}, settings=tight), "cache-full") is None
    reserved = {**held, "kv_use": 0.4, "num_running": 4.0, "prompt_len": 8.0, "output_len": 24.0}
    size = {"num_gpu_blocks": 32, "block_size": 4}
    assert found(live(**reserved, settings={**tight, **size}), "cache-full") is not None  # 4 x 32 of 128 tokens
    assert found(live(**reserved, settings={**tight, **size, "num_gpu_blocks": 100}), "cache-full") is None
    assert found(live(**{**held, "tokens_per_step": 300.0}, settings=tight), "cache-full") is None  # full steps
    assert found(live(**{**held, "num_waiting": 0.5}, settings=tight), "cache-full") is None  # one has just arrived
    assert found(live(**{**held, "num_running": 12.0}, settings=tight), "cache-full") is None  # no free slots


def test_a_short_job_is_limited_by_its_tail_and_not_by_its_start() -> None:
    seconds = {"host": 4.2, "prefill": 3.0, "tail": 6.7}
    assert found(job(limited_by_seconds=seconds), "job-host") is None
    assert diagnose(job(limited_by_seconds=seconds)).findings[0].rule == "job-tail"


def test_one_late_look_at_the_event_loop_is_not_a_late_front() -> None:
    assert found(live(event_loop_lag_p95_s=0.4, event_loop_lag_p75_s=0.049), "front") is None
    assert found(live(event_loop_lag_p95_s=0.4, event_loop_lag_p75_s=0.05), "front") is not None


def test_requests_sent_late_count_beside_the_latencies() -> None:
    late = ClientCost(send_late_p99_ms=98.0)
    assert found(online(client=late, ttft_p95_s=4.0), "client") is None
    assert found(online(client=late, ttft_p95_s=1.0), "client") is not None
    assert found(online(client=late), "client") is not None


def test_gaps_beside_a_small_token_budget_are_not_blamed_on_it() -> None:
    gaps = {"token_gap_p50_s": 0.1, "token_gap_p99_s": 0.9}
    assert found(live(**gaps, settings={"max_num_batched_tokens": 512}), "stalls") is None
    assert found(live(**gaps, is_on_cpu=True, settings={"max_num_batched_tokens": 24}), "stalls") is None
    on_cpu = found(live(**gaps, is_on_cpu=True, settings={"max_num_batched_tokens": 512}), "stalls")
    assert on_cpu is not None and on_cpu.advice[0].value == 128
    short = {"longest_prompts": 20.0, "tokens_per_step": 12.0}
    assert found(live(**gaps, **short, is_on_cpu=True), "stalls") is None  # no prompt is long enough
    assert (
        found(online(**gaps, is_on_cpu=True, longest_prompts=None, prompt_len=12.0, tokens_per_step=9.0), "stalls")
        is None
    )
    whole = {"max_num_batched_tokens": 512, "enable_chunked_prefill": False}
    assert found(live(**gaps, settings=whole), "stalls") is not None


def test_a_slot_that_has_just_become_free_does_not_hide_a_small_batch() -> None:
    small = {"num_waiting": 10.0, "kv_use": 0.01, "output_tokens": 100.0, "num_steps": 100.0}
    assert found(live(**small, num_running=1.5, settings={"max_num_seqs": 2}), "slots-full") is not None
    assert found(live(**small, num_running=2.0, settings={"max_num_seqs": 4}), "slots-full") is None
    per_step = {**small, "output_tokens": 390.0}
    assert found(live(**per_step, num_running=2.0, settings={"max_num_seqs": 4}), "slots-full") is not None


def test_a_cache_that_was_made_small_should_be_larger() -> None:
    finding = found(
        live(num_preemptions=9.0, recomputed_tokens=9e3, settings={"num_gpu_blocks_override": 24}), "cache-preempting"
    )
    assert finding is not None
    assert ("num_gpu_blocks_override", 48) in [(advice.setting, advice.value) for advice in finding.advice]


def test_a_long_queue_of_headrace_is_a_problem_if_it_is_long_for_its_slots() -> None:
    seen = {"num_waiting": 146.0, "settings": {"max_num_seqs": 4}}
    finding = found(live(**seen), "queue")
    assert finding is not None and finding.severity == "problem" and finding.advice[0].value == 16
    assert found(live(**{**seen, "settings": {"max_num_seqs": 64}}), "queue") is None
    assert found(live(**{**seen, "num_waiting": 90.0}), "queue") is None


def test_a_long_queue_without_a_limit_is_a_problem() -> None:
    for waiting, severity in ((100.0, "note"), (101.0, "problem")):
        seen = live(engine="vllm", num_waiting=waiting, settings={"max_num_queued_reqs": None})
        finding = found(seen, "queue")
        assert finding is not None and finding.severity == severity
        assert finding.advice[0].value == 1024


def test_a_limit_that_is_advised_does_not_refuse_the_clients_of_a_load_test() -> None:
    for slots, value in ((4, 1024), (256, 1024), (1000, 4000)):
        settings = {"max_num_queued_reqs": None, "max_num_seqs": slots}
        finding = found(live(engine="vllm", settings=settings), "queue")
        assert finding is not None and finding.advice[0].value == value


# The batch and the steps.


def test_more_slots_are_advised_as_far_as_the_cache_goes_and_the_gain_is_predicted() -> None:
    seen = live(num_running=16.0, num_waiting=50.0, kv_use=0.09, settings={"max_num_seqs": 16}, **ON_H200)
    diagnosis = diagnose(seen)
    assert diagnosis.limit is not None and diagnosis.limit.limit == "slots"
    (advice,) = diagnosis.limit.advice
    assert (advice.setting, advice.value, advice.certainty) == ("max_num_seqs", 128, "predicted")
    assert advice.gain is not None and 2.0 < advice.gain < 7.0  # 8 times the batch, not 8 times the speed


def test_decode_of_a_small_batch_is_bound_by_memory_and_of_a_large_one_by_compute() -> None:
    short = {"prompt_len": 30.0, "output_len": 20.0, "longest_prompts": 900.0, **ON_H200}
    small = found(live(num_running=64.0, **ON_H200), "decode")
    large = found(live(num_running=1024.0, settings={"max_num_seqs": 1024}, **short), "decode")
    assert small is not None and small.title == "decode is bound by memory bandwidth"
    assert large is not None and large.title == "decode is bound by compute"


def test_reading_the_weights_of_an_8b_takes_as_long_as_the_data_sheet_says() -> None:
    """7.5 B weights of layers and head in 16 bits at 4.8 TB/s."""
    finding = found(live(**ON_H200), "decode")
    assert finding is not None
    assert dict(finding.numbers)["weights"] == "3.13 ms to read"


def test_a_decode_that_reads_mostly_cache_gains_more_by_an_fp8_cache_than_a_short_one() -> None:
    gains = []
    for length in (100.0, 8_000.0):
        finding = found(live(prompt_len=length, **ON_H200), "decode")
        assert finding is not None
        gains.append(next(advice.gain for advice in finding.advice if advice.setting == "kv_cache_dtype"))
    assert gains[0] is not None and gains[1] is not None
    assert 0 < gains[0] < 0.2 < gains[1] < 1


def test_decode_without_a_known_device_says_what_is_missing() -> None:
    finding = found(live(), "decode")
    assert finding is not None and finding.title == "decode is the bottleneck"
    assert "--model" in finding.why and "--gpu" in finding.why


def test_many_prompt_tokens_are_no_prefill_limit_where_decode_takes_the_time() -> None:
    """Two thirds of the tokens are of prompts, and on an H200 they take a small part of the time."""
    few = {"settings": {"max_num_seqs": 32}}
    chat = {"prompt_tokens": 250_000.0, "tokens_per_step": 6_000.0, "num_running": 30.0, **few}
    assert found(live(**chat), "prefill") is not None
    assert found(live(**chat, **ON_H200), "prefill") is None


@pytest.mark.parametrize(("ttft_p95_s", "is_bound"), [(0.2, True), (8.0, False)])
def test_a_lag_of_the_client_counts_only_beside_short_latencies(ttft_p95_s: float, is_bound: bool) -> None:
    seen = online(client=ClientCost(loop_lag_p99_ms=26.0), ttft_p95_s=ttft_p95_s)
    assert (found(seen, "client") is not None) == is_bound


def test_a_small_batch_is_not_blamed_on_the_load_if_the_client_is_slow() -> None:
    slow = online(client=ClientCost(cpu_share=0.97), output_tokens=500.0)
    assert problems(slow) == ["client"]
    assert found(slow, "small-load") is None


def test_steps_full_of_prompts_are_no_small_load() -> None:
    """Four prompts of 2,048 tokens and one token each fill a step of 8,192."""
    work = {"num_requests": 400.0, "prompt_tokens": 819_200.0, "prefix_hit_tokens": 0.0, "output_tokens": 400.0}
    seen = offline(**work, num_steps=100.0, tokens_per_step=8_192.0, prompt_len=2_048.0, output_len=1.0)
    diagnosis = diagnose(seen)
    assert diagnosis.limit is not None and diagnosis.limit.limit == "prefill"
    assert diagnosis.problems == []


def test_a_job_that_waits_for_its_input_has_no_small_load() -> None:
    seen = job(output_tokens=5_000.0, num_requests=50.0, limited_by_seconds={"reading": 9.0, "decode": 1.0})
    diagnosis = diagnose(seen)
    assert diagnosis.limit is not None and diagnosis.limit.limit == "reading"
    assert found(seen, "small-load") is None


def test_a_host_bound_job_is_named_once() -> None:
    seen = job(host_seconds=9.0, wait_seconds=1.0, limited_by_seconds={"host": 9.0, "decode": 1.0})
    assert problems(seen) == ["job-host"]


def test_stalls_are_answered_with_a_smaller_budget_and_the_guides_are_corrected() -> None:
    finding = found(live(token_gap_p99_s=0.4), "stalls")
    assert finding is not None and "A7" in finding.guide
    assert "wrong direction" in finding.correction
    (advice,) = finding.advice
    assert (advice.setting, advice.value) == ("max_num_batched_tokens", 2048)


def test_stalls_without_chunked_prefill_are_answered_with_chunked_prefill() -> None:
    finding = found(live(token_gap_p99_s=0.4, settings={"enable_chunked_prefill": False}), "stalls")
    assert finding is not None and finding.advice[0].setting == "enable_chunked_prefill"


# Features.


def test_prefix_caching_that_is_on_is_never_advised() -> None:
    finding = found(live(prefix_hit_tokens=0.0), "prefix-unused")
    assert finding is not None and finding.severity == "note"
    assert all(advice.setting is None for advice in finding.advice)


def test_chunked_prefill_of_short_prompts_is_a_note_only_if_it_was_asked_for() -> None:
    assert found(live(longest_prompts=100.0), "chunked-short") is None
    asked = found(live(longest_prompts=100.0, given=frozenset({"enable_chunked_prefill"})), "chunked-short")
    assert asked is not None and asked.severity == "note"


def test_tensor_parallelism_is_compared_with_one_engine_per_gpu() -> None:
    finding = found(planned("vllm serve qwen3-8b -tp 2", gpu=H100), "tensor-parallel")
    assert finding is not None and finding.severity == "problem"
    assert finding.advice[0].certainty == "predicted" and finding.advice[0].gain is not None


def test_tensor_parallelism_that_is_needed_is_no_problem() -> None:
    """16 bits of a 12 B model do not fit on a GPU of 22 GiB."""
    needed = planned("vllm serve gemma-3-12b -tp 2", gpu=find_gpu("L4"))
    assert needed.model is not None and needed.model.num_params < 13e9
    assert found(needed, "tensor-parallel") is None


# Rules of jobs share the thresholds of the job's own bottleneck.


def test_thresholds_are_those_of_the_job() -> None:
    from headrace.doctor.rules import cache, steps
    from headrace.jobs.status import bottleneck

    assert (cache.KV_USE, steps.HOST_SHARE, steps.PROMPT_SHARE) == (
        bottleneck.KV_USE,
        bottleneck.HOST_SHARE,
        bottleneck.PROMPT_SHARE,
    )
