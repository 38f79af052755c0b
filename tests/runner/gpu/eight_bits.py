"""A model of transformers whose GEMMs have inputs and weights in eight bits, as ours have with `quantization="fp8"`:
one scale per row of the input and per output channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from headrace.kernels import reference

_MULTIPLE = 16  # both sides of a weight: others stay as they are, as does the router


class EightBits(TorchFunctionMode):
    """Rounds what goes into GEMMs with weights. The head, whose width is `vocab_size`, stays as it is."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.num_rounded = 0
        self._vocab_size = vocab_size

    def __torch_function__(
        self, function: Callable[..., Tensor], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Tensor:
        if function is torch.nn.functional.linear:
            x, weight, *rest = args
            if self._takes(weight.shape):
                args = (rounded_rows(x), rounded_rows(weight), *rest)
        elif function is torch.addmm:  # of GPT-2, whose weights are stored transposed
            bias, x, weight = args
            if self._takes(weight.shape):
                args = (bias, rounded_rows(x), rounded_rows(weight.mT).mT)
        elif function is torch.bmm or (function in (torch.matmul, Tensor.matmul, Tensor.__matmul__)):
            x, weight = args  # [.., K], [.., K, N]; with more dimensions it is attention, or rotary angles
            if weight.ndim == (3 if function is torch.bmm else 2) and self._takes(weight.shape[-2:]):
                args = (rounded_rows(x), rounded_rows(weight.mT).mT)
        return function(*args, **(kwargs or {}))

    def _takes(self, shape: torch.Size) -> bool:
        takes = all(size % _MULTIPLE == 0 for size in shape) and self._vocab_size not in shape
        self.num_rounded += takes
        return takes


def rounded_rows(x: Tensor) -> Tensor:
    rows = reference.quantize_rows(x.reshape(-1, x.shape[-1]))
    return (rows.values.float() * rows.scales).view(x.shape).to(x.dtype)


def choices_in_eight_bits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Returns the token that it would choose after each of `tokens`."""
    return logits_in_eight_bits(model, tokens).argmax(-1)


def logits_in_eight_bits(model: PreTrainedModel, tokens: list[int]) -> Tensor:  # [T, V]
    """Returns the logits after each of `tokens`."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # others call kernels that cannot be seen here
    with torch.inference_mode(), EightBits(model.config.vocab_size) as mode:
        logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0]
    # Attention has two GEMMs or more in each layer, and so has its MLP or each of its experts. Mamba 2 has no MLP.
    num_per_layer = 2 if model.config.model_type == "mamba2" else 4
    assert mode.num_rounded >= num_per_layer * model.config.num_hidden_layers
    return logits
