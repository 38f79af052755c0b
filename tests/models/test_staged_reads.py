"""Layers read ahead by a thread: each step gets its own, and no buffer is read into while a copy may read it."""

from __future__ import annotations

import gc
import threading
from threading import Semaphore

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ModelError
from headrace.models.staged_reads import StagedReads

TIMEOUT_S = 60


class Disk:
    """Layers of one number each, and how many were read."""

    def __init__(self, num_layers: int) -> None:
        self.layers = [torch.tensor([layer]) for layer in range(num_layers)]
        self.has_read = Semaphore(0)

    def read(self, layer: Tensor, buffer: Tensor) -> None:
        buffer.copy_(layer)
        self.has_read.release()


def buffers(number: int) -> list[Tensor]:
    return [torch.tensor([-1]) for _ in range(number)]


@given(
    num_layers=st.integers(1, 6),
    num_buffers=st.integers(1, 3),
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
)
def test_every_step_gets_its_layers_also_after_one_that_ended_early(
    num_layers: int, num_buffers: int, depths: list[int]
) -> None:
    disk = Disk(num_layers)
    reads = StagedReads(disk.read, disk.layers, buffers(num_buffers))
    for depth in depths:
        for layer in disk.layers[:depth]:
            found = reads.take(layer)
            assert found is not None and int(found) == int(layer)
            reads.give_back(found, lambda: None)


def test_a_layer_that_is_not_on_the_disk_is_not_waited_for() -> None:
    disk = Disk(1)
    assert StagedReads(disk.read, disk.layers, buffers(1)).take(torch.tensor([0])) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_is_read_into_again_when_its_copy_has_ended(waits: bool) -> None:
    """A copy that ends when it is waited for has its own layer. Without the wait it would have the next one."""
    disk, copied = Disk(2), []
    reads = StagedReads(disk.read, disk.layers, buffers(1))
    found = reads.take(disk.layers[0])
    assert found is not None

    def end_copy() -> None:
        copied.append(int(found))

    reads.give_back(found, end_copy if waits else lambda: None)
    for _ in range(2):  # the read of layer 0 and that of layer 1
        assert disk.has_read.acquire(timeout=TIMEOUT_S)
    if not waits:
        end_copy()
    assert copied == [0 if waits else 1]


def test_a_disk_that_fails_is_reported_by_every_step_that_needs_it() -> None:
    def fail(layer: Tensor, buffer: Tensor) -> None:
        raise OSError("no such device")

    disk = Disk(2)
    reads = StagedReads(fail, disk.layers, buffers(2))
    for layer in disk.layers:
        with pytest.raises(ModelError, match="cannot be read from cpu_offload_path: no such device"):
            reads.take(layer)


def test_the_thread_ends_with_its_owner() -> None:
    before = set(threading.enumerate())
    disk = Disk(2)
    reads = StagedReads(disk.read, disk.layers, buffers(1))
    (thread,) = (each for each in threading.enumerate() if each not in before and each.name == "weights-from-disk")
    del reads
    gc.collect()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
