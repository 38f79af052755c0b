"""Reads that are announced before the first one: in order, across tensors and files."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import ModelError
from headrace.models import load_decoder, open_checkpoint
from headrace.models.weights import file_reader
from headrace.models.weights.file_reader import FileReader
from headrace.models.weights.read_ahead import ReadAhead
from headrace.models.weights.safetensors_files import SafetensorsFiles
from tests.engine import tiny

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ByteRange:
    first: int
    num_bytes: int


class FileOfNumbers:
    """Has its offset at each byte. A read ends when `num_together` of them run."""

    def __init__(self, num_together: int) -> None:
        self._barrier = threading.Barrier(num_together, timeout=20)

    def read_into(self, piece: ByteRange, buffer: memoryview) -> int:
        self._barrier.wait()
        buffer[: piece.num_bytes] = bytes(range(piece.first, piece.first + piece.num_bytes))
        return piece.num_bytes


def test_pieces_of_later_tensors_are_read_before_they_are_asked_for() -> None:
    file = FileOfNumbers(num_together=4)
    ahead = ReadAhead(num_buffers=4, buffer_bytes=10, num_threads=4, is_pinned=False)
    tensors = [[ByteRange(0, 10), ByteRange(10, 7)], [ByteRange(50, 10)], [ByteRange(60, 10), *[ByteRange(70, 5)] * 4]]
    for pieces in tensors:
        ahead.announce(file, pieces)
    for piece in itertools.chain.from_iterable(tensors):
        assert ahead.is_next(file, piece)
        buffer = ahead.take()  # the first one would wait forever, if it were read alone
        expected = list(range(piece.first, piece.first + piece.num_bytes))
        assert buffer.rows(1, piece.num_bytes, torch.uint8).tolist() == [expected]
        ahead.give_back(buffer)
    assert ahead.is_empty


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry each time that reads begin anew, and for each piece that is read by itself."""
    found: list[Any] = []
    new, alone = file_reader._new_read_ahead, FileReader._one_by_one
    monkeypatch.setattr(file_reader, "_new_read_ahead", lambda **kind: found.append(kind) or new(**kind))
    monkeypatch.setattr(FileReader, "_one_by_one", lambda *given: found.append(given) or alone(*given))
    return found


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "gemma2"])
def test_a_model_is_read_as_it_was_announced(family: str, tmp_path: Path, created: list[Any]) -> None:
    tiny.save_model(tmp_path, family)
    checkpoint = open_checkpoint(str(tmp_path))
    load_decoder(checkpoint, dtype=torch.bfloat16)  # stored as float32: all of it goes through buffers
    assert created == [{"is_pinned": False}]
    assert checkpoint.weights is not None and checkpoint.weights.file_reader is not None
    assert checkpoint.weights.file_reader._ahead is None  # nothing is left


def test_tensors_are_right_in_another_order_than_announced(tmp_path: Path) -> None:
    tensors = {name: torch.randn(90, 40) for name in "abc"}
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    with files.file_reader.announcing(CPU):
        for name in "abc":
            files.fill(name, torch.empty(90, 40, dtype=torch.bfloat16, device="meta"))
    assert files.num_bytes_read == 0
    for name in "acb":
        out = torch.empty(90, 40, dtype=torch.bfloat16)
        files.fill(name, out)
        assert torch.equal(out, tensors[name].to(torch.bfloat16))


def test_an_error_of_a_read_ahead_of_its_use_is_raised_when_it_is_used(tmp_path: Path) -> None:
    save_file({"a": torch.randn(90, 40), "b": torch.randn(90, 40)}, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    with files.file_reader.announcing(CPU):
        for name in "ab":
            files.fill(name, torch.empty(90, 40, dtype=torch.bfloat16, device="meta"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])
    files.fill("a", torch.empty(90, 40, dtype=torch.bfloat16))
    with pytest.raises(ModelError, match="within a tensor"):
        files.fill("b", torch.empty(90, 40, dtype=torch.bfloat16))
