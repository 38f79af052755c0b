"""Samples the next token of each sequence from its logits: one file per feature.

    feature.py    what a feature is: its columns, which sequences use it, what it does in a step
    features.py   all features, in the order in which a step applies them
    columns.py    the settings of all slots, on the host and on the device
    sampler.py    `Sampler`: settings are written once, when a sequence enters a slot; a step has no work per sequence
    sample.py     filters and sampling: the CPU kernel, the GPU kernels, or `reference.py`
    history.py    a sequence's own tokens, which penalties look at
    philox.py     random numbers as a function of seed and position

A slot is a sequence's place on the device: `slots` are slot ids. `rows` are rows of the batch's logits. A token depends
on the logits, settings, seed and tokens of its own sequence only, never on the batch or the slot.

To add a sampling parameter:

1. Add a field to `types.SamplingParams`, with its default and its check.
2. Write `sampling/<feature>.py`: `params` names the field, `columns` its values on the device, `is_used` and
   `settings` read it, and `apply` does the work. With default columns it must change nothing.
3. Register it in `features.py`, where the order counts. A parameter that no feature implements goes into
   `HANDLED_ELSEWHERE` there instead.
4. Test it in `tests/sampling`. `test_parameters.py` fails if a field is missing from steps 2 and 3.

Then follow openai/__init__.py: schema/common.py, docs/server.md. A filter also needs the CPU and GPU sampling kernels.
Tests fail until all are there.
"""

from __future__ import annotations

from headrace.sampling.grammar import PlacedMasks
from headrace.sampling.logprobs import SampledLogprobs
from headrace.sampling.sampler import Sampled, Sampler

__all__ = ["PlacedMasks", "Sampled", "SampledLogprobs", "Sampler"]
