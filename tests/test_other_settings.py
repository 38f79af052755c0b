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
        ("data_parallel_size", "only 'headrace serve' and AsyncEngine have it; 'headrace run' runs several"),
        ("enable_kv_cache_reuse", "enable_prefix_caching=False turns it off"),
    ],
)
def test_an_argument_of_another_engine_is_explained(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{name: 4})  # type: ignore[arg-type]
