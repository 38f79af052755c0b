"""Decoders whose layers stream: the same logits as without, whatever the layers hold."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.config import Quantization
from headrace.dist.mesh import Mesh
from headrace.kernels.quantized import FP8, Fp8Weight, quantize
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.models.decoder import Layer
from headrace.models.layers import Mlp
from headrace.models.shards import Shards
from headrace.models.staged_reads import StagedReads
from headrace.models.streamed_layers import ALIGNMENT
from headrace.models.weight_sizes import weight_sizes
from headrace.models.weights.host_layers import Offload, over, to_host, with_tensors
from headrace.models.weights.layer_file import LayerFile, padded
from headrace.models.weights.load import with_max_len
from tests.dist.ranks import on_ranks
from tests.models.test_hybrids import MODELS as HYBRIDS
from tests.models.test_more_families import build
from tests.models.test_parity import FAMILIES, PagedRun, randomize

pytestmark = pytest.mark.parity

TEXT = torch.arange(1, 13)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class LateCopies:
    """Copies as late as it may, after the buffer has been filled with other bytes."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._waiting: dict[int, Tensor] = {}

    def wait_for_computation(self) -> None:
        pass

    def copy(self, source: Tensor, buffer: int) -> None:
        self._buffers[buffer].fill_(255)
        self._waiting[buffer] = source

    def let_computation_wait(self, buffer: int) -> None:
        source = self._waiting.pop(buffer)
        self._buffers[buffer][: len(source)].copy_(source)


def offload(*indexes: int) -> Offload:
    return Offload(
        frozenset(indexes),
        allocate_host=lambda num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8),
        allocate_buffers=lambda number, size: [torch.zeros(size, dtype=torch.uint8) for _ in range(number)],
        queue_for=LateCopies,
    )


class LateCopy:
    """Ends when somebody waits for it."""

    def __init__(self, source: Tensor, buffer: Tensor) -> None:
        self._source, self._buffer = source, buffer
        self._lock, self._has_ended = Lock(), False

    def end(self) -> None:
        with self._lock:
            if not self._has_ended:
                self._buffer[: len(self._source)].copy_(self._source)
            self._has_ended = True


class LateStagedCopies(LateCopies):
    """The same with layers on a disk: a copy from a staging buffer ends when the computation needs it, or when the
    thread that reads the disk waits for it. A read that does not wait would change what is copied."""

    def __init__(self, buffers: list[Tensor], reads: StagedReads) -> None:
        super().__init__(buffers)
        self._reads = reads
        self._copies: dict[int, LateCopy] = {}

    def copy(self, source: Tensor, buffer: int) -> None:
        staged = self._reads.take(source)
        self._buffers[buffer].fill_(255)
        bytes_ = source if staged is None else staged[: len(source)]
        self._copies[buffer] = LateCopy(bytes_, self._buffers[buffer])
        if staged is not None:
            self._reads.give_back(staged, self._copies[buffer].end)

    def let_computation_wait(self, buffer: int) -> None:
        self._copies[buffer].end()


def offload_with_disk(directory: Path, indexes: range, disk_indexes: range) -> Offload:
    file = LayerFile(directory)

    def queue_for(buffers: list[Tensor]) -> LateStagedCopies:
        file.write_back()
        staging = [page_aligned(padded(len(buffers[0]))) for _ in range(2)]
        return LateStagedCopies(buffers, StagedReads(file.read, file.layers, staging))

    return replace(
        offload(*indexes),
        disk_indexes=frozenset(disk_indexes),
        allocate_on_disk=file.allocate,
        queue_for=queue_for,
    )


