"""Launches that are recorded once and run again in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.cpu.graphs import Memory, Recorder
from headrace.kernels.cpu.panels import IS_SUPPORTED

pytestmark = pytest.mark.skipif(not IS_SUPPORTED, reason="other CPUs multiply with PyTorch's own GEMM")

WIDTH, INNER = 64, 96


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(num_threads)


class Mlp:
    """Some layers as a model has them."""

    def __init__(self, num_layers: int = 3) -> None:
        self.layers = [
            (ops.pack_linear(torch.randn(2 * INNER, WIDTH) / 8), ops.pack_linear(torch.randn(WIDTH, INNER) / 8))
            for _ in range(num_layers)
        ]
        self.gain = torch.rand(WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        for up, down in self.layers:
            normed = ops.rms_norm(x, self.gain, 1e-5)
            assert isinstance(normed, Tensor)
            x = ops.add_to(down(ops.silu_and_mul(up(normed))), x)
        return x


def recorded(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ops.Graph]:
    found = Recorder().record(lambda: function(x))
    assert found is not None
    return found


def test_a_graph_computes_what_the_function_computes_for_other_inputs() -> None:
    mlp, x = Mlp(), torch.randn(5, WIDTH)
    first, graph = recorded(mlp, x)
    assert torch.equal(first, mlp(x))
    for _ in range(3):
        x.copy_(torch.randn(5, WIDTH))
        assert torch.equal(graph.run(), mlp(x))


def test_a_graph_gives_the_same_each_time() -> None:
    """Threads that did not wait for each other would read what is not written yet."""
    x = torch.randn(2, WIDTH)
    first, graph = recorded(Mlp(num_layers=40), x)
    expected = first.clone()
    assert all(torch.equal(graph.run(), expected) for _ in range(200))


def test_graphs_that_share_memory_do_not_disturb_each_other() -> None:
    mlp, recorder = Mlp(), Recorder()
    inputs = [torch.randn(rows, WIDTH) for rows in (1, 4, 9)]
    graphs = []
    for x in inputs:
        found = recorder.record(lambda x=x: mlp(x))  # type: ignore[misc]
        assert found is not None
        graphs.append(found[1])
    for x, graph in [*zip(inputs, graphs, strict=True), *zip(inputs, graphs, strict=True)]:
        assert torch.equal(graph.run(), mlp(x))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.t().contiguous(),
        lambda x: x.new_zeros(2),
        lambda x: torch.from_numpy(x.numpy().copy()),
        lambda x: x if x.max().item() > 0 else -x,
        lambda x: x if x.sum() > 0 else -x,
        lambda x: torch.softmax(x, -1),
    ],
    ids=["sum", "in place", "index", "copy", "zeros", "numpy", "item", "truth", "softmax"],
)
def test_a_function_that_computes_with_pytorch_is_not_recorded(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, WIDTH)
    assert Recorder().record(lambda: operation(x)) is None


def test_a_refused_function_has_changed_nothing_with_pytorch() -> None:
    x = torch.zeros(4, WIDTH)
    assert Recorder().record(lambda: x.add_(1)) is None
    assert not x.any()


def test_views_may_be_made() -> None:
    x, gain = torch.randn(6, 2 * WIDTH), torch.rand(WIDTH)

    def function(x: Tensor) -> Tensor:
        normed = ops.rms_norm(x.view(12, WIDTH)[2:].unflatten(0, (2, 5)).flatten(0, 1), gain, 1e-5)
        assert isinstance(normed, Tensor)
        return normed[1:].view(3, -1)

    _, graph = recorded(function, x)
    x.copy_(torch.randn(6, 2 * WIDTH))
    assert torch.equal(graph.run(), function(x))


def test_nothing_is_recorded_where_no_team_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.cpu.graphs.can_have_helpers", lambda: False)
    mlp, x = Mlp(), torch.randn(1, WIDTH)
    assert Recorder().record(lambda: mlp(x)) is None


def test_an_error_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError):
        Recorder().record(lambda: torch.empty(1 // 0))
    assert (torch.ones(2) + 1).sum() == 4
    recorded(Mlp(), torch.randn(1, WIDTH))


def test_memory_is_used_again_once_its_tensor_has_died() -> None:
    memory = Memory()
    first, other = memory.empty((100, 10), torch.float32), memory.empty((100, 10), torch.float32)
    address = first.data_ptr()
    assert first.shape == (100, 10) and address != other.data_ptr()
    view = first[50:]
    del first
    assert memory.empty((100, 10), torch.float32).data_ptr() != address  # the view is alive
    del view
    assert memory.empty((999,), torch.float32).data_ptr() == address


def test_what_a_graph_returns_lasts_until_the_next_one_runs() -> None:
    memory = Memory()
    made = memory.empty((4, 8), torch.float32)
    lasting = memory.lasting(made[1:, 2:5])
    made.copy_(torch.randn(4, 8))
    expected = made[1:, 2:5].clone()
    del made
    assert torch.equal(lasting, expected)


def test_a_recording_of_many_layers_takes_the_memory_of_few_tensors() -> None:
    recorder, mlp, x = Recorder(), Mlp(num_layers=50), torch.randn(8, WIDTH)
    assert recorder.record(lambda: mlp(x)) is not None
    assert recorder.memory.num_buffers <= 6
