"""Text to tokens and back: tokenizers, chat templates, incremental detokenization, stop strings.

Imports neither torch nor transformers; transformers is asked only for a directory without a tokenizer.json.
"""

from __future__ import annotations

from headrace.text.detokenizer import Detokenizer, whole_text
from headrace.text.load import load_tokenizer
from headrace.text.source import TextSource
from headrace.text.stops import StopMatcher
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "TextSource", "Tokenizer", "load_tokenizer", "whole_text"]
