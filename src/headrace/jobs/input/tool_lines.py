"""Reasoning and tools of chat lines. Most lines of a file have the same tools: those are read, and their grammar is
built, once."""

from __future__ import annotations

import dataclasses

from headrace.engine.prompts import PromptReader
from headrace.openai.answer_format import AnswerUse, read_answer_use
from headrace.openai.choices import encode
from headrace.openai.parser_names import ParserNames
from headrace.openai.schema.chat import ChatRequest
from headrace.types import SamplingParams

MAX_REMEMBERED = 256
_PLAIN = ChatRequest(messages=[])


class ToolLines:
    """Used by one thread."""

    def __init__(self, prompts: PromptReader, names: ParserNames) -> None:
        self._prompts = prompts
        self._names = names
        self._uses: dict[bytes, AnswerUse] = {}
        self._params: dict[tuple[int, int, bool | None], tuple[SamplingParams, AnswerUse, SamplingParams]] = {}
        self._plain: AnswerUse | None = None

    @property
    def has_reasoning(self) -> bool:
        """Whether answers to lines without tools are parsed too."""
        return self.use_of(None).reasoning is not None

    def use_of(self, request: ChatRequest | None) -> AnswerUse:
        """How a chat line uses tools and reasoning; None: a line that says nothing about them."""
        if request is None:
            if self._plain is None:
                self._plain = read_answer_use(_PLAIN, self._prompts.tokenizer, self._names)
            return self._plain
        fields = (request.tools, request.tool_choice, request.parallel_tool_calls, request.include_reasoning)
        key = encode((*fields, request.thinking_token_budget, request.response_format, request.structured_outputs))
        use = self._uses.get(key)
        if use is None:
            use = read_answer_use(request, self._prompts.tokenizer, self._names)
            if len(self._uses) >= MAX_REMEMBERED:
                self._uses.clear()
            self._uses[key] = use
        return use

    def params_of(self, params: SamplingParams, use: AnswerUse, is_inside: bool | None) -> SamplingParams:
        """The parameters of a line with what its tools and reasoning change. Lines that share all of it share the
        result."""
        has_form = params.structured_outputs is not None or use.max_reasoning_tokens is not None
        if not use.params and (use.reasoning is None or not has_form):
            return params
        key = (id(params), id(use), is_inside)
        known = self._params.get(key)
        if known is None:
            if len(self._params) >= MAX_REMEMBERED:
                self._params.clear()
            changed = dataclasses.replace(params, **use.params)
            # Both are kept: the id of an object that is gone may be that of another one.
            known = (params, use, use.constrained(changed, is_inside, self._prompts.tokenizer))
            self._params[key] = known
        return known[2]
