"""An output directory that appears whole or not at all: everything is written beside it, synced, and renamed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from headrace.errors import ConfigError, HeadraceError
from headrace.jobs.files import sync_directory

_MAX_FILE_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"


class OutputDirectory:
    """Collects tensors into files of a few GiB. A run that died leaves only the partial directory, which the next run
    replaces."""

    def __init__(self, path: Path, *, max_file_bytes: int = _MAX_FILE_BYTES) -> None:
        if path.exists():
            raise ConfigError(f"{path} exists already; give another directory, or remove it")
        self._path = path
        self.partial = path.with_name(path.name + ".partial")
        self._max_file_bytes = max_file_bytes
        self._tensors: dict[str, Tensor] = {}  # of the next file
        self._files: list[list[str]] = []  # names of tensors in each file
        self._num_bytes = 0
        shutil.rmtree(self.partial, ignore_errors=True)
        with self._writing():
            self.partial.mkdir(parents=True)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors so far."""
        return self._num_bytes

    def add(self, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and size + sum(each.nbytes for each in self._tensors.values()) > self._max_file_bytes:
            self._write_file()
        self._tensors |= {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        self._num_bytes += size

    def copy(self, source: Path) -> None:
        with self._writing():
            shutil.copyfile(source, self.partial / source.name)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        with self._writing():
            (self.partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def complete(self) -> None:
        """Writes what is left: from now on the partial directory can be read."""
        self._write_file()
        self._name_files()

    def publish(self) -> None:
        """Gives the complete directory its name."""
        with self._writing():
            for path in self.partial.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            sync_directory(self.partial)
            self.partial.rename(self._path)
            sync_directory(self._path.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            raise HeadraceError(
                f"{self.partial} cannot be written: {getattr(error, 'strerror', None) or error}"
            ) from error

    def _write_file(self) -> None:
        from safetensors.torch import save_file

        if self._tensors:
            path = self.partial / f"part-{len(self._files)}.safetensors"
            with self._writing():
                save_file(self._tensors, path, metadata={"format": "pt"})
            self._files.append(list(self._tensors))
            self._tensors = {}

    def _name_files(self) -> None:
        """Names the files as readers expect them, now that their number is known."""
        count = len(self._files)
        names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
        names = ["model.safetensors"] if count == 1 else names
        for at, name in enumerate(names):
            (self.partial / f"part-{at}.safetensors").rename(self.partial / name)
        if count > 1:
            weight_map = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": weight_map}
            self.write_json(_INDEX, index)