def page_aligned(num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


@pytest.mark.parametrize("first_on_disk", [0, 1])
def test_layers_that_come_from_a_disk_give_the_same_logits(first_on_disk: int, tmp_path: Path) -> None:
    """With all of them on the disk, and with every second one, three steps each."""
    save(tmp_path / "model", "llama, biased")
    indexes = range(open_checkpoint(str(tmp_path / "model")).spec.num_layers)
    disk = offload_with_disk(tmp_path / "disk", indexes, indexes[first_on_disk :: 1 + first_on_disk])
    streamed = load(tmp_path / "model", offload=disk)
    assert torch.equal(logits(streamed), logits(load(tmp_path / "model")))
    assert not list((tmp_path / "disk").iterdir())  # the file has no name, so that nothing is left behind


def load(directory: Path, quantization: Quantization | None = None, **options: Any) -> Decoder:
    """In bfloat16, whose operations are the PyTorch references."""
    checkpoint = open_checkpoint(str(directory))
    return load_decoder(checkpoint, dtype=torch.bfloat16, device="cpu", quantization=quantization, **options)


def logits(decoder: Decoder) -> Tensor:
    run = PagedRun(decoder, [TEXT])
    for count in (8, 1, 3):
        run.step([(0, count)])
    return torch.cat(run.logits[0])


def save(directory: Path, family: str) -> None:
    found = (HYBRIDS | FAMILIES).get(family)
    model = build(family) if found is None else found()
    randomize(model)
    model.bfloat16().save_pretrained(directory)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("llama, biased", None),
        ("llama, biased", "fp8"),
        pytest.param("gemma 3", None, marks=pytest.mark.slow),
        ("llama 4, dense layers, two experts a token", "fp8"),
        pytest.param("deepseek v3", None, marks=pytest.mark.slow),
        pytest.param("gemma 3n", None, marks=pytest.mark.slow),
        ("falcon-h1", None),
    ],
)
def test_a_decoder_whose_layers_stream_gives_the_same_logits(
    family: str, quantization: Quantization | None, tmp_path: Path
) -> None:
    save(tmp_path, family)
    expected = logits(load(tmp_path, quantization))
    num_layers = open_checkpoint(str(tmp_path)).spec.num_layers
    for indexes in (range(num_layers), range(1, num_layers)):
        streamed = load(tmp_path, quantization, offload=offload(*indexes))
        assert streamed.stream is not None and list(streamed.stream.weights) == list(indexes)
        assert torch.equal(logits(streamed), expected)


def test_no_weight_of_a_streamed_layer_stays_on_the_device(tmp_path: Path) -> None:
    """Its bytes in host memory are those that were estimated before the load, but for alignment and norms in float32,
    and a longer context changes only the shared tables."""
    save(tmp_path, "llama, biased")
    checkpoint = open_checkpoint(str(tmp_path))
    decoder = load(tmp_path, "fp8", max_len=32, offload=offload(0, 1, 2))
    sizes = weight_sizes(Shards(checkpoint.spec, Mesh()), element_bytes=2, kind="fp8", at_load=True)
    assert decoder.stream is not None
    for estimate, weights in zip(sizes.layers, decoder.stream.weights.values(), strict=True):
        assert estimate <= weights.nbytes < estimate + 16 * ALIGNMENT
    assert sizes.layers[2] > sizes.layers[1] + 2000  # the last down projection keeps its 16 bits
    assert torch.equal(logits(with_max_len(decoder, 64)), logits(load(tmp_path, "fp8", max_len=64)))


def test_ranks_stream_their_own_parts_of_the_layers(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    expected = on_ranks(2, lambda group: logits(load(tmp_path, group=group)))
    found = on_ranks(2, lambda group: logits(load(tmp_path, group=group, offload=offload(0, 1, 2))))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def gpu_linears() -> dict[str, Any]:
    """One of each form that a GPU has for a matrix."""
    from headrace.kernels.gpu.experts import pack_experts, pack_quantized_experts
    from headrace.kernels.gpu.few_rows import Linear
    from headrace.kernels.gpu.linear import pack_with_copy
    from headrace.kernels.gpu.quantized import pack_quantized

    weight, bias = torch.randn(64, 256), torch.randn(64).bfloat16()
    kinds = ("fp8", "int8", "int4")
    packed = {kind: pack_quantized(quantize(weight, kind), bias, torch.bfloat16) for kind in kinds}
    packed |= {"plain": Linear(weight.bfloat16(), bias), "copy": pack_with_copy(weight.bfloat16(), bias)[0]}
    in_blocks = Fp8Weight(torch.randn(256, 256).to(FP8), torch.rand(2, 2))
    packed |= {"experts in blocks": pack_quantized_experts(in_blocks, 2, torch.bfloat16)}
    return packed | {"experts": pack_experts(weight.view(2, 32, 256))}


def tensors_of(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(value, note)
    return found


@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "plain", "copy", "experts", "experts in blocks"])
def test_every_form_of_a_gpus_weights_moves_with_its_layer(name: str) -> None:
    linear = gpu_linears()[name]
    layer = Layer(None, None, None, None, Mlp(linear, linear, "silu", True), None, is_parallel=False)
    host = to_host(layer, frozenset(), lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    buffer = torch.zeros(len(host.weights) + 1024, dtype=torch.uint8)
    moved = over(host, buffer)
    buffer[: len(host.weights)].copy_(host.weights)
    assert isinstance(moved.mlp, Mlp) and type(moved.mlp.up) is type(linear)
    before, after = tensors_of(layer), tensors_of(moved)
    assert len(before) == len(after) >= 2
    for old, new in zip(before, after, strict=True):
        assert (old.dtype, old.shape, old.stride()) == (new.dtype, new.shape, new.stride())
        assert torch.equal(old.float(), new.float())
        assert new.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert new.data_ptr() % 16 == buffer.data_ptr() % 16
