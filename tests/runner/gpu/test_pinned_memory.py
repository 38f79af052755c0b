"""When pinned memory is unregistered, with a driver that only records its calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.errors import ConfigError
from headrace.runner.gpu.pinned_memory import pinned_memory

NUM_BYTES = 5 << 20


def is_mapped(address: int) -> bool:
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_memory_is_still_mapped_when_it_is_unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would otherwise find other pages there, or none."""
    unregistered: list[tuple[int, bool]] = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: 0,
        cudaHostUnregister=lambda address: unregistered.append((address, is_mapped(address))),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    run = pinned_memory(NUM_BYTES)
    address, view = run.data_ptr(), run[1000:].view(torch.int64)
    del run
    assert view.sum() == 0 and unregistered == []  # a view keeps it
    del view
    assert unregistered == [(address, True)]
    assert not is_mapped(address)


def test_memory_that_cannot_be_pinned_is_refused_with_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    with pytest.raises(
        ConfigError, match=r"for kv_offload_gib cannot be pinned \(CUDA error 2\); lower kv_offload_gib"
    ):
        pinned_memory(NUM_BYTES, setting="kv_offload_gib")
