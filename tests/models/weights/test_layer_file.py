"""A file without a name that holds layers."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest
import torch

from headrace.errors import ConfigError
from headrace.models.weights.layer_file import PAGE, LayerFile, padded


def test_layers_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = LayerFile(tmp_path / "new")
    written = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (PAGE + 256, 512, 3 * PAGE)]
    for layer in written:
        file.allocate(len(layer)).copy_(layer)
    file.write_back()
    buffer = torch.frombuffer(mmap.mmap(-1, 3 * PAGE), dtype=torch.uint8)
    for place in (2, 0, 1, 0):
        file.read(file.layers[place], buffer)
        assert torch.equal(buffer[: len(written[place])], written[place])
    assert padded(1) == PAGE and not list((tmp_path / "new").iterdir())


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"has no room for another 1\.00 GiB of weights after 0\.00 GiB"):
        LayerFile(tmp_path).allocate(1 << 30)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        LayerFile(tmp_path / "file")
