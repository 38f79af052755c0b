"""Log-probabilities on a GPU: of named tokens, and of the whole vocabulary, against the CPU."""

from __future__ import annotations

import pytest
import torch

from headrace.sampling.sampler import Sampler
from headrace.types import SamplingParams

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 5000
ASKED = ({"logprob_token_ids": [7, 4999, 2]}, {"logprobs": 3}, {"logprobs": -1}, {})


def test_named_and_all_logprobs_are_those_of_the_cpu() -> None:
    logits = torch.randn(4, VOCAB_SIZE)
    found = {}
    for device in ("cpu", "cuda"):
        sampler = Sampler(4, VOCAB_SIZE, device)
        for slot, more in enumerate(ASKED):
            params = SamplingParams(temperature=0.0, **more)
            sampler.enter_slot(slot, params, seed=1, prompt_len=3, end_len=100, stop_token_ids=())
        slots, lens = torch.arange(4, device=device), torch.full((4,), 5, device=device)
        found[device] = sampler.sample(logits.to(device, copy=True), slots, lens).logprobs
    cpu, gpu = found["cpu"], found["cuda"]
    rows = [gpu.slots.tolist().index(slot) for slot in cpu.slots.tolist()]  # off the CPU all rows are computed
    torch.testing.assert_close(gpu.named_values.cpu()[rows][0, :3], cpu.named_values[0, :3])
    torch.testing.assert_close(gpu.chosen.cpu()[rows], cpu.chosen)
    torch.testing.assert_close(gpu.top_values.cpu()[rows][2], cpu.top_values[2])
    assert gpu.ranks.cpu()[rows].tolist() == cpu.ranks.tolist()
