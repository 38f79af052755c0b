"""What a model is, in numbers: enough to size it, to check a checkpoint, and to build the decoder. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.models.pooler import HeadLayer, PoolerSpec
from headrace.models.quantized import PackedBits, StoredQuantization
from headrace.models.recurrent_specs import Matrix, RecurrentSpec, state_bytes

RopeKind = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "clamped_silu", "gelu_tanh", "gelu", "relu", "relu2"]
Routing = Literal["sigmoid", "sigmoid_of_chosen", "softmax", "softmax_of_chosen", "sparsemixer"]
Shape = tuple[int, ...]
# What mixes tokens in a layer: attention, a mixer with a recurrent state, the sum of both, or nothing (an MLP only).
MixerKind = Literal["attention", "recurrent", "both", "none"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The frequencies of the rotary embedding; `kind` says which of the fields are used."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, dynamic, llama3, yarn: scaling of the trained context
    original_max_len: int = 0  # dynamic, llama3, yarn, longrope: the context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of its ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: cosines and sines are multiplied by it
    short_divisors: tuple[float, ...] = ()  # longrope: one per frequency, for contexts within the original one
    long_divisors: tuple[float, ...] = ()  # longrope: the same for longer contexts
    frequency_divisors: tuple[float, ...] = ()  # one per frequency, from a GGUF file; empty: none


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + strength * log(1 + floor((p + offset) / step))."""

    step: float
    strength: float
    offset: int = 1
    rotated_layers: bool = False  # in the layers that rotate, else in the others


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """A mixture of experts that replaces the MLP in some layers."""

    layers: tuple[int, ...]
    num_experts: int
    num_chosen: int  # experts per token
    expert_size: int  # intermediate size of an expert
    routing: Routing  # how the routes' weights are computed: see `kernels.ops.route`
    weighs_input: bool = False  # a route's weight scales the expert's input, not its output
    shared_size: int | None = None  # intermediate size of the shared expert, which gets all tokens; None: none
    gates_shared: bool = False  # the shared expert's output is multiplied by the sigmoid of a gate
    corrects_choice: bool = False  # a bias per expert is added to the scores by which experts are chosen
    scale: float = 1.0  # of the routes' weights
    jitter: float = 0.0  # of sparsemixer routing
    num_groups: int = 1  # of experts: those of a token are from a few groups
    num_groups_chosen: int = 1
    router_bias: bool = False
    interleaves: bool = False  # rows 2i and 2i + 1 of an expert's first matrix are those of its gate and up projections


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (`latent.py`). The cache holds the latents and the part of the keys that rotates."""

    query_rank: int | None  # size of the query latent; None: queries are computed from the hidden state
    kv_rank: int  # size of the latent of keys and values
    still_dim: int  # dimensions of a query or key head that do not rotate; they come first
    rotary_dim: int  # those that do; all heads have the same in their keys
    value_dim: int  # of a value head

    @property
    def cache_dim(self) -> int:
        """Elements in the cache per token and layer."""
        return self.kv_rank + self.rotary_dim


@dataclass(frozen=True, slots=True)
class Gemma3nSpec:
    """What Gemma 3n has beside Gemma 3 (`gemma3n.py`)."""

    num_streams: int  # versions of the residual stream
    scales_corrected: bool  # the active stream is scaled where it gates a layer's input
    input_size: int  # of the embedding that each layer gets of a token
    input_vocab_size: int
    low_rank: int  # of the path beside attention
    num_shared_layers: int  # the last layers, which use keys and values of earlier ones
    sparsities: tuple[float, ...]  # one per layer: share of the MLP's gates that become zero, about

    def outer_shapes(self, hidden_size: int, num_layers: int) -> dict[str, Shape]:
        width, square = num_layers * self.input_size, (hidden_size, hidden_size)
        between = [f"model.altup_{way}projections.{i}" for way in ("", "unembed_") for i in range(self.num_streams - 1)]
        return {
            "model.embed_tokens_per_layer.weight": (self.input_vocab_size, width),
            "model.per_layer_model_projection.weight": (width, hidden_size),
            "model.per_layer_projection_norm.weight": (self.input_size,),
            **{f"{name}.weight": square for name in between},
        }

    def layer_shapes(self, hidden_size: int) -> dict[str, Shape]:
        num_streams = self.num_streams
        return {
            "altup.correct_output_scale.bias": (hidden_size,),
            "altup.correction_coefs.weight": (num_streams, num_streams),
            "altup.prediction_coefs.weight": (num_streams**2, num_streams),
            "altup.modality_router.weight": (num_streams, hidden_size),
            "altup.router_norm.weight": (hidden_size,),
            "laurel.linear_left.weight": (self.low_rank, hidden_size),
            "laurel.linear_right.weight": (hidden_size, self.low_rank),
            "laurel.post_laurel_norm.weight": (hidden_size,),
            "per_layer_input_gate.weight": (self.input_size, hidden_size),
            "per_layer_projection.weight": (hidden_size, self.input_size),
            "post_per_layer_input_norm.weight": (hidden_size,),
        }


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model. Built by `families` from config.json or GGUF metadata, already checked."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]  # one per layer; None: full attention
    windows_slide: bool = True  # else attention is chunked: a token sees its own chunk of the window's length
    rotary_dim: int | None = None  # the first so many dimensions of a head rotate; None: all
    rotates_pairs: bool = False  # dimensions 2i and 2i + 1 rotate together in the checkpoint, not i and i + half
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # of the LM head
    norms_head: bool = False  # rows of the LM head get the length 1 at load
    qk_norm: bool = False  # queries and keys are normed per head
    wide_qk_norm: bool = False  # they are normed over all heads together
    head_qk_norm: bool = False  # LayerNorm without bias per head, with other weights for each head
    bare_qk_norm: bool = False  # per head, without weights, in the layers that rotate
    layer_norm: bool = False  # norms are LayerNorm, not RMS norm
    norm_bias: bool = False  # and have a bias
    pre_norms: bool = True  # attention and MLP read the normed residual stream
    post_norms: bool = False  # the outputs of attention and MLP are normed before they are added to the residual stream
    bare_norms: bool = False  # norms have no weights
    norm_offset: float = 0.0  # added to the checkpoint's norm weights at load
    is_parallel: bool = False  # attention and MLP read the same input
    shares_norm: bool = False  # and share its norm
    is_gated: bool = True  # the MLP has a gate projection
    activation: Activation = "silu"
    mixture: MixtureSpec | None = None  # of experts, in some layers; None: all layers have an MLP
    local_rope: RopeSpec | None = None  # of the layers with a window; None: the same rope
    ropeless_layers: tuple[int, ...] = ()  # their heads do not rotate
    query_growth: QueryGrowth | None = None
    latent: LatentSpec | None = None  # of multi-head latent attention; a query head is what rotates and what does not
    gemma3n: Gemma3nSpec | None = None
    recurrent: RecurrentSpec | None = None  # the mixer with a state; None: all layers have attention only
    mixers: tuple[MixerKind, ...] = ()  # one per layer; empty: attention in all
    has_single_blocks: bool = False  # a layer is a mixer or an MLP, not both
    gates_attention: bool = False  # attention's output is multiplied by the sigmoid of a gate
    weight_scales: tuple[tuple[str, float], ...] = ()  # factors of layers' tensors at load, by name in a layer
    num_positions: int | None = None  # learned position embeddings; None: none
    position_offset: int = 0  # so many of them come before that of the first token
    embedding_norm: bool = False  # embeddings are normed
    alibi_slopes: tuple[float, ...] = ()  # one per query head; empty: no ALiBi
    has_sinks: bool = False  # each query head has a learned score without a value: attention to no token
    clip_qkv: float | None = None  # queries, keys and values are clamped to this size
    embedding_scale: float | None = None
    rounds_embedding_scale: bool = False  # to the type of the table
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logit_scale: float | None = None
    logit_softcap: float | None = None
    dtype: str = "float32"  # of the checkpoint
    quantization: StoredQuantization | None = None  # of the checkpoint's matrices
    packed_bits: PackedBits | None = None  # of a GGUF file's matrices on a CPU; None: float32
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pooler: PoolerSpec | None = None  # of an embedding model or a classifier, which has no LM head; None: it generates

    @property
    def is_encoder(self) -> bool:
        """Whether attention sees the whole text, in both directions (`EncoderSpec`)."""
        return False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    @property
    def num_linear_params(self) -> int:
        """Number of weights in the layers' matrices, without embeddings and head."""
        return sum(math.prod(s) for name, s in self.tensor_shapes().items() if name.endswith("_proj.weight"))

    @property
    def mlp_width(self) -> int:
        """Intermediate elements per token in an MLP, summed over the experts of a token."""
        if self.mixture is None:
            return self.intermediate_size
        of_experts = self.mixture.num_chosen * self.mixture.expert_size + (self.mixture.shared_size or 0)
        return max(of_experts, self.intermediate_size if len(self.mixture.layers) < self.num_layers else 0)

    @property
    def kv_elements_per_token(self) -> int:
        """Elements in the cache per token, of all layers."""
        of_layer = 2 * self.kv_size if self.latent is None else self.latent.cache_dim
        return self.num_attention_layers * of_layer

    @property
    def num_cache_layers(self) -> int:
        """Layers with keys and values of their own; they come first."""
        return self.num_layers - (0 if self.gemma3n is None else self.gemma3n.num_shared_layers)

    @property
    def num_attention_layers(self) -> int:
        """Layers with blocks of the KV cache."""
        return sum(self.has_attention(index) for index in range(self.num_cache_layers))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of one slot's recurrent state, in an engine whose activations have `itemsize` bytes."""
        if self.recurrent is None:
            return 0
        num_layers = sum(self.has_state(index) for index in range(self.num_layers))
        return num_layers * state_bytes(self.recurrent, itemsize)

    def mixer_of(self, layer: int) -> MixerKind:
        return self.mixers[layer] if self.mixers else "attention"

    def has_attention(self, layer: int) -> bool:
        return self.mixer_of(layer) in ("attention", "both")

    def has_state(self, layer: int) -> bool:
        return self.mixer_of(layer) in ("recurrent", "both")

    def has_mlp(self, layer: int) -> bool:
        """Whether the layer has an MLP or a mixture of experts."""
        return not self.has_single_blocks or self.mixer_of(layer) == "none"

    def kv_source(self, layer: int) -> int | None:
        """Returns the earlier layer whose keys and values this one uses: the last one with the same window. None: its
        own."""
        if layer < self.num_cache_layers:
            return None
        return max(i for i in range(self.num_cache_layers) if self.windows[i] == self.windows[layer])

    @property
    def attention_activations(self) -> int:
        """Elements per token that attention reads and writes beside the cache."""
        if self.latent is None:
            return self.q_size + 2 * self.kv_size
        return self.q_size + self.num_heads * (2 * self.latent.cache_dim + self.latent.kv_rank)

    def window_of(self, layer: int, max_len: int) -> int | None:
        """Returns the layer's window, or None if no context of up to `max_len` exceeds it."""
        window = self.windows[layer]
        return None if window is None or window >= max_len else window

    def has_mixture(self, layer: int) -> bool:
        return self.mixture is not None and layer in self.mixture.layers

    def rope_of(self, layer: int) -> RopeSpec:
        if layer in self.ropeless_layers:
            return RopeSpec(kind="none")
        return self.rope if self.local_rope is None or self.windows[layer] is None else self.local_rope

    def grows_queries(self, layer: int) -> bool:
        growth = self.query_growth
        return growth is not None and growth.rotated_layers == (layer not in self.ropeless_layers)

    def tensor_shapes(self) -> dict[str, Shape]:
        """Returns every tensor that a checkpoint of this model must have, under its canonical name."""
        shapes = self.outer_shapes()
        for index in range(self.num_layers):
            shapes |= self.layer_shapes(index)
        return shapes

    def outer_shapes(self) -> dict[str, Shape]:
        table = (self.vocab_size, self.hidden_size)
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": table, **self._norm_shapes("model.norm")}
        if self.gemma3n is not None:
            shapes |= self.gemma3n.outer_shapes(self.hidden_size, self.num_layers)
        if self.embedding_norm:
            shapes |= self._norm_shapes("model.embed_norm")
        if self.num_positions is not None:
            shapes["model.embed_positions.weight"] = (self.num_positions, self.hidden_size)
        if self.pooler is not None:
            return shapes | self.head_shapes()
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = table
        if self.head_bias:
            shapes["lm_head.bias"] = table[:1]
        return shapes

    def head_shapes(self) -> dict[str, Shape]:
        """Returns the tensors of a pooler's head."""
        shapes: dict[str, Shape] = {}
        for index, layer in enumerate(() if self.pooler is None else self.pooler.layers):
            if layer.from_tokens:
                if not self.tie_embeddings:
                    shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
                continue
            shapes |= _head_layer_shapes(f"head.{index}", layer)
        return shapes

    def layer_shapes(self, index: int) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for name in self._layer_norms():
            shapes |= self._norm_shapes(name)
        if self.gemma3n is not None:
            shapes |= self.gemma3n.layer_shapes(self.hidden_size)
        if self.has_attention(index):
            shapes |= self._attention_vectors()
        if self.recurrent is not None and self.has_state(index):
            shapes |= {f"recurrent.{name}": shape for name, shape in self.recurrent.vectors().items()}
        if self.has_mixture(index) and self.mixture is not None and self.mixture.corrects_choice:
            shapes["mlp.router_correction.bias"] = (self.mixture.num_experts,)
        for name, shape, has_bias in self._layer_matrices(index):
            shapes[f"{name}.weight"] = shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
        if self.kv_source(index) is not None:
            shapes = {name: s for name, s in shapes.items() if not name.startswith(("self_attn.k_", "self_attn.v_"))}
        return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}

    def _attention_vectors(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        if self.head_qk_norm:
            shapes |= {
                "self_attn.q_norm.weight": (self.num_heads, self.head_dim),
                "self_attn.k_norm.weight": (self.num_kv_heads, self.head_dim),
            }
        if self.wide_qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.q_size,), "self_attn.k_norm.weight": (self.kv_size,)}
        if self.latent is not None:
            shapes["self_attn.kv_a_layernorm.weight"] = (self.latent.kv_rank,)
            if self.latent.query_rank is not None:
                shapes["self_attn.q_a_layernorm.weight"] = (self.latent.query_rank,)
        if self.has_sinks:
            shapes["self_attn.sinks.bias"] = (self.num_heads,)
        return shapes

    @property
    def mlp_norm_name(self) -> str:
        if self.shares_norm or self.has_single_blocks:
            return "input_layernorm"
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    def _layer_norms(self) -> list[str]:
        before = ["input_layernorm", self.mlp_norm_name] if self.pre_norms else []
        return before + (["post_attention_layernorm", "post_feedforward_layernorm"] if self.post_norms else [])

    def _norm_shapes(self, name: str) -> dict[str, Shape]:
        if self.bare_norms:
            return {}
        kinds = ("weight", "bias") if self.norm_bias else ("weight",)
        return {f"{name}.{kind}": (self.hidden_size,) for kind in kinds}

    def _layer_matrices(self, index: int) -> list[Matrix]:
        matrices: list[Matrix] = []
        if self.has_attention(index):
            matrices += self._attention_matrices() if self.latent is None else self._latent_matrices(self.latent)
        if self.recurrent is not None and self.has_state(index):
            matrices += [(f"recurrent.{name}", shape, biased) for name, shape, biased in self.recurrent.matrices()]
        if self.has_mixture(index):
            matrices += self._mixture_matrices()
        elif self.has_mlp(index):
            matrices += self._mlp_matrices("mlp", self.intermediate_size)
        return matrices

    def _attention_matrices(self) -> list[Matrix]:
        hidden = self.hidden_size
        gate: Matrix = ("self_attn.output_gate_proj", (self.q_size, hidden), self.qkv_bias)
        return [
            ("self_attn.q_proj", (self.q_size, hidden), self.qkv_bias),
            ("self_attn.k_proj", (self.kv_size, hidden), self.qkv_bias),
            ("self_attn.v_proj", (self.kv_size, hidden), self.qkv_bias),
            *([gate] if self.gates_attention else []),
            ("self_attn.o_proj", (hidden, self.q_size), self.output_bias),
        ]

    def _latent_matrices(self, latent: LatentSpec) -> list[Matrix]:
        hidden, heads, rank = self.hidden_size, self.num_heads, latent.query_rank
        queries: list[Matrix] = [("self_attn.q_proj", (self.q_size, hidden), False)]
        if rank is not None:
            queries = [
                ("self_attn.q_a_proj", (rank, hidden), False),
                ("self_attn.q_b_proj", (self.q_size, rank), False),
            ]
        return [
            *queries,
            ("self_attn.kv_a_proj", (latent.kv_rank + latent.rotary_dim, hidden), False),
            ("self_attn.kv_b_proj", (heads * (latent.still_dim + latent.value_dim), latent.kv_rank), False),
            ("self_attn.o_proj", (hidden, heads * latent.value_dim), False),
        ]

    def _mlp_matrices(self, name: str, width: int) -> list[Matrix]:
        gate = [(f"{name}.gate_proj", (width, self.hidden_size), self.mlp_bias)] if self.is_gated else []
        return [
            *gate,
            (f"{name}.up_proj", (width, self.hidden_size), self.mlp_bias),
            (f"{name}.down_proj", (self.hidden_size, width), self.mlp_bias),
        ]

    def _mixture_matrices(self) -> list[Matrix]:
        mixture = self.mixture
        assert mixture is not None
        matrices: list[Matrix] = [("mlp.router", (mixture.num_experts, self.hidden_size), mixture.router_bias)]
        for expert in range(mixture.num_experts):
            matrices += self._expert_matrices(f"mlp.experts.{expert}", mixture)
        if mixture.shared_size is not None:
            matrices += self._mlp_matrices("mlp.shared_expert", mixture.shared_size)
        if mixture.gates_shared:
            matrices.append(("mlp.shared_expert_gate", (1, self.hidden_size), False))
        return matrices

    def _expert_matrices(self, name: str, mixture: MixtureSpec) -> list[Matrix]:
        if not mixture.interleaves:
            return self._mlp_matrices(name, mixture.expert_size)
        return [
            (f"{name}.gate_up_proj", (2 * mixture.expert_size, self.hidden_size), self.mlp_bias),
            (f"{name}.down_proj", (self.hidden_size, mixture.expert_size), self.mlp_bias),
        ]


def _head_layer_shapes(name: str, layer: HeadLayer) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (layer.out_size, layer.in_size)}
    if layer.has_bias:
        shapes[f"{name}.bias"] = (layer.out_size,)
    if layer.has_norm:
        shapes[f"{name}.norm.weight"] = (layer.out_size,)
    if layer.has_norm_bias:
        shapes[f"{name}.norm.bias"] = (layer.out_size,)
    return shapes
