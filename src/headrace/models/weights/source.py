"""What every origin of weights offers, and the check of its tensors against the spec."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from headrace.errors import ModelError
from headrace.models.spec import ModelSpec, Shape

if TYPE_CHECKING:
    from torch import Tensor

_NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix as its file has it: quantized, each row on its own."""

    raw: npt.NDArray[np.uint8]  # [rows, bytes]
    type_name: str


class WeightSource(Protocol):
    """Tensors under their canonical names (those of Hugging Face), each read straight to its place."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> Shape: ...

    def fill(self, name: str, out: Tensor) -> None:
        """Writes the tensor into `out`, in the type and on the device of `out`."""

    def stored_rows(self, name: str) -> StoredRows | None:
        """The matrix in its quantized form, or None where it has none."""


def check_tensors(source: WeightSource, spec: ModelSpec, *, where: object) -> None:
    """Every tensor that the spec needs is there in its shape, and nothing is there that would be ignored."""
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
    """Rotary tables that old checkpoints carry, and a second copy of tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and spec.tie_embeddings)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_NAMED_AT_MOST])
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more}"
