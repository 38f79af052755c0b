"""What the tensors of a GGUF file are called, in llama.cpp's names and ours, and how some of them are computed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.models.recurrent_specs import GatedDeltaSpec, Mamba2Spec, ShortConvSpec
from headrace.models.spec import LatentSpec, ModelSpec, Shape

Array = npt.NDArray[np.float32]

PART_OF_SPEC = ("rope_freqs", "rope_factors_long", "rope_factors_short")
LAYER_NAME = re.compile(r"blk\.(\d+)\.(shortconv\.\w+|\w+)\.(weight|bias)")
# Stacks of all experts.
OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

_OUTER = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "token_embd_norm": "model.embed_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_OUTSIDE_ENCODER = {
    "token_types": "model.embed_types",
    "cls": "head.0",
    "cls.norm": "head.0.norm",
    "cls.output": "head.1",
}
# Stacks of the matrices between the streams of Gemma 3n.
OF_STREAMS = {
    "altup_proj.weight": "model.altup_projections.*.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.*.weight",
}
VECTORS = ("attn_sinks", "altup_correct_scale")  # called weights in files, and biases here
_KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "exp_probs_b": "mlp.router_correction",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ssm_dt": "recurrent.dt_bias",
    "ssm_out": "recurrent.out_proj",
    "ssm_beta": "recurrent.b_proj",
    "ssm_alpha": "recurrent.a_proj",
    "attn_gate": "recurrent.z_proj",
    "ssm_conv1d": "recurrent.conv1d",
    "shortconv.conv": "recurrent.conv1d",
    "shortconv.in_proj": "recurrent.in_proj",
    "shortconv.out_proj": "recurrent.out_proj",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_WITH_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_ENCODER = {
    "attn_norm": "attention_norm",
    "attn_output_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "layer_output_norm": "mlp_norm",
}
_WITH_TWO_PARALLEL_NORMS = {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
_LONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # in files from before April 2024
_BARE_NORM = re.compile(r"blk\.(\d+)\.ffn_norm")  # without `.weight` in files of Falcon-H1


def names_in_layer(found: Collection[str], spec: ModelSpec) -> dict[str, str]:
    """Maps the stems of a layer's tensors to ours. `found` are the names in the file."""
    if spec.is_encoder:
        return _IN_LAYER | _IN_ENCODER
    if "blk.0.attn_norm_2.weight" in found:
        return _IN_LAYER | _WITH_TWO_PARALLEL_NORMS
    return _IN_LAYER | _WITH_POST_NORMS if spec.post_norms else _IN_LAYER


def is_unused(stem: str, layer: int, spec: ModelSpec) -> bool:
    """Whether it is of a layer that uses the keys and values of another one, but has tensors for its own."""
    return stem in _KEYS_AND_VALUES and spec.kv_source(layer) is not None


def name_outside(name: str, spec: ModelSpec) -> str:
    """Returns the name of a tensor that is not called as those of layers are."""
    lone_expert = _LONE_EXPERT.fullmatch(name)
    if lone_expert is not None:
        index, part, expert = lone_expert.groups()
        return f"model.layers.{index}.mlp.experts.{expert}.{part}_proj.weight"
    if (bare_norm := _BARE_NORM.fullmatch(name)) is not None:
        return f"model.layers.{bare_norm[1]}.post_attention_layernorm.weight"
    stem, _, kind = name.rpartition(".")
    if stem == "token_embd_norm" and isinstance(spec.recurrent, ShortConvSpec):  # so LFM2's files call the last norm
        stem = "output_norm"
    names = _OUTER | _OUTSIDE_ENCODER if spec.is_encoder else _OUTER
    return f"{names[stem]}.{kind}" if stem in names else name


@dataclass(frozen=True, slots=True)
class Fused:
    """Ours in one stored tensor: the rows of the first, then of the second, in each of `num_groups` groups."""

    names: tuple[str, ...]  # without the layer's prefix and `.weight`
    num_groups: int = 1


_QKV = Fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
_GATE_UP = Fused(("mlp.gate_proj", "mlp.up_proj"))
_DELTA_QKV = Fused(("recurrent.q_proj", "recurrent.k_proj", "recurrent.v_proj"))
_MAMBA = Fused(tuple(f"recurrent.{part}_proj" for part in ("gate", "x", "b", "c", "dt")))


def fused_in(stem: str, layer: int, found: Collection[str], spec: ModelSpec) -> Fused | None:
    """Returns what a stored tensor is put together of; None: it is one of ours."""
    delta = spec.recurrent if isinstance(spec.recurrent, GatedDeltaSpec) else None
    if stem == "attn_qkv":
        return _DELTA_QKV if delta is not None and spec.has_state(layer) else _QKV
    if stem == "attn_q" and spec.gates_attention:
        return Fused(("self_attn.q_proj", "self_attn.output_gate_proj"), spec.num_heads)
    if stem == "ssm_ba" and delta is not None:
        return Fused(("recurrent.b_proj", "recurrent.a_proj"), delta.num_key_heads)
    if stem == "ssm_in" and isinstance(spec.recurrent, Mamba2Spec):
        return _MAMBA
    has_gate = f"blk.{layer}.ffn_gate.weight" in found
    return _GATE_UP if stem == "ffn_up" and spec.is_gated and not has_gate else None


