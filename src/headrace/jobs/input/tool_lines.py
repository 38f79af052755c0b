"""Tools of lines. Most lines of a file have the same tools: those are read, and their grammar is built, once."""

from __future__ import annotations

import dataclasses

from headrace.engine.prompts import PromptReader
from headrace.openai.choices import encode
from headrace.openai.schema.chat import ChatRequest
from headrace.openai.tool_use import ToolUse, read_tool_use
from headrace.types import SamplingParams

MAX_REMEMBERED = 256


class ToolLines:
    """Used by one thread."""

    def __init__(self, prompts: PromptReader) -> None:
        self._prompts = prompts
        self._uses: dict[bytes, ToolUse] = {}
        self._params: dict[tuple[int, int], tuple[SamplingParams, ToolUse, SamplingParams]] = {}  # by both ids

    def use_of(self, request: ChatRequest) -> ToolUse:
        fields = (request.tools, request.tool_choice, request.parallel_tool_calls)
        key = encode((*fields, request.response_format, request.structured_outputs))
        use = self._uses.get(key)
        if use is None:
            use = read_tool_use(request, self._prompts.tokenizer)
            if len(self._uses) >= MAX_REMEMBERED:
                self._uses.clear()
            self._uses[key] = use
        return use

    def params_of(self, params: SamplingParams, use: ToolUse) -> SamplingParams:
        """The parameters of a line with what its tools change. Lines that share both share the result."""
        if not use.params:
            return params
        known = self._params.get((id(params), id(use)))
        if known is None:
            if len(self._params) >= MAX_REMEMBERED:
                self._params.clear()
            # Both are kept: the id of an object that is gone may be that of another one.
            known = (params, use, dataclasses.replace(params, **use.params))
            self._params[(id(params), id(use))] = known
        return known[2]
