from __future__ import annotations

import pytest

from headrace.hardware import read_gpu
from headrace.hardware.gpu_topology import read_gpu_topology


@pytest.mark.gpu
def test_the_place_of_a_gpu_agrees_with_the_drivers() -> None:
    gpu, topology = read_gpu(), read_gpu_topology()
    assert gpu is not None and gpu.place is not None and topology is not None
    assert gpu.place.bus_id in [place.bus_id for place in topology.gpus]
    assert gpu.place.local_cpus
