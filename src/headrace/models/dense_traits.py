"""What distinguishes the dense families with layouts of their own: the `traits` of their rows."""

from __future__ import annotations

import math

from headrace.errors import UnsupportedModelError
from headrace.models.family import Config, Traits
from headrace.models.spec import Activation
from headrace.models.traits import llama, number, number_or_none


def gpt2(config: Config) -> Traits:
    traits: Traits = {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_gated": False,
        "activation": _plain_activation(config),
        "num_positions": config["max_position_embeddings"],
    }
    return traits if config["scale_attn_weights"] else traits | {"attention_scale": 1.0}


def gpt_neox(config: Config) -> Traits:
    biased = bool(config["attention_bias"])
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": bool(config["use_parallel_residual"]),
        "is_gated": False,
        "activation": _plain_activation(config),
    }


def gptj(config: Config) -> Traits:
    return {
        "mlp_bias": True,
        "head_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": True,
        "shares_norm": True,
        "is_gated": False,
        "rotates_pairs": True,
        "activation": _plain_activation(config),
    }


def phi(config: Config) -> Traits:
    return {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": True,
        "shares_norm": True,
        "is_gated": False,
        "activation": _plain_activation(config),
    }


def _plain_activation(config: Config) -> Activation:
    """Returns the activation; three names mean the tanh approximation."""
    return "gelu" if config["hidden_act"] == "gelu" else "gelu_tanh"


def opt(config: Config) -> Traits:
    """OPT. Its first two position embeddings are for padding."""
    if not config["do_layer_norm_before"] or not config["layer_norm_elementwise_affine"]:
        raise UnsupportedModelError("OPT models with norms after attention and MLP (350M) are not supported")
    if config.get("word_embed_proj_dim") not in (None, config["hidden_size"]):
        raise UnsupportedModelError("OPT models whose embeddings are projected (350M) are not supported")
    biased = bool(config["enable_bias"])
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": biased,
        "layer_norm": True,
        "norm_bias": True,
        "is_gated": False,
        "activation": "relu",
        "num_positions": config["max_position_embeddings"] + 2,
        "position_offset": 2,
    }


def alibi_slopes(num_heads: int, *, max_bias: float = 8.0) -> tuple[float, ...]:
    """Returns the slopes of ALiBi: powers of two, the exponents evenly spaced down to `max_bias`. With a number of
    heads that is no power of two, those of the next one, first every second."""
    num_powers = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-max_bias * (index + 1) / num_powers) for index in range(num_powers)]
    ordered = slopes if num_powers == num_heads else slopes[1::2] + slopes[::2]
    return tuple(ordered[:num_heads])


def bloom(config: Config) -> Traits:
    if config.get("apply_residual_connection_post_layernorm"):
        raise UnsupportedModelError(
            "BLOOM models whose residual stream is normed (apply_residual_connection_post_layernorm) are not supported"
        )
    return {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "layer_norm": True,
        "norm_bias": True,
        "is_gated": False,
        "activation": "gelu_tanh",
        "embedding_norm": True,
        "alibi_slopes": alibi_slopes(config["num_attention_heads"]),
    }


_MPT_ATTENTION = {"attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False, "alibi": True, "rope": False}


def mpt(config: Config) -> Traits:
    """MPT with ALiBi. What its attention has in `attn_config` is checked here."""
    attention = _MPT_ATTENTION | config["attn_config"]
    for key, value in _MPT_ATTENTION.items():
        if attention[key] != value:
            raise UnsupportedModelError(f"MPT with {key}={attention[key]!r} is not supported, only {value!r}")
    if not config["no_bias"]:
        raise UnsupportedModelError("MPT with no_bias=False is not supported: only models without biases are")
    traits: Traits = {
        "layer_norm": True,
        "is_gated": False,
        "activation": "gelu",
        "clip_qkv": number_or_none(attention, "clip_qkv"),
        "alibi_slopes": alibi_slopes(config["num_attention_heads"], max_bias=attention.get("alibi_bias_max") or 8.0),
    }
    if attention.get("softmax_scale") is not None:
        traits["attention_scale"] = number(attention, "softmax_scale")
    return traits


BAICHUAN_ROTATES = {4096: True, 5120: False}  # by hidden size: the 7B models have a rope, the 13B models ALiBi
BAICHUAN_2_VOCABULARY = 125_696  # its models norm the rows of the head; configs say neither


def baichuan(config: Config) -> Traits:
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    if hidden_size not in BAICHUAN_ROTATES:
        raise UnsupportedModelError(
            f"Baichuan with hidden_size={hidden_size} is not supported: only the sizes of 7B and 13B, "
            f"{' and '.join(map(str, BAICHUAN_ROTATES))}, tell whether a model has a rope or ALiBi"
        )
    traits: Traits = {"norms_head": config["vocab_size"] == BAICHUAN_2_VOCABULARY}
    if BAICHUAN_ROTATES[hidden_size]:
        return traits
    ropeless = tuple(range(config["num_hidden_layers"]))
    return traits | {"ropeless_layers": ropeless, "alibi_slopes": alibi_slopes(num_heads)}


def falcon(config: Config) -> Traits:
    """Falcon. The two small RefinedWeb models have ALiBi, whose bias is scaled as the scores are."""
    traits = _falcon_without_alibi(config)
    if not config.get("alibi"):
        return traits
    num_heads = config["num_attention_heads"]
    scale = (config["hidden_size"] // num_heads) ** -0.5
    alibi: Traits = {
        "ropeless_layers": tuple(range(config["num_hidden_layers"])),
        "alibi_slopes": tuple(slope * scale for slope in alibi_slopes(num_heads)),
    }
    return traits | alibi


def _falcon_without_alibi(config: Config) -> Traits:
    biased, is_parallel = bool(config.get("bias")), bool(config["parallel_attn"])
    has_two_norms = config.get("new_decoder_architecture") and config.get("num_ln_in_parallel_attn") in (None, 2)
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": biased,
        "layer_norm": True,
        "norm_bias": True,
        "is_parallel": is_parallel,
        "shares_norm": is_parallel and not has_two_norms,
        "is_gated": False,
        "activation": "gelu",
    }


def olmo(config: Config) -> Traits:
    """OLMo 1: LayerNorm without weights, always with the same epsilon."""
    biased = bool(config.get("attention_bias"))
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "layer_norm": True,
        "bare_norms": True,
        "norm_eps": 1e-5,
        "clip_qkv": number_or_none(config, "clip_qkv"),
    }


def nemotron(config: Config) -> Traits:
    return llama(config) | {
        "layer_norm": True,
        "norm_bias": True,
        "norm_offset": 1.0,
        "is_gated": False,
        "activation": "relu2",
    }


def arcee(config: Config) -> Traits:
    return llama(config) | {"is_gated": False, "activation": "relu2"}


def internlm1(config: Config) -> Traits:
    """A Llama whose attention has biases."""
    biased = bool(config["bias"])
    return {"qkv_bias": biased, "output_bias": biased}


def internlm(config: Config) -> Traits:
    biased = bool(config.get("bias"))
    return {"qkv_bias": bool(config.get("qkv_bias", biased)), "output_bias": biased, "mlp_bias": biased}
