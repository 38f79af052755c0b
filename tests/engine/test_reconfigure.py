"""Other settings for a loaded model: as a fresh start would have them, and without losing the engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine import reconfigure, start
from headrace.engine.reconfigure import OtherWeightsError
from headrace.errors import ConfigError, EngineDeadError
from headrace.hardware import read_facts
from headrace.models import load_decoder, open_checkpoint
from headrace.models.weights.load import with_max_len
from headrace.types import RequestOutput
from tests.engine.tiny import save_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["the same long beginning of all prompts, then " + tail for tail in ("one", "two", "three", "four", "five")]
FIRST: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 256, "num_threads": 1, "device": "cpu"}


@pytest.fixture
def own(tiny_directory: Path) -> Iterator[LLM]:
    with LLM(str(tiny_directory), **FIRST) as llm:
        yield llm


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40},
        {"enable_chunked_prefill": False, "enable_prefix_caching": False, "block_size": 8, "num_threads": 2},
        {"scheduling_policy": "priority", "capacity_policy": "guaranteed_no_evict", "max_model_len": 100},
        {"kv_cache_memory_bytes": 1 << 20, "seed": 5},
    ],
)
def test_settings_and_answers_are_those_of_a_fresh_start(
    own: LLM, tiny_directory: Path, settings: dict[str, Any]
) -> None:
    before = tokens(own)
    own.reconfigure(**settings)
    with LLM(str(tiny_directory), device="cpu", **settings) as fresh:
        assert own.settings == fresh.settings
        assert tokens(own) == tokens(fresh) == before


def test_settings_return_to_their_defaults_unless_they_are_given_again(own: LLM) -> None:
    own.reconfigure(max_num_seqs=3)
    own.reconfigure(enable_prefix_caching=False)
    assert own.settings.max_num_seqs == 128
    assert own.settings.num_blocks != 256


def test_the_prefix_cache_is_switched_on_and_off(own: LLM) -> None:
    own.reconfigure(**FIRST, enable_prefix_caching=False)
    tokens(own)
    tokens(own)
    assert own.stats.scheduler.num_prefix_hit_tokens == 0
    own.reconfigure(**FIRST)
    tokens(own)
    tokens(own)
    assert own.stats.scheduler.num_prefix_hit_tokens > 0


def test_counters_start_at_zero_and_cached_prefixes_are_lost(own: LLM) -> None:
    tokens(own)
    own.reconfigure(**FIRST)
    assert own.stats.scheduler.num_generated_tokens == 0
    own.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert own.stats.scheduler.num_prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_seqs": 4}, "max_num_seqs"),
        ({"block_size": 0}, "block_size must be"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "must fit in one step"),
        ({"num_gpu_blocks_override": 2, "max_model_len": 512}, "room for 32"),
        ({"dtype": "bfloat16"}, "float32"),
    ],
)
def test_refused_settings_leave_the_engine_as_it_was(own: LLM, settings: dict[str, Any], said: str) -> None:
    before, stats, client = own.settings, tokens(own), own._engine.client
    with pytest.raises(ConfigError, match=said):
        own.reconfigure(**settings)
    assert own.settings is before and own._engine.client is client  # it was not even closed
    assert tokens(own) == stats


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokenizer": "/some/other"}, "tokenizer='/some/other' needs a new LLM: .* tokenizer=None"),
        ({"revision": "v2"}, "revision='v2' needs a new LLM"),
        ({"load_format": "random"}, "load_format='random' needs a new LLM"),
        ({"model": "smollm2"}, "model='smollm2' needs a new LLM"),
    ],
)
def test_what_needs_other_weights_needs_a_new_llm(own: LLM, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(OtherWeightsError, match=said):
        own.reconfigure(**settings)
    assert len(tokens(own)) == 5


def test_settings_of_the_model_may_be_named_if_they_are_the_same(own: LLM) -> None:
    own.reconfigure(**FIRST, dtype="float32", load_format="auto", tokenizer=None)  # dtype was automatic
    assert len(tokens(own)) == 5


def test_the_seed_of_random_weights_cannot_change(tmp_path: Path) -> None:
    save_model(tmp_path)
    with LLM(str(tmp_path), load_format="random", seed=3, device="cpu", num_gpu_blocks_override=64) as llm:
        llm.reconfigure(num_gpu_blocks_override=64, max_num_seqs=2)
        assert llm.settings.seed == 3
        with pytest.raises(OtherWeightsError, match="seed=4 needs a new LLM"):
            llm.reconfigure(seed=4)


def test_the_old_settings_are_restored_if_a_start_fails(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, before = own.settings, tokens(own)
    start_runner = start.start_runner

    def without_memory(*arguments: Any, **named: Any) -> Any:
        cache = torch.empty(1 << 20)  # noqa: F841  the frame of the error refers to it
        monkeypatch.setattr(start, "start_runner", start_runner)
        raise ConfigError("no memory")

    monkeypatch.setattr(start, "start_runner", without_memory)
    with pytest.raises(ConfigError, match="no memory") as error:
        own.reconfigure(**FIRST | {"max_num_seqs": 4})
    assert all("cache" not in entry.frame.f_locals for entry in error.traceback if entry.name == "without_memory")
    assert own.settings == settings
    assert tokens(own) == before
    own.reconfigure(**FIRST | {"max_num_seqs": 4})
    assert own.settings.max_num_seqs == 4


def test_it_is_refused_while_a_call_runs(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    is_running, may_end = Event(), Event()
    wait = LLM._wait_for_all

    def held(self: LLM, *arguments: Any) -> None:
        is_running.set()
        assert may_end.wait(60)
        wait(self, *arguments)

    monkeypatch.setattr(LLM, "_wait_for_all", held)
    answers: list[RequestOutput] = []
    call = Thread(target=lambda: answers.extend(own.generate(PROMPTS, GREEDY, use_tqdm=False)))
    call.start()
    assert is_running.wait(60)
    try:
        with pytest.raises(ConfigError, match="only while no call runs"):
            own.reconfigure(max_num_seqs=4)
    finally:
        may_end.set()
        call.join(60)
    assert len(answers) == 5
    own.reconfigure(max_num_seqs=4)


def test_a_call_that_comes_meanwhile_waits(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, answers = tokens(own), list[tuple[int, ...]]()
    start_core = start.start_core
    call = Thread(target=lambda: answers.extend(tokens(own)))

    def slow(*arguments: Any) -> Any:
        call.start()
        call.join(0.05)
        assert call.is_alive()
        return start_core(*arguments)

    monkeypatch.setattr(reconfigure, "start_core", slow)
    own.reconfigure(**FIRST)
    call.join(60)
    assert answers == expected


def test_a_closed_llm_stays_closed(tiny_directory: Path) -> None:
    llm = LLM(str(tiny_directory), **FIRST)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.reconfigure(max_num_seqs=4)


def _tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) is torch.Tensor and found.layout is torch.strided and not found.is_mkldnn:
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.slow
def test_memory_does_not_grow(own: LLM) -> None:
    tokens(own)
    before = _tensor_bytes()
    for round_ in range(10):
        own.reconfigure(**FIRST | {"enable_prefix_caching": bool(round_ % 2)})
        tokens(own)
    assert _tensor_bytes() <= before


def test_the_old_cache_is_freed_before_the_new_one_is_allocated(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    own.reconfigure(**FIRST | {"num_gpu_blocks_override": 4096})
    with_large_cache = _tensor_bytes()
    seen = []
    start_runner = start.start_runner

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(_tensor_bytes())
        return start_runner(*arguments, **named)

    monkeypatch.setattr(start, "start_runner", counted)
    own.reconfigure(**FIRST)
    cache_bytes = 4096 * 16 * 2 * 3 * 2 * 16 * 4  # blocks, tokens, keys and values, layers, heads, dimensions, bytes
    assert seen[0] <= with_large_cache - cache_bytes


def test_memory_of_this_engine_counts_as_free(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = own._engine.model
    assert model is not None
    now = replace(read_facts(), total_memory=1000, free_memory=400)
    monkeypatch.setattr(start, "read_facts", lambda: now)
    monkeypatch.setattr(start, "resident_bytes", lambda: model.rss_before + 150)
    assert start.facts_without(model).free_memory == 550
    monkeypatch.setattr(start, "resident_bytes", lambda: model.rss_before + 5000)
    assert start.facts_without(model).free_memory == 1000
    monkeypatch.setattr(start, "resident_bytes", lambda: model.rss_before - 1)
    assert start.facts_without(model).free_memory == 400


@pytest.mark.parametrize("family", ["gemma3", "llama4", "olmo3"])
def test_a_decoder_of_another_length_is_as_if_loaded_with_it(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, family)
    checkpoint = open_checkpoint(str(tmp_path))
    long, short = (load_decoder(checkpoint, dtype=torch.float32, max_len=length) for length in (400, 20))
    resized = with_max_len(long, 20)
    assert resized.max_len == short.max_len == 20
    for ours, theirs in zip(resized.layers, short.layers, strict=True):
        assert torch.equal(ours.mixer.cos_sin, theirs.mixer.cos_sin)
        assert ours.mixer.window == theirs.mixer.window
        scales = ours.mixer.query_scales, theirs.mixer.query_scales
        assert scales == (None, None) or torch.equal(*scales)  # type: ignore[arg-type]
    assert resized.head is long.head
    assert with_max_len(long, 400) is long
