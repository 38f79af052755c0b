"""Reading safetensors: whole tensors and parts of them, in any type, with exactly the bytes that are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.stored_tensors import StoredPart
from headrace.models.weights import file_reader
from headrace.models.weights.rearranged import regions_of
from headrace.models.weights.safetensors_files import SafetensorsFiles
from headrace.models.weights.source import Slice

ROWS, COLUMNS = 96, 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors take several pieces and threads, the last of them not full."""
    monkeypatch.setattr(file_reader, "PIECE_BYTES", 1000)


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS).to(torch.bfloat16)


def files_of(directory: Path, **tensors: torch.Tensor) -> SafetensorsFiles:
    save_file(tensors, directory / "model.safetensors")
    return SafetensorsFiles(directory)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_tensor_is_read_in_any_type(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    matrix = torch.randn(ROWS, COLUMNS).to(stored)
    vector = torch.randn(777).to(stored)
    files = files_of(tmp_path, matrix=matrix, vector=vector)
    for name, tensor in (("matrix", matrix), ("vector", vector)):
        out = torch.empty(tensor.shape, dtype=wanted)
        files.fill(name, out)
        assert torch.equal(out, tensor.to(wanted))
    assert files.num_bytes_read == matrix.nbytes + vector.nbytes


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "part", [Slice(range(24, 48)), Slice(range(ROWS), range(10, 30)), Slice(range(5, 90), range(39, 40))]
)
def test_a_part_is_read_with_its_own_bytes_only(
    tmp_path: Path, matrix: torch.Tensor, part: Slice, wanted: torch.dtype
) -> None:
    files = files_of(tmp_path, matrix=matrix)
    expected = part.of(matrix)
    out = torch.empty(expected.shape, dtype=wanted)
    files.fill("matrix", out, part)
    assert torch.equal(out, expected.to(wanted))
    assert files.num_bytes_read == 2 * expected.numel()


@pytest.mark.parametrize("part", [None, Slice(range(8, 20), range(4, 12))])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_interleaved_and_transposed_parts_are_found(
    tmp_path: Path, part: Slice | None, is_transposed: bool, num_groups: int
) -> None:
    """Ours are rows 6 to 14 of each group of 32: [groups, 32, columns] -> [groups * 8, columns]."""
    theirs = torch.randn(32 * num_groups, COLUMNS)
    ours = theirs.view(num_groups, 32, COLUMNS)[:, 6:14].reshape(-1, COLUMNS)
    files = files_of(tmp_path, fused=(theirs.t() if is_transposed else theirs).contiguous())
    stored = StoredPart("fused", 6, 8, 32, num_groups, is_transposed)
    rows = range(len(ours)) if part is None else range(min(part.rows.start, len(ours) - 1), len(ours))
    columns = None if part is None else part.columns
    expected = Slice(rows, columns).of(ours)
    out = torch.empty(expected.shape)
    files.fill_regions("fused", out, regions_of(stored, rows, columns, files.shape("fused")))
    assert torch.equal(out, expected)
    assert files.num_bytes_read == expected.nbytes


def test_a_member_of_a_stack_is_read_alone(tmp_path: Path) -> None:
    stack = torch.randn(4, 24, 16)  # [experts, in, out]
    files = files_of(tmp_path, stack=stack)
    stored = StoredPart("stack", 0, 8, 16, is_transposed=True, member=2, num_members=4)
    out = torch.empty(8, 24)
    files.fill_regions("stack", out, regions_of(stored, range(8), None, files.shape("stack")))
    assert torch.equal(out, stack[2].t()[:8])
    assert files.num_bytes_read == out.nbytes


def test_a_row_larger_than_a_piece_is_read(tmp_path: Path) -> None:
    matrix = torch.randn(3, 5000).to(torch.bfloat16)
    files, out = files_of(tmp_path, matrix=matrix), torch.empty(3, 5000)
    files.fill("matrix", out)
    assert torch.equal(out, matrix.float())


def test_a_file_that_became_shorter_is_named(tmp_path: Path, matrix: torch.Tensor) -> None:
    files = files_of(tmp_path, matrix=matrix)
    files.shape("matrix")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ModelError, match=r"model.safetensors ends at byte [\d,]+, within a tensor"):
        files.fill("matrix", torch.empty(ROWS, COLUMNS))


def test_a_truncated_file_is_refused_when_opened(tmp_path: Path, matrix: torch.Tensor) -> None:
    files = files_of(tmp_path, matrix=matrix)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        files.shape("matrix")


def test_an_index_that_names_a_tensor_of_no_file_is_refused(tmp_path: Path, matrix: torch.Tensor) -> None:
    files = files_of(tmp_path, matrix=matrix)
    index = {"weight_map": {"matrix": "model.safetensors", "other": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="lacks the tensor 'other'"):
        files.shape("other")


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    files = files_of(tmp_path, matrix=torch.zeros(4, 4, dtype=torch.float8_e4m3fn))
    with pytest.raises(UnsupportedModelError, match=r"'matrix' is stored as torch.float8_e4m3fn"):
        files.fill("matrix", torch.empty(4, 4))


_FILL = """
import resource, sys
from pathlib import Path
import torch
from headrace.models.weights.reader import allocate
from headrace.models.weights.safetensors_files import SafetensorsFiles
files = SafetensorsFiles(Path(sys.argv[1]))
dtype = getattr(torch, sys.argv[2])
warm = torch.ones(1 << 16).to(torch.bfloat16).to(dtype)  # thread pools and libraries
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = [allocate(files.shape(name), dtype, torch.device("cpu")) for name in files.names()]
for name, tensor in zip(files.names(), out):
    files.fill(name, tensor)
grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
print(grown - sum(tensor.nbytes for tensor in out))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_grows_by_the_tensors_and_a_bounded_staging_size(tmp_path: Path, dtype: str) -> None:
    """Ten matrices of 16 MiB: read through a mapping, or at once, they would take 160 MiB more."""
    save_file(
        {f"m{index}": torch.zeros(2048, 4096, dtype=torch.bfloat16) for index in range(10)},
        tmp_path / "model.safetensors",
    )
    done = subprocess.run(
        [sys.executable, "-c", _FILL, str(tmp_path), dtype], capture_output=True, text=True, check=True
    )
    staging = 8 * (4 << 20)
    assert int(done.stdout) < staging + (24 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32, torch.float16])
def test_tensors_reach_a_gpu_through_pinned_buffers(tmp_path: Path, wanted: torch.dtype) -> None:
    """Many more pieces than buffers: a buffer is filled again only when its copy has ended."""
    matrix = torch.randn(4096, 1024).to(torch.bfloat16)
    files = files_of(tmp_path, matrix=matrix)
    for part in (None, Slice(range(100, 900), range(128, 256))):
        expected = matrix if part is None else part.of(matrix)
        out = torch.empty(expected.shape, dtype=wanted, device="cuda")
        files.fill("matrix", out, part)
        assert torch.equal(out.cpu(), expected.to(wanted))
    stored = StoredPart("matrix", 0, 1024, 1024, is_transposed=True)
    out = torch.empty(1024, 4096, dtype=wanted, device="cuda")
    files.fill_regions("matrix", out, regions_of(stored, range(1024), None, (4096, 1024)))
    assert torch.equal(out.cpu(), matrix.t().to(wanted))
