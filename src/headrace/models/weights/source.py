"""The protocol of every source of weights, and the check of its tensors against the spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models.shards import Part, Shards
from headrace.models.spec import ModelSpec, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.kernels.quantized import QuantizedWeight
    from headrace.models.weights.file_reader import FileReader

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix as stored in its file: quantized, each row on its own."""

    raw: npt.NDArray[np.uint8]  # [rows, bytes]
    type_name: str


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows of a tensor, and some columns of them. A rank of several reads only its own."""

    rows: range
    columns: range | None = None  # None: all

    def of(self, tensor: Tensor) -> Tensor:
        part = tensor[self.rows.start : self.rows.stop]
        return part if self.columns is None else part[:, self.columns.start : self.columns.stop]


class WeightSource(Protocol):
    """Tensors under their canonical names (those of Hugging Face), each read straight into its final tensor."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> Shape: ...

    def fill(self, name: str, out: Tensor, part: Slice | None = None) -> None:
        """Writes the tensor, or a part of it, into `out`, in the type and on the device of `out`."""

    def stored_rows(self, name: str, part: Slice | None = None) -> StoredRows | None:
        """Returns rows of the matrix in their quantized form, or None if it is not quantized."""

    def quantized(self, name: str, device: torch.device, part: Slice | None = None) -> QuantizedWeight | None:
        """Returns the matrix, or a part of it, in its quantized form, or None if it has none that a GPU multiplies."""

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors that were read from files so far."""

    @property
    def file_reader(self) -> FileReader | None:
        """What reads its files, if reads can be announced to it."""


@dataclass(frozen=True, slots=True)
class ShardedSource:
    """The parts of a source's tensors that one rank has, as tensors of their own."""

    source: WeightSource
    shards: Shards

    def names(self) -> Collection[str]:
        return self.source.names()

    def shape(self, name: str) -> Shape:
        return self.shards.part(name).shape(self.source.shape(name))

    def fill(self, name: str, out: Tensor) -> None:
        self.source.fill(name, out, self._slice(name))

    def stored_rows(self, name: str) -> StoredRows | None:
        return self.source.stored_rows(name, self._slice(name))

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return self.source.quantized(name, device, self._slice(name))

    def _slice(self, name: str) -> Slice | None:
        return slice_of(self.shards.part(name), self.source.shape(name))


def slice_of(part: Part, shape: Shape) -> Slice | None:
    """The rows and columns of a part of a tensor of this shape; None: all of it."""
    if part.is_whole:
        return None
    rows, columns = part.rows, part.columns
    return Slice(
        range(shape[0]) if rows is None else range(rows.start, rows.end),
        None if columns is None else range(columns.start, columns.end),
    )


def check_tensors(source: WeightSource, spec: ModelSpec, *, where: object) -> None:
    """Checks that every tensor of the spec exists with its shape, and that no tensor would be ignored."""
    expected, found = spec.tensor_shapes(), set(source.names())
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where} lacks {_listed(missing)}; first missing: shape {list(expected[missing[0]])}")
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise ModelError(
                f"{where}: tensor {name!r} has shape {list(source.shape(name))}, its config implies {list(shape)}"
            )
    unread = sorted(name for name in found.difference(expected) if not _is_harmless(name, spec))
    if unread:
        raise ModelError(
            f"{where} has {_listed(unread)} that its config does not account for and that would be ignored"
        )


def _is_harmless(name: str, spec: ModelSpec) -> bool:
    """Accepts rotary tables that old checkpoints contain, a second copy of tied embeddings, and an LM head that a
    pooling model does not use."""
    has_other_head = spec.tie_embeddings or spec.pooler is not None
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and has_other_head)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMED])
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
