"""Configs become specs; what would be computed wrongly is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models import ModelSpec, RopeSpec
from headrace.models.dense_traits import alibi_slopes
from headrace.models.families import family_of_config
from headrace.models.hub_config import spec_from_config
from headrace.models.spec import MixtureSpec, QueryGrowth
from tests.models.family_configs import (
    BLOOM_560M,
    FIRST_GPT_2,
    GEMMA_2_2B,
    GEMMA_3_1B,
    GRANITE_3_3_2B,
    LLAMA_3_2_1B,
    LLAMA_4_SCOUT,
    LLAMA_4_SCOUT_TEXT,
    MPT_7B,
    PHI_4_MINI,
    PYTHIA_410M,
    QWEN2,
    QWEN3_30B_A3B,
    SMOLLM3_3B,
)


def spec(base: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config(base | changes)


def test_the_config_of_llama_3_2_reads_as_its_authors_mean_it() -> None:
    read = spec(LLAMA_3_2_1B)
    assert read.num_params == 1_235_814_400
    assert read.kv_elements_per_token == 2 * 16 * 8 * 64
    assert read.rope == RopeSpec(theta=500000.0, kind="llama3", factor=32.0, original_max_len=8192)
    assert (read.family, read.dtype, read.max_model_len) == ("llama", "bfloat16", 131072)
    assert read.eos_token_ids == (128001, 128008, 128009)
    assert read.bos_token_id == 128000
    assert read.windows == (None,) * 16


def test_the_config_of_phi_4_mini_reads_as_its_authors_mean_it() -> None:
    read = spec(PHI_4_MINI)
    assert read.num_params == 3_836_021_760
    assert (read.max_model_len, read.rotary_dim, read.windows) == (131072, 96, (None,) * 32)
    assert (read.rope.kind, read.rope.original_max_len) == ("longrope", 4096)
    assert read.rope.attention_factor == pytest.approx(1.1902380714238083)
    assert (read.rope.short_divisors, read.rope.long_divisors) == ((1.0,) * 48, (2.0,) * 48)


def test_the_config_of_granite_reads_as_its_authors_mean_it() -> None:
    read = spec(GRANITE_3_3_2B)
    assert read.num_params == 2_533_539_840
    assert read.embedding_scale == pytest.approx(12 / 0.22)
    assert read.norm_eps == pytest.approx(1e-5 / 0.22**2)
    assert (read.attention_scale, read.logit_scale) == (0.015625, 0.125)


def test_the_config_of_smollm3_reads_as_its_authors_mean_it() -> None:
    read = spec(SMOLLM3_3B)
    assert read.num_params == 3_075_098_624
    assert read.ropeless_layers == tuple(range(3, 36, 4))
    assert (read.rope_of(2), read.rope_of(3)) == (RopeSpec(theta=5e6), RopeSpec(kind="none"))
    assert spec(SMOLLM3_3B, no_rope_layers=None) == read
    with pytest.raises(ModelError, match="no_rope_layers"):
        spec(SMOLLM3_3B, no_rope_layers=[1, 0])


def test_the_config_of_pythia_reads_as_its_authors_mean_it() -> None:
    read = spec(PYTHIA_410M)
    assert read.num_params == 405_334_016
    assert (read.rotary_dim, read.head_dim, read.num_kv_heads) == (16, 64, 16)
    assert (read.activation, read.is_parallel, read.norm_eps) == ("gelu", True, 1e-5)


def test_the_first_config_of_gpt_2_reads_as_its_authors_mean_it() -> None:
    read = spec(FIRST_GPT_2)
    assert read.num_params == 124_439_808
    assert (read.num_positions, read.max_model_len, read.intermediate_size) == (1024, 1024, 3072)
    assert (read.rope_of(0).kind, read.activation, read.tie_embeddings) == ("none", "gelu_tanh", True)


def test_the_config_of_llama_4_reads_as_its_authors_mean_it() -> None:
    read = spec(LLAMA_4_SCOUT)
    assert read.num_params == 107_769_861_120
    assert read.mixture == MixtureSpec(tuple(range(48)), 16, 1, 8192, "sigmoid", weighs_input=True, shared_size=8192)
    assert read.ropeless_layers == tuple(range(3, 48, 4))
    assert read.windows == (8192, 8192, 8192, None) * 12 and not read.windows_slide
    assert read.query_growth == QueryGrowth(step=8192, strength=0.1)
    assert read.bare_qk_norm and read.rotates_pairs and not read.tie_embeddings
    assert (read.dtype, read.max_model_len, read.eos_token_ids) == ("bfloat16", 10485760, (200001, 200007, 200008))
    assert spec(LLAMA_4_SCOUT_TEXT, architectures=["Llama4ForCausalLM"]) == read


def test_the_config_of_llama_4_maverick_has_a_dense_layer_before_each_mixture() -> None:
    read = spec(LLAMA_4_SCOUT_TEXT, num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False)
    assert read.num_params == 400_711_848_960
    assert read.mixture is not None and read.mixture.layers == tuple(range(1, 48, 2))
    assert not read.bare_qk_norm
    shapes = read.tensor_shapes()
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (16384, 5120)
    assert shapes["model.layers.1.mlp.experts.127.down_proj.weight"] == (5120, 8192)


def test_the_config_of_qwen3_30b_a3b_reads_as_its_authors_mean_it() -> None:
    read = spec(QWEN3_30B_A3B)
    assert read.num_params == 30_532_122_624
    assert read.mixture == MixtureSpec(tuple(range(48)), 128, 8, 768, "softmax_of_chosen")
    assert (read.qk_norm, read.windows, read.mlp_width) == (True, (None,) * 48, 8 * 768)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"layer_types": ["sliding_attention"] * 48},
        {"attention_chunk_size": None},
        {"hidden_act": "gelu"},
        {"router_scaling_factor": 2.5},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_what_llama_4_would_compute_wrongly_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        spec(LLAMA_4_SCOUT | {"text_config": LLAMA_4_SCOUT_TEXT | change})


def test_a_quantized_checkpoint_is_refused_wherever_its_config_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match="quantized"):
        spec(LLAMA_4_SCOUT, quantization_config={"quant_method": "compressed-tensors"})


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts_per_tok": 17},
        {"num_local_experts": 0},
        {"moe_layers": [48]},
        {"attention_chunk_size": -1},
        {"no_rope_layers": [1, 0]},
        {"floor_scale": 0},
    ],
)
def test_impossible_numbers_of_llama_4_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        spec(LLAMA_4_SCOUT | {"text_config": LLAMA_4_SCOUT_TEXT | change})


def test_slopes_of_alibi_are_powers_of_two() -> None:
    """As the paper gives them for 8 heads; with 6 heads every second of those of 8 comes first."""
    of_8 = tuple(2.0**-exponent for exponent in range(1, 9))
    assert alibi_slopes(8) == of_8
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert spec(MPT_7B).alibi_slopes == alibi_slopes(32)
    falcon = {"architectures": ["FalconForCausalLM"], "hidden_size": 1024, "n_head": 16, "n_layer": 2, "vocab_size": 96}
    assert spec(falcon, alibi=True).alibi_slopes == tuple(
        slope / 8 for slope in alibi_slopes(16)
    )  # scaled as the scores


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (FIRST_GPT_2, {"scale_attn_by_inverse_layer_idx": True}),
        (PYTHIA_410M, {"alibi": True}),
        (BLOOM_560M, {"apply_residual_connection_post_layernorm": True}),
        (MPT_7B, {"attn_config": {"alibi": False}}),
        (MPT_7B, {"attn_config": {"qk_ln": True}}),
        (MPT_7B, {"no_bias": False}),
        (MPT_7B, {"logit_scale": "inv_sqrt_d_model"}),
        (FIRST_GPT_2, {"add_cross_attention": True}),
        (FIRST_GPT_2, {"activation_function": "relu"}),
        (PYTHIA_410M, {"hidden_act": "silu"}),
        (GRANITE_3_3_2B, {"num_local_experts": 8}),
        (GRANITE_3_3_2B, {"position_embedding_multiplier": 2.0}),
        (SMOLLM3_3B, {"partial_rotary_factor": 0.5}),
        (QWEN2, {"architectures": ["CohereForCausalLM"], "use_qk_norm": True}),
        (QWEN2, {"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}),
        (QWEN2, {"architectures": ["Starcoder2ForCausalLM"], "norm_type": "rms_norm"}),
    ],
)
def test_what_these_families_would_compute_wrongly_is_refused(base: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        spec(base, **change)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["DeepseekForCausalLM"], "n_routed_experts": 64},
        {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"num_experts": 128}},
        {"model_type": "grok", "num_local_experts": 32},
    ],
)
def test_a_mixture_of_experts_of_another_kind_is_refused_as_such(config: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"is not supported: it is a mixture of experts of a kind .*[Ll]lama4"
    ):
        spec(config)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_longrope_has_other_names_in_older_configs(name: str) -> None:
    older = PHI_4_MINI["rope_scaling"] | {"type": name}
    assert spec(PHI_4_MINI, rope_scaling=older) == spec(PHI_4_MINI)


@pytest.mark.parametrize("share", [1.5, -0.5, 0.04])
def test_a_share_of_the_head_that_cannot_rotate_is_refused(share: float) -> None:
    with pytest.raises(ModelError, match="even number of dimensions that rotate"):
        spec(PHI_4_MINI, partial_rotary_factor=share)


def test_the_config_of_gemma_2_reads_as_its_authors_mean_it() -> None:
    read = spec(GEMMA_2_2B)
    assert read.num_params == 2_614_341_888
    assert read.windows == (4096, None) * 13
    assert (read.attention_scale, read.attention_softcap, read.logit_softcap) == (1 / 16, 50.0, 30.0)
    assert (read.activation, read.embedding_scale, read.norm_offset) == ("gelu_tanh", 48.0, 1.0)
    assert read.tie_embeddings and read.post_norms and not read.qk_norm
    assert read.eos_token_ids == (1, 107)


def test_the_config_of_gemma_3_reads_as_its_authors_mean_it() -> None:
    read = spec(GEMMA_3_1B)
    assert read.num_params == 999_885_952
    assert read.windows == ((512,) * 5 + (None,)) * 4 + (512, 512)
    assert (read.rope_of(0), read.rope_of(5)) == (RopeSpec(theta=1e4), RopeSpec(theta=1e6))
    assert (read.attention_softcap, read.logit_softcap) == (None, None)
    assert read.tie_embeddings and read.post_norms and read.qk_norm
    assert read.eos_token_ids == (1, 106)


def test_gemma_3_scales_the_rope_of_layers_with_full_attention_and_states_the_scaled_context() -> None:
    read = spec(GEMMA_3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0}, max_position_embeddings=131072)
    assert read.rope == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert read.local_rope == RopeSpec(theta=1e4)
    assert read.max_model_len == 131072


def test_older_and_newer_configs_of_gemma_3_read_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    newer = {key: value for key, value in GEMMA_3_1B.items() if "rope" not in key and "pattern" not in key} | {
        "_sliding_window_pattern": 6,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4 + ["sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
    }
    assert spec(newer) == spec(GEMMA_3_1B, rope_scaling=scaling)


def test_a_local_rope_stays_where_the_context_does_not_exceed_the_window() -> None:
    read = spec(GEMMA_3_1B, max_position_embeddings=512)
    assert read.rope_of(0) == RopeSpec(theta=1e4)


def test_the_first_gemma_means_the_tanh_when_it_says_gelu() -> None:
    gemma = QWEN2 | {"architectures": ["GemmaForCausalLM"], "sliding_window": None, "max_window_layers": None}
    read = spec(gemma, hidden_act="gelu", hidden_activation=None)
    assert (read.activation, read.head_dim, read.tie_embeddings) == ("gelu_tanh", 256, True)
    assert read.eos_token_ids == (1,)
    with pytest.raises(UnsupportedModelError, match="silu"):
        spec(gemma, hidden_act="silu")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_activation": "gelu"},
        {"hidden_act": "silu"},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        {"layer_types": ["chunked_attention"] * 26},
        {"sliding_window": None},
        {"altup_num_inputs": 4, "laurel_rank": 64, "num_experts": 4},
    ],
)
def test_what_gemma_3_would_compute_wrongly_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        spec(GEMMA_3_1B, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"query_pre_attn_scalar": 0},
        {"query_pre_attn_scalar": None},
        {"final_logit_softcapping": -30.0},
        {"sliding_window_pattern": 0},
        {"sliding_window": -1},
    ],
)
def test_impossible_numbers_of_gemma_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        spec(GEMMA_2_2B, **change)


def test_the_text_model_of_a_gemma_with_images_reads_as_its_authors_mean_it() -> None:
    """The published config of Gemma 3 4B leaves out most of its numbers."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    read = spec_from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    )
    assert read.num_params == 3_880_263_168
    assert (read.num_heads, read.num_kv_heads, read.head_dim, read.vocab_size) == (8, 4, 256, 262208)
    assert read.windows[:6] == (1024,) * 5 + (None,)
    assert read.eos_token_ids == (1, 106)