# ---- tensors that are computed


@dataclass(frozen=True, slots=True)
class Computed:
    """One of our tensors, computed from stored ones, which are read whole."""

    stored: tuple[str, ...]
    compute: Callable[..., Array]
    shape: Callable[..., Shape]  # of the stored tensors' shapes


def computed_tensors(found: Collection[str], spec: ModelSpec) -> dict[str, Computed]:
    """Finds what is computed, by our names."""
    return {
        f"model.layers.{layer}.{name}": computed
        for layer in range(spec.num_layers)
        for name, computed in _computed_in(layer, spec)
        if all(stored in found for stored in computed.stored)
    }


def _computed_in(layer: int, spec: ModelSpec) -> Iterator[tuple[str, Computed]]:
    prefix = f"blk.{layer}."
    if spec.latent is not None:
        join = partial(_joined_keys_and_values, spec.latent)
        stored = (f"{prefix}attn_k_b.weight", f"{prefix}attn_v_b.weight")
        yield "self_attn.kv_b_proj.weight", Computed(stored, join, _joined_shape)
    if not spec.has_state(layer):
        return
    yield from _state_tensors(prefix)
    if isinstance(spec.recurrent, GatedDeltaSpec) and spec.family.startswith("qwen3_5"):
        yield from _untiled_tensors(prefix, spec.recurrent)


def _state_tensors(prefix: str) -> Iterator[tuple[str, Computed]]:
    for name, stored, compute in (
        ("A_log.bias", "ssm_a", _log_of_negated),
        ("D.bias", "ssm_d", _flat),
        ("norm.weight", "ssm_norm.weight", _flat),
    ):
        yield f"recurrent.{name}", Computed((prefix + stored,), compute, _flat_shape)
    for stem in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        yield "recurrent.conv1d.weight", Computed((prefix + stem,), _as_kernels, _kernel_shape)


def _flat(stored: Array) -> Array:
    return stored.reshape(-1)


def _flat_shape(stored: Shape) -> Shape:
    return (math.prod(stored),)


def _log_of_negated(stored: Array) -> Array:
    """The rates of decay, which files have as -exp of what checkpoints have."""
    return np.log(-stored.reshape(-1))


def _as_kernels(stored: Array) -> Array:
    return stored[:, None]


def _kernel_shape(stored: Shape) -> Shape:
    return (stored[0], 1, *stored[1:])


def _joined_keys_and_values(latent: LatentSpec, keys: Array, values: Array) -> Array:
    """From keys [heads, rank, still_dim] and values [heads, value_dim, rank], the rows of each head together."""
    joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
    return joined.reshape(-1, latent.kv_rank)


def _joined_shape(keys: Shape, values: Shape) -> Shape:
    heads, rank, still_dim = keys
    return (heads * (still_dim + values[1]), rank)


# ---- Qwen3.5: value heads are stored by their place under a key head, not key head after key head


def _untiled_tensors(prefix: str, spec: GatedDeltaSpec) -> Iterator[tuple[str, Computed]]:
    keys = 2 * spec.num_key_heads * spec.key_dim  # rows of queries and keys, which come before those of values
    num_values = spec.num_heads * spec.value_dim

    def untiled(width: int, *, axis: int = 0) -> Callable[[Array], Array]:
        return partial(_untiled, spec=spec, width=width, axis=axis)

    def of_values(stored: Array) -> Array:
        return untiled(spec.value_dim)(stored[keys:])

    def kernels(stored: Array) -> Array:
        return np.concatenate([stored[:keys], of_values(stored)])[:, None]

    yield "recurrent.v_proj.weight", Computed((f"{prefix}attn_qkv.weight",), of_values, lambda s: (num_values, *s[1:]))
    yield "recurrent.conv1d.weight", Computed((f"{prefix}ssm_conv1d.weight",), kernels, _kernel_shape)
    for name, stored, compute in (
        ("z_proj.weight", "attn_gate.weight", untiled(spec.value_dim)),
        ("b_proj.weight", "ssm_beta.weight", untiled(1)),
        ("a_proj.weight", "ssm_alpha.weight", untiled(1)),
        ("dt_bias.bias", "ssm_dt.bias", untiled(1)),
        ("A_log.bias", "ssm_a", lambda stored: untiled(1)(_log_of_negated(stored))),
        ("out_proj.weight", "ssm_out.weight", untiled(spec.value_dim, axis=1)),
    ):
        yield f"recurrent.{name}", Computed((prefix + stored,), compute, _same_shape)


def _same_shape(stored: Shape) -> Shape:
    return stored


def _untiled(stored: Array, *, spec: GatedDeltaSpec, width: int, axis: int) -> Array:
    shape = stored.shape
    sizes: Sequence[int] = (spec.num_heads // spec.num_key_heads, spec.num_key_heads, width)
    tiles = stored.reshape(*shape[:axis], *sizes, *shape[axis + 1 :])
    return np.ascontiguousarray(tiles.swapaxes(axis, axis + 1)).reshape(shape)


def used_by(computed: Mapping[str, Computed]) -> set[str]:
    """Returns the stored tensors that computed ones are made of."""
    return {name for each in computed.values() for name in each.stored}
