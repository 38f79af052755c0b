"""What a step brought, from the device's tensors to the plan's arrays."""

from __future__ import annotations

from headrace.sampling import SampledLogprobs
from headrace.steps import StepLogprobs


def step_logprobs(asked: SampledLogprobs) -> StepLogprobs:
    return StepLogprobs(
        rows=asked.rows.cpu().numpy(),
        chosen=asked.chosen.float().cpu().numpy(),
        ranks=asked.ranks.cpu().numpy(),
        top_ids=asked.top_ids.cpu().numpy(),
        top_values=asked.top_values.float().cpu().numpy(),
    )
