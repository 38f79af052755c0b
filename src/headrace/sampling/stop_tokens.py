"""stop_token_ids and the end-of-sequence tokens: sampling one ends the sequence.

The device knows the first `NUM_DEVICE_STOPS` of a sequence; the scheduler finds the others in the results of steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.sampling.feature import Column, SequenceSettings
from headrace.types import NUM_DEVICE_STOPS

NO_TOKEN = -1  # padding where a slot has fewer stop ids than the column is wide


class StopTokens:
    params = ("stop_token_ids", "ignore_eos")
    columns = (Column("stop_token_ids", np.int64, NO_TOKEN, width=NUM_DEVICE_STOPS),)

    def is_used(self, sequence: SequenceSettings) -> bool:
        return bool(sequence.stop_token_ids)

    def settings(self, sequence: SequenceSettings) -> Mapping[str, tuple[int, ...]]:
        ids = sequence.stop_token_ids[:NUM_DEVICE_STOPS]
        return {"stop_token_ids": ids + (NO_TOKEN,) * (NUM_DEVICE_STOPS - len(ids))}
