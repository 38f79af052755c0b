"""What a readout (pooling or prompt scoring) needs from the prompt tokens of one step."""

from __future__ import annotations

from headrace.sched.sequence import Sequence
from headrace.steps import ReadoutChunk


def readout_chunk(sequence: Sequence, start: int, num_tokens: int) -> ReadoutChunk | None:
    """Of a step that computes `num_tokens` of the sequence from `start` on; None if it has no readout there."""
    readout, prompt_len = sequence.request.readout, sequence.prompt_len
    if readout is None:
        return None
    first_position, end_position = readout.first_position(prompt_len), readout.end_position(prompt_len)
    first, end = max(start, first_position), min(start + num_tokens, end_position)
    if first >= end:
        return None
    targets = None if readout.targets is None else readout.targets[first - first_position : end - first_position]
    return ReadoutChunk(
        sequence.slot,
        first - start,
        end - first,
        targets,
        is_last=start + num_tokens == prompt_len,
        num_pooled=end_position - first_position,
    )
