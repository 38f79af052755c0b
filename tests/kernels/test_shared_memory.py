"""Tiles fit into the shared memory of each architecture, and those of an H200 are as they were tuned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.gpu import latent, prefill_attention, shared_memory
from headrace.kernels.gpu.architectures import Architecture

ADA, HOPPER = (Architecture(capability).shared_memory_bytes for capability in ((8, 9), (9, 0)))


def test_an_architecture_has_the_shared_memory_of_its_gpus() -> None:
    assert (ADA, HOPPER) == (101_376, 232_448)
    assert Architecture((10, 0)).number == 100


@pytest.mark.parametrize(("max_bytes", "stages"), [(ADA, 3), (HOPPER, 4)])
def test_a_loop_has_as_many_stages_as_fit(monkeypatch: pytest.MonkeyPatch, max_bytes: int, stages: int) -> None:
    monkeypatch.setattr(shared_memory, "shared_memory_bytes", lambda device: max_bytes)
    stage_bytes = (2 * 64 + 16) * 128 * 2  # gate and up of a 1B model
    assert shared_memory.fitting_stages(4, stage_bytes, torch.device("cpu")) == stages


@pytest.mark.parametrize(("max_bytes", "keys"), [(ADA, 32), (HOPPER, 64)])
def test_latents_are_read_in_tiles_that_fit(max_bytes: int, keys: int) -> None:
    assert latent._fitting_keys(latent.latent_shape(128), 576 * 2, max_bytes) == keys
    assert latent._fitting_keys(latent.latent_shape(16), 576 * 2, max_bytes) == 32


@pytest.mark.parametrize(("max_bytes", "keys"), [(ADA, 16), (HOPPER, 32)])
def test_prefills_of_large_heads_read_fewer_keys_at_once_where_memory_is_small(max_bytes: int, keys: int) -> None:
    assert prefill_attention._prefill_shape(256, max_bytes) == (keys, 8, 2)
    assert prefill_attention._prefill_shape(128, max_bytes) == (128, 8, 3)
