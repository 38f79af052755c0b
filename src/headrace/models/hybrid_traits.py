"""What distinguishes families whose layers have a recurrent state: the `traits` of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.family import Config, Traits
from headrace.models.mixture_traits import deepseek_mixture
from headrace.models.recurrent_specs import GatedDeltaSpec, GatedNorm, Mamba2Spec, ShortConvSpec
from headrace.models.spec import MixerKind
from headrace.models.traits import count, mixture, number, sparse_layers

_UNLIMITED = 1e300  # an upper limit of time steps from here on is none


def _mixers(config: Config, kinds: Mapping[str, MixerKind], *, key: str = "layer_types") -> tuple[MixerKind, ...]:
    """Reads the names of the layers' kinds."""
    names, num_layers = config.get(key), config["num_hidden_layers"]
    if not isinstance(names, Sequence) or len(names) != num_layers or not set(names) <= kinds.keys():
        raise UnsupportedModelError(
            f"{key} must name one of {', '.join(kinds)} for each of {num_layers} layers, got {names}"
        )
    return tuple(kinds[name] for name in names)


def lfm2(config: Config) -> Traits:
    return {
        "qk_norm": True,
        "mixers": _mixers(config, {"conv": "recurrent", "full_attention": "attention"}),
        "recurrent": ShortConvSpec(
            hidden_size=count(config, "hidden_size"),
            kernel_size=_kernel_size(config, "conv_L_cache"),
            has_bias=bool(config.get("conv_bias")),
        ),
    }


def _kernel_size(config: Config, key: str) -> int:
    size = count(config, key)
    if size < 2:
        raise UnsupportedModelError(f"a convolution over {size} token is not supported ({key})")
    return size


def mamba2(config: Config) -> Traits:
    biased = bool(config["use_bias"])
    return {
        "mixers": ("recurrent",) * config["num_hidden_layers"],
        "has_single_blocks": True,
        "recurrent": _mamba2_spec(
            config,
            num_heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            num_groups="n_groups",
            state_size="state_size",
            kernel_size="conv_kernel",
            has_conv_bias=bool(config["use_conv_bias"]),
            has_bias=biased,
            has_output_bias=biased,
            norm="gate_first",
        ),
    }


def _mamba2_spec(
    config: Config,
    *,
    num_heads: str,
    head_dim: str,
    num_groups: str,
    state_size: str,
    kernel_size: str,
    has_conv_bias: bool,
    has_bias: bool,
    has_output_bias: bool,
    norm: GatedNorm,
) -> Mamba2Spec:
    """Reads the sizes under the family's own keys."""
    _refuse_time_step_limit(config)
    spec = Mamba2Spec(
        hidden_size=count(config, "hidden_size"),
        num_heads=count(config, num_heads),
        head_dim=count(config, head_dim),
        num_groups=count(config, num_groups),
        state_size=count(config, state_size),
        kernel_size=_kernel_size(config, kernel_size),
        has_conv_bias=has_conv_bias,
        has_bias=has_bias,
        has_output_bias=has_output_bias,
        norm=norm,
    )
    if spec.num_heads % spec.num_groups:
        raise ModelError(f"{spec.num_heads} heads of a state space cannot be divided into {spec.num_groups} groups")
    return spec


def _refuse_time_step_limit(config: Config) -> None:
    """Time steps are positive, so limits of zero and infinity do nothing."""
    limit = config.get("time_step_limit")
    if limit is not None and (_as_float(limit[0]) > 0 or _as_float(limit[1]) < _UNLIMITED):
        raise UnsupportedModelError(f"time_step_limit={limit} is not supported, only none (0 to infinity)")


def _as_float(value: Any) -> float:
    return float(value["__float__"]) if isinstance(value, Mapping) else float(value)


