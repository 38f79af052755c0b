"""Lines made ready for the engine ahead of it: parsed, ids checked, templates rendered, tokenized in batches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.engine.prompts import PromptReader, TokenizedPrompt
from headrace.errors import ConfigError, RequestError
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.openai_lines import DUPLICATE_ID, OpenAIReply
from headrace.jobs.reader import InputLine
from headrace.jobs.seen import SeenIds


class Work(msgspec.Struct, frozen=True, gc=False):
    """A request that can be submitted."""

    request: LineRequest
    prompt: TokenizedPrompt


class _Rendered(msgspec.Struct, frozen=True, gc=False):
    """A request whose prompt is text or token ids, and whether the tokenizer adds its special tokens."""

    request: LineRequest
    prompt: str | list[int]
    add_special_tokens: bool


class LinePreparer:
    """Used by one thread. Remembers the ids it has seen, and nothing else of a line."""

    def __init__(self, parser: LineParser, prompts: PromptReader, *, seen: SeenIds | None = None) -> None:
        """`seen` are the ids of lines that were done before."""
        self._parser = parser
        self._prompts = prompts
        self._seen = SeenIds() if seen is None else seen

    def prepare(self, lines: Sequence[InputLine]) -> list[Work | BadLine]:
        """One item for each line, in their order."""
        parsed = self._without_duplicates([self._parser.parse(line) for line in lines])
        rendered = [item if isinstance(item, BadLine) else self._render(item) for item in parsed]
        works = {
            **self._tokenize(rendered, add_special_tokens=True),
            **self._tokenize(rendered, add_special_tokens=False),
        }
        return [item if isinstance(item, BadLine) else works[place] for place, item in enumerate(rendered)]

    def _without_duplicates(self, parsed: list[LineRequest | BadLine]) -> list[LineRequest | BadLine]:
        named = [(place, custom_id) for place, item in enumerate(parsed) if (custom_id := _custom_id(item))]
        if not named:
            return parsed
        numbers = [parsed[place].reply.index + 1 for place, _ in named]
        for (place, custom_id), first in zip(named, self._seen.add([name for _, name in named], numbers), strict=True):
            if first is not None:
                parsed[place] = _duplicate(parsed[place].reply.index, custom_id, first)
        return parsed

    def _render(self, request: LineRequest) -> _Rendered | BadLine:
        try:
            if request.messages is not None:
                return _Rendered(request, self._prompts.render(request.messages, **request.template_options), False)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))
        assert request.prompt is not None
        return _Rendered(request, request.prompt, True)

    def _tokenize(
        self, rendered: Sequence[_Rendered | BadLine], *, add_special_tokens: bool
    ) -> dict[int, Work | BadLine]:
        """By their places in `rendered`, those that want special tokens or those that do not."""
        chosen = {
            place: item
            for place, item in enumerate(rendered)
            if isinstance(item, _Rendered) and item.add_special_tokens == add_special_tokens
        }
        try:
            prompts = self._prompts.read(
                [item.prompt for item in chosen.values()], add_special_tokens=add_special_tokens
            )
        except (RequestError, ConfigError):  # one is bad: find out which
            return {place: self._tokenize_one(item) for place, item in chosen.items()}
        return {
            place: self._work(item.request, prompt)
            for (place, item), prompt in zip(chosen.items(), prompts, strict=True)
        }

    def _tokenize_one(self, item: _Rendered) -> Work | BadLine:
        try:
            (prompt,) = self._prompts.read([item.prompt], add_special_tokens=item.add_special_tokens)
        except (RequestError, ConfigError) as error:
            return BadLine(item.request.reply, _as_request_error(error))
        return self._work(item.request, prompt)

    def _work(self, request: LineRequest, prompt: TokenizedPrompt) -> Work | BadLine:
        try:
            params = self._prompts.with_tokens(request.params)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))
        return Work(request if params is request.params else msgspec.structs.replace(request, params=params), prompt)


def _custom_id(item: LineRequest | BadLine) -> str | None:
    return item.reply.custom_id if isinstance(item.reply, OpenAIReply) else None


def _duplicate(index: int, custom_id: str, first: int) -> BadLine:
    error = RequestError(
        f"custom_id {custom_id!r} is already that of line {first}; ids must be unique in a file",
        param="custom_id",
        code=DUPLICATE_ID,
    )
    return BadLine(OpenAIReply(index, custom_id, None), error)


def _as_request_error(error: RequestError | ConfigError) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error), param="prompt", code="no_tokenizer")
