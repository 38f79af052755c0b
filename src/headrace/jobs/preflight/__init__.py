"""`headrace run --check`: validates a job without loading its model.

    front.py    the tokenizer, the limits and the grammars of a model, opened without its weights
    check.py    sends every line through the same parser, tokenizer and limits as a run
    rate.py     tokens per second: given as a number, or read from the summary of an earlier run
    report.py   counts of good and bad lines, tokens, disk space and time

A line that fails here fails in a run with the same error code, and the other way round. Nothing is written.
"""

from __future__ import annotations