def falcon_h1(config: Config) -> Traits:
    """Attention and Mamba 2 side by side. Its multipliers of activations become factors of weights."""
    gate, down = config["mlp_multipliers"]
    of_input, sections = number(config, "ssm_in_multiplier"), config["ssm_multipliers"]
    of_attention = number(config, "attention_in_multiplier")
    names = ("gate_proj", "x_proj", "b_proj", "c_proj", "dt_proj")
    scales = {f"recurrent.{name}": of_input * section for name, section in zip(names, sections, strict=True)}
    scales |= {
        "recurrent.out_proj": number(config, "ssm_out_multiplier"),
        "self_attn.o_proj": of_attention * number(config, "attention_out_multiplier"),
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }
    norm: GatedNorm = "norm_first" if config["mamba_norm_before_gate"] else "gate_first"
    return {
        "mixers": ("both",) * config["num_hidden_layers"],
        "recurrent": _mamba2_spec(
            config,
            num_heads="mamba_n_heads",
            head_dim="mamba_d_head",
            num_groups="mamba_n_groups",
            state_size="mamba_d_state",
            kernel_size="mamba_d_conv",
            has_conv_bias=bool(config["mamba_conv_bias"]),
            has_bias=False,
            has_output_bias=False,
            norm=norm if config["mamba_rms_norm"] else "none",
        ),
        "weight_scales": tuple((f"{name}.weight", scale) for name, scale in scales.items() if scale != 1.0),
        # Queries and keys are both scaled with attention's input.
        "attention_scale": of_attention**2 * number(config, "key_multiplier") / math.sqrt(config["head_dim"]),
        "embedding_scale": number(config, "embedding_multiplier"),
        "logit_scale": number(config, "lm_head_multiplier"),
    }


def nemotron_h(config: Config) -> Traits:
    """A layer is Mamba 2, attention without rotation, an MLP or a mixture of experts."""
    kinds: dict[str, MixerKind] = {"mamba": "recurrent", "attention": "attention", "mlp": "none", "moe": "none"}
    biased, projections_biased = bool(config["attention_bias"]), bool(config["use_bias"])
    for key, activation in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, activation) != activation:
            raise UnsupportedModelError(f"{key} {config[key]!r} is not supported for nemotron_h, only {activation}")
    traits: Traits = {
        "qkv_bias": biased,
        "output_bias": biased,
        "mlp_bias": bool(config["mlp_bias"]),
        "is_gated": False,
        "activation": "relu2",
        "has_single_blocks": True,
        "mixers": _mixers(config, kinds, key="layers_block_type"),
        "recurrent": _mamba2_spec(
            config,
            num_heads="mamba_num_heads",
            head_dim="mamba_head_dim",
            num_groups="n_groups",
            state_size="ssm_state_size",
            kernel_size="conv_kernel",
            has_conv_bias=bool(config["use_conv_bias"]),
            has_bias=projections_biased,
            has_output_bias=projections_biased,
            norm="gate_first",
        ),
    }
    layers = [index for index, name in enumerate(config["layers_block_type"]) if name == "moe"]
    if not layers:
        return traits
    shared_size = count(config, "moe_shared_expert_intermediate_size")
    return traits | deepseek_mixture(config, layers, shared_size=shared_size)


def qwen3_next(config: Config) -> Traits:
    return _gated_delta(config) | mixture(
        config,
        sparse_layers(config),
        "softmax_of_chosen" if config["norm_topk_prob"] else "softmax",
        expert_size=count(config, "moe_intermediate_size"),
        shared_size=count(config, "shared_expert_intermediate_size"),
        gates_shared=True,
    )


def qwen3_5(config: Config) -> Traits:
    return _gated_delta(config)


def _gated_delta(config: Config) -> Traits:
    """Gated delta nets, and at every fourth layer attention with a gate. The norms are those of Gemma."""
    if config.get("attn_output_gate") is False:
        raise UnsupportedModelError("attn_output_gate=False is not supported: attention of these models has a gate")
    biased = bool(config.get("attention_bias"))
    spec = GatedDeltaSpec(
        hidden_size=count(config, "hidden_size"),
        num_key_heads=count(config, "linear_num_key_heads"),
        num_heads=count(config, "linear_num_value_heads"),
        key_dim=count(config, "linear_key_head_dim"),
        value_dim=count(config, "linear_value_head_dim"),
        kernel_size=_kernel_size(config, "linear_conv_kernel_dim"),
    )
    if spec.num_heads % spec.num_key_heads:
        raise ModelError(f"{spec.num_heads} value heads cannot share {spec.num_key_heads} key heads evenly")
    return {
        "qkv_bias": biased,
        "output_bias": biased,
        "qk_norm": True,
        "norm_offset": 1.0,
        "gates_attention": True,
        "mixers": _mixers(config, {"linear_attention": "recurrent", "full_attention": "attention"}),
        "recurrent": spec,
    }
