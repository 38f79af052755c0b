"""A model's reasoning, separated from the text of its answer.

parser.py     `ReasoningParser`, and `TagParser` for reasoning between tags
tags.py       the formats with tags
gpt_oss.py    messages on channels
formats.py    the list of formats: chosen by name or by the model's chat template
"""
