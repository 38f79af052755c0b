from __future__ import annotations

from headrace.models.spec import ModelSpec, RopeSpec

SMALL_SPEC = ModelSpec(
    family="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=4096,
    norm_eps=1e-5,
    rope=RopeSpec(),
    windows=(None, None),
)
