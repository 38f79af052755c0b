"""Settings of models with a recurrent state: its memory, and what is off or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config import EngineConfig
from headrace.engine.resolve import resolve, resolve_here
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.models.recurrent_specs import Mamba2Spec
from headrace.models.spec import MixerKind
from tests.engine.test_resolve import GIB, GPU, SPEC, facts, reason

STATE = Mamba2Spec(
    hidden_size=64,
    num_heads=16,
    head_dim=64,
    num_groups=1,
    state_size=128,
    kernel_size=4,
    has_conv_bias=True,
    has_bias=False,
    has_output_bias=False,
    norm="gate_first",
)
MATRIX_BYTES = 16 * 64 * 128 * 4


def resolved(mixers: tuple[MixerKind, ...], *, on_gpu: bool = False, **config: object) -> Settings:
    spec = replace(SPEC, recurrent=STATE, mixers=mixers)
    return resolve_here(EngineConfig(**config), spec, replace(facts(), gpu=GPU) if on_gpu else facts())  # type: ignore[arg-type]


def test_prefix_caching_is_off_and_said_to_be() -> None:
    settings = resolved(("recurrent", "attention"))
    assert not settings.enable_prefix_caching and settings.limits.has_recurrent_state
    assert "recurrent state" in reason(settings, "enable_prefix_caching")


def test_only_layers_with_attention_have_blocks() -> None:
    bytes_of_two = resolved(("both", "both"), kv_cache_memory_bytes=1 << 20).num_blocks
    assert resolved(("recurrent", "attention"), kv_cache_memory_bytes=1 << 20).num_blocks == 2 * bytes_of_two


def test_states_take_memory_from_the_kv_cache() -> None:
    of_conv = 3 * (16 * 64 + 2 * 128) * 4
    settings = [
        resolved(("recurrent", "attention"), max_num_seqs=seqs, gpu_memory_utilization=0.07) for seqs in (200, 300)
    ]
    block_bytes = 2 * 2 * 16 * 4 * 16
    assert all("recurrent states" in reason(each, "num_blocks") for each in settings)
    saved = (settings[0].num_blocks - settings[1].num_blocks) * block_bytes
    assert saved == pytest.approx(100 * (MATRIX_BYTES + of_conv), rel=1e-3)


def test_states_that_take_much_memory_limit_the_number_of_sequences() -> None:
    wide = replace(STATE, num_heads=1600)
    spec = replace(SPEC, recurrent=wide, mixers=("recurrent", "attention"))
    settings = resolve(EngineConfig(), spec, replace(facts(), gpu=GPU))
    assert 0.3 * 99 * GIB < settings.max_num_seqs * 100 * MATRIX_BYTES < 0.5 * 99 * GIB
    assert "recurrent states of more" in reason(settings, "max_num_seqs")


def test_states_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"recurrent states of 16\.\d+ GiB .*lower max_num_batched_tokens or max_num"):
        resolved(("recurrent",) * 2, max_num_seqs=16_000, max_num_batched_tokens=16_000, gpu_memory_utilization=0.5)


def test_a_model_without_attention_has_no_kv_cache_to_set() -> None:
    settings = resolved(("recurrent",) * 2, on_gpu=True)
    assert settings.num_blocks == settings.max_num_seqs * 4096 // 16
    with pytest.raises(ConfigError, match="no attention and so no KV cache"):
        resolved(("recurrent",) * 2, kv_cache_memory_bytes=1 << 30)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_it_is_not_divided_over_ranks(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=2 is not supported for llama: layers with a recurrent state"):
        resolved(("recurrent", "attention"), **{name: 2})
