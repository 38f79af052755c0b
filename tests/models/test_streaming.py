"""The order of copies and computation on a device that runs both at any speed: only queued waits order them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.streamed_layers import NUM_BUFFERS, choose_streamed, spread, with_layers_on_disk
from headrace.models.streaming import LayerStream


class RecordedQueues:
    """Two queues, copies and computation. Each operation knows all operations that have certainly ended before it."""

    def __init__(self) -> None:
        self._before: dict[str, frozenset[int]] = {"copy": frozenset(), "compute": frozenset()}
        self._last_copy: dict[int, frozenset[int]] = {}  # by buffer: the copy and what has ended before it
        self.ended_before: list[frozenset[int]] = []  # by operation
        self.operations: list[tuple[str, int, int]] = []  # (copy or compute, layer, buffer)

    def _queue(self, queue: str, layer: int, buffer: int) -> frozenset[int]:
        number = len(self.operations)
        self.operations.append((queue, layer, buffer))
        self.ended_before.append(self._before[queue])
        self._before[queue] = self._before[queue] | {number}
        return self._before[queue]

    def wait_for_computation(self) -> None:
        self._before["copy"] |= self._before["compute"]

    def copy(self, source: torch.Tensor, buffer: int) -> None:
        self._last_copy[buffer] = self._queue("copy", int(source[0]), buffer)

    def let_computation_wait(self, buffer: int) -> None:
        self._before["compute"] |= self._last_copy[buffer]

    def compute(self, layer: int, buffer: int) -> None:
        self._queue("compute", layer, buffer)

    @property
    def is_joined(self) -> bool:
        """Whether the computation has waited for all copies, as the end of a capture requires."""
        return self._before["copy"] <= self._before["compute"]


def check(queues: RecordedQueues) -> None:
    """Every streamed layer reads its own weights: the last copy to its buffer that may have begun is its own, and no
    later copy can begin before it has ended."""
    copies = [number for number, (kind, _, _) in enumerate(queues.operations) if kind == "copy"]
    for number, (kind, layer, buffer) in enumerate(queues.operations):
        if kind == "copy":
            continue
        here = [copy for copy in copies if queues.operations[copy][2] == buffer]
        done = [copy for copy in here if copy in queues.ended_before[number]]
        assert done and queues.operations[done[-1]][1] == layer, "read before its copy has ended"
        later = [copy for copy in here if copy not in done]
        assert all(number in queues.ended_before[copy] for copy in later), "overwritten while it may be read"


def run_step(stream: LayerStream, queues: RecordedQueues, num_layers: int) -> list[int]:
    buffers = {layer: turn % NUM_BUFFERS for turn, layer in enumerate(stream.weights)}
    seen = []
    for layer in stream.through(range(num_layers)):
        seen.append(layer)
        if layer in buffers:
            queues.compute(layer, buffers[layer])
    return seen


def stream_of(layers: list[int], queues: RecordedQueues) -> LayerStream:
    return LayerStream({layer: torch.tensor([layer], dtype=torch.uint8) for layer in layers}, queues)


@given(
    num_layers=st.integers(1, 20),
    chosen=st.sets(st.integers(0, 19)),
    depths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
)
def test_no_buffer_is_overwritten_before_its_last_reader_or_read_before_its_copy(
    num_layers: int, chosen: set[int], depths: list[int]
) -> None:
    """Steps one after the other, some with only the first layers."""
    queues = RecordedQueues()
    stream = stream_of(sorted(layer for layer in chosen if layer < num_layers), queues)
    for depth in depths:
        depth = min(depth, num_layers)
        assert run_step(stream, queues, depth) == list(range(depth))
        assert queues.is_joined
    check(queues)


def test_a_step_after_one_that_failed_reads_its_own_weights() -> None:
    queues = RecordedQueues()
    stream = stream_of([1, 3, 5, 7], queues)
    for layer in stream.through(range(8)):
        if layer == 3:
            break
        if layer == 1:
            queues.compute(1, 0)
    run_step(stream, queues, 8)
    check(queues)


def test_the_next_layer_is_copied_while_this_one_computes() -> None:
    queues = RecordedQueues()
    run_step(stream_of([0, 1, 2, 3], queues), queues, 4)
    number_of = {operation[:2]: number for number, operation in enumerate(queues.operations)}
    for layer in range(3):
        assert number_of["compute", layer] not in queues.ended_before[number_of["copy", layer + 1]]


def test_a_step_without_streamed_layers_leaves_the_copies_alone() -> None:
    """A capture must not find a stream that it would have to join."""
    queues = RecordedQueues()
    queues.compute(0, 0)
    run_step(stream_of([5], queues), queues, 3)
    assert queues._before["copy"] == frozenset()


@pytest.mark.parametrize("broken", ["wait_for_computation", "let_computation_wait"])
def test_the_check_finds_a_missing_wait(broken: str) -> None:
    queues = RecordedQueues()
    setattr(queues, broken, lambda *_: None)
    run_step(stream_of([0, 1, 2, 3], queues), queues, 4)
    with pytest.raises(AssertionError, match="read"):
        check(queues)


@given(num_layers=st.integers(1, 100), number=st.integers(1, 100))
def test_streamed_layers_are_spread_evenly_and_include_the_last(num_layers: int, number: int) -> None:
    number = min(number, num_layers)
    found = spread(num_layers, number)
    gaps = {later - earlier for earlier, later in zip((-1, *found), found, strict=False)}
    assert len(found) == number and found[-1] == num_layers - 1
    assert max(gaps) - min(gaps) <= 1


def test_as_few_layers_stream_as_free_what_is_wanted() -> None:
    """Two buffers of a layer each stay on the GPU."""
    found = choose_streamed([1024] * 10, 3 * 1024)
    assert (len(found.indexes), found.num_bytes, found.buffer_bytes) == (5, 5 * 1024, 2 * 1024)
    assert found.freed_bytes == 3 * 1024


@given(layer_bytes=st.lists(st.integers(1, 50), min_size=1, max_size=30), host_bytes=st.integers(0, 1000))
def test_as_few_layers_are_on_disk_as_let_the_others_fit_in_host_memory(
    layer_bytes: list[int], host_bytes: int
) -> None:
    streamed = choose_streamed(layer_bytes, 1 << 40)
    found = with_layers_on_disk(streamed, layer_bytes, host_bytes)
    if found is None:  # not even with all of them on disk
        assert NUM_BUFFERS * max(layer_bytes) > host_bytes or len(layer_bytes) == 1
        return
    on_disk = [layer_bytes[index] for index in found.disk_indexes]
    assert found.host_bytes == sum(layer_bytes) - sum(on_disk) + found.staging_bytes <= host_bytes
    assert found.indexes == streamed.indexes and set(found.disk_indexes) <= set(found.indexes)
    assert found.staging_bytes >= min(NUM_BUFFERS, len(on_disk)) * max(on_disk, default=0)
    assert (sum(layer_bytes) <= host_bytes) == (not on_disk)


def test_all_layers_stream_where_more_is_wanted_than_they_have() -> None:
    assert choose_streamed([1024] * 4, 1 << 40).indexes == (0, 1, 2, 3)
    assert choose_streamed([1024] * 4, 0).indexes == ()
