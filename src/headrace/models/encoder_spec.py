"""What an encoder is, in numbers. Imports no torch.

Attention sees the whole text in both directions, so there is no KV cache, and nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.spec import ModelSpec, Shape


@dataclass(frozen=True, slots=True)
class EncoderSpec(ModelSpec):
    """A BERT or one of its relatives. `windows` are how far a token sees to each side; None: the whole text."""

    num_types: int = 0  # of tokens: the first and the second text of a pair; 0: tokens have no type
    norms_after: bool = True  # the sum with the residual stream is normed, else what attention and MLP read

    @property
    def is_encoder(self) -> bool:
        return True

    @property
    def kv_elements_per_token(self) -> int:
        return 0

    def outer_shapes(self) -> dict[str, Shape]:
        hidden = self.hidden_size
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        if self.num_positions is not None:
            shapes["model.embed_positions.weight"] = (self.num_positions, hidden)
        if self.num_types:
            shapes["model.embed_types.weight"] = (self.num_types, hidden)
        shapes |= self._norm_shapes("model.embed_norm")
        if not self.norms_after:
            shapes |= self._norm_shapes("model.norm")
        return shapes | self.head_shapes()

    def layer_shapes(self, index: int) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        if self.has_attention_norm(index):
            shapes |= self._norm_shapes("attention_norm")
        shapes |= self._norm_shapes("mlp_norm")
        for name, shape, has_bias in self._layer_matrices(index):
            shapes[f"{name}.weight"] = shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
        return {f"model.layers.{index}.{name}": shape for name, shape in shapes.items()}

    def has_attention_norm(self, index: int) -> bool:
        """Where norms come first, the first layer has none: the embeddings are normed."""
        return self.norms_after or index > 0
