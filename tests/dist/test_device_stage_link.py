from __future__ import annotations

import torch

from headrace.dist.collectives import StageLink
from headrace.dist.device_stage_link import DeviceStageLink
from tests.dist.ranks import on_stages

LARGEST, WIDTH = 8, 3
STEPS = (5, 1, 8, 2, 2, 7)  # tokens


def run_steps(plain: StageLink) -> list[float]:
    """Each stage adds 1 to what it gets. A step has rows of padding, whose number differs between the stages."""
    link, found = DeviceStageLink(plain), []
    link.send(link.receive(torch.zeros(LARGEST, WIDTH)))  # the measured step
    for step, num_tokens in enumerate(STEPS):
        link.pull(num_tokens)
        padded = torch.full((num_tokens + 2 + link.mesh.pipeline_rank, WIDTH), float("nan"))
        x = torch.full_like(padded, 10.0 * step) if link.mesh.is_first_stage else link.receive(padded)
        x += 1
        link.send(x)
        link.push(num_tokens)
        assert (x[:num_tokens] == x[0, 0]).all()
        found.append(float(x[0, 0]))
    link.flush()
    return found


def test_each_stage_gets_the_tokens_of_every_step_in_their_order() -> None:
    first, second, third = on_stages(3, run_steps)
    assert first == [10.0 * step + 1 for step in range(len(STEPS))]
    assert second == [value + 1 for value in first]
    assert third == [value + 2 for value in first]
