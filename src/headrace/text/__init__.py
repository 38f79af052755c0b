"""Text to tokens and back.

    load.py, source.py           the entry: a tokenizer from a directory or from GGUF metadata
    tokenizer.py                 `Tokenizer`, around the Rust `tokenizers` library
    directory_tokenizer.py, gguf_tokenizer.py   how one is built from either source
    template.py, sandbox.py      chat templates, rendered in a bounded Jinja sandbox
    detokenizer.py, pieces.py    incremental detokenization: constant work per token, never half a character
    stops.py                     stop strings in text that arrives in pieces
    tool_calls.py, tool_call_json.py, json_scanner.py   tool calls in an answer, streamed or whole
    tool_grammar.py              the grammar that forces a tool call

Imports neither torch nor transformers; transformers is used only for a directory without a tokenizer.json. Results
never depend on how the text was split into pieces. Templates and tokenizer files are untrusted input.
"""

from __future__ import annotations

from headrace.text.detokenizer import Detokenizer, whole_text
from headrace.text.load import load_tokenizer
from headrace.text.source import TextSource
from headrace.text.stops import StopMatcher
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "TextSource", "Tokenizer", "load_tokenizer", "whole_text"]
