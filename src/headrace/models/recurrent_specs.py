"""Mixers with a recurrent state, in numbers: their tensors and the size of their state. Imports no torch.

A state has two parts for each slot: the last inputs of a causal convolution, and (but for a short convolution) one
matrix per head, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = tuple[int, ...]
Matrix = tuple[str, Shape, bool]  # name, shape, and whether it has a bias
GatedNorm = Literal["none", "gate_first", "norm_first"]  # where the gate is relative to the norm of a mixer's output


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """LFM2: a convolution over a few tokens, between two gates."""

    hidden_size: int
    kernel_size: int
    has_bias: bool

    @property
    def conv_size(self) -> int:
        """Channels of the convolution."""
        return self.hidden_size

    @property
    def matrix_shape(self) -> Shape | None:
        """Shape of the state's matrices, all heads of a slot; None: there are none."""
        return None

    def matrices(self) -> list[Matrix]:
        return [
            ("in_proj", (3 * self.hidden_size, self.hidden_size), self.has_bias),
            ("conv1d", (self.conv_size, 1, self.kernel_size), self.has_bias),
            ("out_proj", (self.hidden_size, self.hidden_size), self.has_bias),
        ]

    def vectors(self) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba 2: a state space with one scalar decay per head. Heads share their B and C in groups."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    has_conv_bias: bool
    has_bias: bool  # of the projections before the convolution
    has_output_bias: bool
    norm: GatedNorm

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def matrix_shape(self) -> Shape | None:
        return (self.num_heads, self.head_dim, self.state_size)

    def matrices(self) -> list[Matrix]:
        hidden, inner, of_groups = self.hidden_size, self.inner_size, self.num_groups * self.state_size
        sizes = {"gate_proj": inner, "x_proj": inner, "b_proj": of_groups, "c_proj": of_groups}
        return [
            *((name, (size, hidden), self.has_bias) for name, size in sizes.items()),
            ("dt_proj", (self.num_heads, hidden), self.has_bias),
            ("conv1d", (self.conv_size, 1, self.kernel_size), self.has_conv_bias),
            ("out_proj", (hidden, inner), self.has_output_bias),
        ]

    def vectors(self) -> dict[str, Shape]:
        by_head: dict[str, Shape] = dict.fromkeys(("A_log.bias", "D.bias", "dt_bias.bias"), (self.num_heads,))
        return by_head if self.norm == "none" else by_head | {"norm.weight": (self.inner_size,)}


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated delta net: linear attention whose state forgets by a gate, and overwrites what a key held before."""

    hidden_size: int
    num_key_heads: int
    num_heads: int  # of values; several share a key head
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def conv_size(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def matrix_shape(self) -> Shape | None:
        return (self.num_heads, self.key_dim, self.value_dim)

    def matrices(self) -> list[Matrix]:
        hidden, keys, values = self.hidden_size, self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        sizes = {"q_proj": keys, "k_proj": keys, "v_proj": values, "z_proj": values}
        sizes |= {"b_proj": self.num_heads, "a_proj": self.num_heads}
        return [
            *((name, (size, hidden), False) for name, size in sizes.items()),
            ("conv1d", (self.conv_size, 1, self.kernel_size), False),
            ("out_proj", (hidden, values), False),
        ]

    def vectors(self) -> dict[str, Shape]:
        by_head: dict[str, Shape] = dict.fromkeys(("A_log.bias", "dt_bias.bias"), (self.num_heads,))
        return by_head | {"norm.weight": (self.value_dim,)}


RecurrentSpec = ShortConvSpec | Mamba2Spec | GatedDeltaSpec


def state_bytes(spec: RecurrentSpec, itemsize: int) -> int:
    """Bytes of one layer's state of one slot, in an engine whose activations have `itemsize` bytes."""
    of_conv = (spec.kernel_size - 1) * spec.conv_size * itemsize
    shape = spec.matrix_shape
    return of_conv + (0 if shape is None else 4 * shape[0] * shape[1] * shape[2])
