"""Lines made ready for the engine ahead of it: parsed, ids checked, templates rendered, tokenized in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from headrace.engine.prompts import PromptReader, TokenizedPrompt
from headrace.errors import ConfigError, RequestError
from headrace.jobs.lines import BadLine, LineParser, LineRequest
from headrace.jobs.openai_lines import OpenAIReply, id_of
from headrace.jobs.reader import InputLine
from headrace.jobs.seen import SeenIds


@dataclass(frozen=True, slots=True)
class Work:
    """A request that can be submitted."""

    request: LineRequest
    prompt: TokenizedPrompt


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A request whose prompt is text or token ids, and whether the tokenizer adds its special tokens."""

    request: LineRequest
    prompt: str | list[int]
    add_special_tokens: bool


class LinePreparer:
    """Used by one thread. Remembers the ids it has seen, and nothing else of a line."""

    def __init__(
        self, parser: LineParser, prompts: PromptReader, *, is_done: Callable[[int], bool] = lambda index: False
    ) -> None:
        """Lines that are done give no item, but their ids count."""
        self._parser = parser
        self._prompts = prompts
        self._seen = SeenIds()
        self._is_done = is_done

    def prepare(self, lines: Sequence[InputLine]) -> list[Work | BadLine]:
        """One item for each line that is not done, in their order."""
        parsed = {line.index: self._parser.parse(line) for line in lines if not self._is_done(line.index)}
        self._refuse_duplicates(lines, parsed)
        rendered = [item if isinstance(item, BadLine) else self._render(item) for item in parsed.values()]
        works = {
            **self._tokenize(rendered, add_special_tokens=True),
            **self._tokenize(rendered, add_special_tokens=False),
        }
        return [item if isinstance(item, BadLine) else works[place] for place, item in enumerate(rendered)]

    def _refuse_duplicates(self, lines: Sequence[InputLine], parsed: dict[int, LineRequest | BadLine]) -> None:
        ids = [_custom_id(parsed[line.index]) if line.index in parsed else id_of(line) for line in lines]
        named = [(line, custom_id) for line, custom_id in zip(lines, ids, strict=True) if custom_id]
        if not named:
            return
        earlier = self._seen.add([custom_id for _, custom_id in named], [line.number for line, _ in named])
        for (line, custom_id), first in zip(named, earlier, strict=True):
            if first is not None and line.index in parsed:
                parsed[line.index] = _duplicate(line.index, custom_id, first)

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
            return Work(replace(request, params=self._prompts.with_tokens(request.params)), prompt)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))


def _custom_id(item: LineRequest | BadLine) -> str | None:
    return item.reply.custom_id if isinstance(item.reply, OpenAIReply) else None


def _duplicate(index: int, custom_id: str, first: int) -> BadLine:
    error = RequestError(
        f"custom_id {custom_id!r} is already that of line {first}; ids must be unique in a file",
        param="custom_id",
        code="duplicate_custom_id",
    )
    return BadLine(OpenAIReply(index, custom_id, None), error)


def _as_request_error(error: RequestError | ConfigError) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error), param="prompt", code="no_tokenizer")
