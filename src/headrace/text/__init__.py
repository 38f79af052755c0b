"""Text to tokens and back.

    load.py, source.py           the entry: a tokenizer from a directory or from GGUF metadata
    tokenizer.py                 `Tokenizer`, around the Rust `tokenizers` library
    directory_tokenizer.py, gguf_tokenizer.py, gguf_encoder_tokenizer.py   how one is built from either source
    template.py, sandbox.py      chat templates, rendered in a bounded Jinja sandbox
    detokenizer.py, pieces.py    incremental detokenization: constant work per token, never half a character
    stops.py                     stop strings in text that arrives in pieces
    answer_parts.py, answer_reader.py   reasoning, text and tool calls of an answer, streamed or whole
    tool_calls.py, tools/        the formats of tool calls, and the grammars that force a call
    closed_schemas.py            JSON schemas whose objects have no other properties than those listed
    reasoning/                   the formats of reasoning

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
