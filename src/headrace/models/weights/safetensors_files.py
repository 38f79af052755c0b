"""Weights from the safetensors files of a directory, memory-mapped; each tensor is copied once, into its final
tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.shards import WHOLE, Part
from headrace.models.spec import Shape
from headrace.models.weights.source import StoredRows

if TYPE_CHECKING:
    from torch import Tensor

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_REMAP_AFTER_BYTES = 128 << 20  # pages of a mapping stay resident until it is closed


class SafetensorsFiles:
    """Keeps one mapping open at a time, and renews it now and then to release pages that were read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._shapes: dict[str, Shape] = {}  # of every file opened so far
        self._handle: Any = None
        self._open_path: Path | None = None
        self._bytes_mapped = 0  # read from the open mapping
        self._bytes_read = 0

    @property
    def num_bytes_read(self) -> int:
        return self._bytes_read

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> Shape:
        if name not in self._shapes:
            handle = self._open(self._files[name])
            self._shapes |= {key: tuple(handle.get_slice(key).get_shape()) for key in handle.keys()}  # noqa: SIM118
        return self._shapes[name]

    def fill(self, name: str, out: Tensor, part: Part = WHOLE) -> None:
        self.fill_with(name, out, part.of)

    def fill_with(self, name: str, out: Tensor, part_of: Callable[[Tensor], Tensor]) -> None:
        """Writes the part of the stored tensor that `part_of` returns into `out`."""
        tensor = self._open(self._files[name]).get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise UnsupportedModelError(
                f"tensor {name!r} is stored as {tensor.dtype}; quantized safetensors are not supported; use a GGUF file"
            )
        part = part_of(tensor)
        is_transposed = part.dim() == 2 and part.stride(0) == 1
        out.copy_(part.t().to(out.device).t() if is_transposed else part)  # a GPU transposes faster than a CPU
        self._bytes_read += part.nbytes
        self._bytes_mapped += part.nbytes
        if self._bytes_mapped > _REMAP_AFTER_BYTES:
            self._close()

    def stored_rows(self, name: str, part: Part = WHOLE) -> StoredRows | None:
        return None

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Maps each tensor to its file."""
        index = self._directory / _INDEX
        if not index.exists():
            return {name: path for path in safetensors_paths(self._directory) for name in self._open(path).keys()}  # noqa: SIM118
        files = {name: self._directory / file for name, file in read_json(index)["weight_map"].items()}
        for path in sorted(set(files.values())):
            if not path.exists():
                raise ModelError(f"{index} names {path.name}, which does not exist; fetch the model again")
        return files

    def _open(self, path: Path) -> Any:
        if self._open_path != path:
            self._close()
            self._handle, self._open_path = _safe_open(path), path
        return self._handle

    def _close(self) -> None:
        self._handle, self._open_path, self._bytes_mapped = None, None, 0


def _safe_open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} cannot be read as safetensors ({error}); fetch it again") from error


def safetensors_paths(directory: Path) -> list[Path]:
    """Returns the files of the model. `consolidated` files repeat it in the original authors' layout."""
    if (directory / _SINGLE).exists():
        return [directory / _SINGLE]
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith("consolidated"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content
