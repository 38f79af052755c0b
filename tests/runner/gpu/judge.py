"""Judges greedy choices on a GPU by a model of transformers in float32 with the same weights."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Its weights rounded to bfloat16. Not its buffers: rotary frequencies must stay exact, as they are for users."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model.cuda()


def shortfalls(
    model: PreTrainedModel, prompt: list[int], answer: list[int], choices: torch.Tensor | None = None
) -> torch.Tensor:
    """How far the logit of each token of the answer, or of each of `choices` in its place, lies below the largest, in
    units of the logits' spread."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    choices = torch.tensor(answer, device="cuda") if choices is None else choices
    return (logits.amax(1) - logits.gather(1, choices[:, None])[:, 0]) / logits.std(1)