def test_ministral_3_scales_queries_of_layers_that_rotate() -> None:
    rope = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
    text = QWEN2 | {"rope_parameters": rope | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}
    text |= {"sliding_window": None, "max_window_layers": None}
    read = spec_from_config({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    assert read.query_growth == QueryGrowth(step=16384, strength=0.1, offset=0, rotated_layers=True)
    assert read.rope.attention_factor == 1.0 and read.grows_queries(0)


def test_a_yarn_rope_may_state_a_factor_of_its_own_factor() -> None:
    """DeepSeek-R1-0528-Qwen3-8B undoes the factor that yarn implies."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    read = spec(QWEN2, rope_scaling=rope | {"attn_factor": 0.8782488562869419})
    assert read.rope.attention_factor == pytest.approx(1.0)


def test_a_key_that_repeats_another_is_accepted_only_with_its_value() -> None:
    assert spec(GEMMA_2_2B, sliding_window_size=4096) == spec(GEMMA_2_2B)
    with pytest.raises(UnsupportedModelError, match="sliding_window_size=1024"):
        spec(GEMMA_2_2B, sliding_window_size=1024)


def test_what_is_always_the_case_may_be_stated() -> None:
    coder = {"use_qk_norm": True, "shared_expert_intermediate_size": 0}
    assert spec(QWEN3_30B_A3B, **coder) == spec(QWEN3_30B_A3B)
    with pytest.raises(UnsupportedModelError, match="shared_expert_intermediate_size=512"):
        spec(QWEN3_30B_A3B, shared_expert_intermediate_size=512)


def test_generation_config_adds_end_ids_without_repeating_them() -> None:
    read = spec_from_config(QWEN2 | {"eos_token_id": 5}, {"eos_token_id": [7, 5]})
    assert read.eos_token_ids == (5, 7)


def test_a_head_size_of_its_own_need_not_divide_the_hidden_size() -> None:
    read = spec(QWEN2, architectures=["Qwen3ForCausalLM"])
    assert read.head_dim == 128
    assert read.qk_norm
    assert read.tensor_shapes()["model.layers.3.self_attn.o_proj.weight"] == (64, 4 * 128)


def test_qwen_windows_are_off_unless_switched_on_and_start_at_their_layer() -> None:
    assert spec(QWEN2).windows == (None,) * 4
    assert spec(QWEN2, use_sliding_window=True).windows == (None, None, None, 100)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert spec(QWEN2, use_sliding_window=True, layer_types=kinds).windows == (100, None, 100, None)


def test_a_window_as_long_as_the_context_is_none() -> None:
    mistral = QWEN2 | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096, "max_window_layers": None}
    assert spec(mistral, max_position_embeddings=32768).windows == (4096,) * 4
    assert spec(mistral, max_position_embeddings=4096).windows == (None,) * 4


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_rope_scaling_scales_the_context(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    assert spec(QWEN2, rope_scaling=scaling, max_position_embeddings=1000).max_model_len == 4000


def test_without_architectures_the_model_type_decides() -> None:
    assert spec({**QWEN2, "architectures": None}, model_type="qwen2").family == "qwen2"


def test_an_unknown_architecture_is_refused_with_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"'Qwen9MoeForCausalLM'.*did you mean 'Qwen[23]Moe.*supported: Llama"
    ):
        spec(QWEN2, architectures=["Qwen9MoeForCausalLM"])


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"partial_rotary_factor": 0.5},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"num_local_experts": 8},
        {"attention_multiplier": 0.1},
        {"dual_chunk_attention_config": {"chunk_size": 8}},
        {"use_qk_norm": True},
        {"quantization_config": {"quant_method": "awq"}},
        {"is_causal": False},
        {"layer_types": ["linear_attention"] * 4},
        {"layer_types": ["sliding_attention"] * 4},
    ],
)
def test_what_would_be_computed_wrongly_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        spec(QWEN2, **change)


def test_features_that_are_switched_off_are_fine() -> None:
    off = {"use_mrope": False, "rope_scaling": None, "attn_logit_softcapping": None, "partial_rotary_factor": 1.0}
    assert spec(QWEN2, **off) == spec(QWEN2)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"vocab_size": -1},
        {"num_key_value_heads": 3},
        {"head_dim": 15},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}},
        {"use_sliding_window": True, "sliding_window": 0},
    ],
)
def test_impossible_numbers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        spec(QWEN2, **change)


@pytest.mark.parametrize("config", [{"architectures": ["RwkvForCausalLM"]}, {"model_type": "rwkv"}])
def test_another_architecture_is_not_taken_for_a_misspelt_one(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"' is not supported \(supported: "):
        family_of_config(config)


def test_a_misspelt_architecture_is_suggested() -> None:
    with pytest.raises(UnsupportedModelError, match="did you mean 'LlamaForCausalLM'"):
        family_of_config({"architectures": ["LamaForCausalLM"]})
