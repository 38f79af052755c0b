from __future__ import annotations

import pytest

from headrace.config import EngineConfig
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("swap_space", "EngineConfig has no argument 'swap_space': preempted sequences are recomputed"),
        ("batch_scheduler_policy", "use capacity_policy, which has the same values"),
        ("max_tokens_in_paged_kv_cache", "use num_gpu_blocks_override"),
        ("enable_kv_cache_reuse", "enable_prefix_caching=False turns it off"),
    ],
)
def test_an_argument_of_another_engine_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: 4})  # type: ignore[arg-type]


def test_a_neutral_value_is_accepted_and_any_other_is_explained() -> None:
    neutral: dict[str, object] = {"pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert EngineConfig(**neutral) == EngineConfig()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'pipeline_parallel_size': a model is divided by tensor_parallel_size only"):
        EngineConfig(pipeline_parallel_size=2)  # type: ignore[call-arg]
