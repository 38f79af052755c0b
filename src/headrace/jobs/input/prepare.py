"""Prepares lines for the engine: parses, renders chat templates, tokenizes in batches.

Nothing here depends on other lines, so it can run in another process (`prepare_process`). Checks that do are in
`job_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import pack

import msgspec
import numpy as np

from headrace.engine.prompts import PromptReader
from headrace.errors import ConfigError, RequestError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.lines import AnyReply, BadLine, LineParser, LineRequest
from headrace.jobs.input.openai_lines import OpenAIReply
from headrace.jobs.input.tool_lines import ToolLines
from headrace.openai.parser_names import AUTOMATIC, ParserNames
from headrace.openai.prompts import render_chat
from headrace.types import SamplingParams, TokenIds

NUM_QUESTIONS = 64  # first lines whose prompts are kept, to show one beside its answer
QUESTION_LEN = 1_000
TOKEN_BYTES = 4


class LineParts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The prompts of a line that is not simply one prompt to continue. Each is a request of its own to the engine; the
    line is done when all of them are."""

    prompt_lens: tuple[int, ...]  # their tokens follow each other in `Work.tokens`
    is_embedding: bool = False  # they are embedded, and the line's `params` are not used


class Work(msgspec.Struct, frozen=True, gc=False):
    """A prepared line, ready to submit. Many are held at once, so it keeps only what its reply needs."""

    reply: AnyReply
    params: SamplingParams  # shared by all lines that give the same values
    tokens: bytes  # the prompt, as int32; several prompts one after the other
    cache_salt: str | None = None
    seed: int | None = None  # the line's own, where `params` has none
    notes: tuple[str, ...] = ()
    question: str | None = None  # shown beside an answer; set for the first lines only
    num_text_bytes: int = 0  # of the prompt, if it was text
    parts: LineParts | None = None  # None: one prompt to continue

    @property
    def token_ids(self) -> TokenIds:
        """A copy, since torch needs a writable array."""
        return np.frombuffer(bytearray(self.tokens), np.int32)

    @property
    def num_sequences(self) -> int:
        """Of the engine, for all prompts."""
        if self.parts is None:
            return self.params.num_sequences
        return len(self.parts.prompt_lens) * (1 if self.parts.is_embedding else self.params.num_sequences)

    def part_ids(self) -> list[TokenIds]:
        """The token ids of each prompt."""
        token_ids = self.token_ids
        if self.parts is None:
            return [token_ids]
        return np.split(token_ids, np.cumsum(self.parts.prompt_lens)[:-1])


Items = list[Work | BadLine]
_Rendered = tuple[int, LineRequest, str]  # position in the batch, request, prompt as text


class LinePreparer:
    """Used by one thread."""

    num_ahead = 0  # batches taken before the first is returned

    def __init__(self, parser: LineParser, prompts: PromptReader, parser_names: ParserNames = AUTOMATIC) -> None:
        self._parser = parser
        self._prompts = prompts
        self._num_questions = 0
        self._tools = ToolLines(prompts, parser_names)

    def prepare_all(self, batches: Iterable[list[InputLine]]) -> Iterator[Items]:
        return map(self.prepare, batches)

    def prepare(self, lines: Sequence[InputLine]) -> Items:
        """One item for each line, in their order."""
        parse = self._parser.parse
        items: list[Work | BadLine | None] = [None] * len(lines)
        with_special: list[_Rendered] = []
        without: list[_Rendered] = []
        for place, line in enumerate(lines):
            request = parse(line)
            if isinstance(request, BadLine):
                items[place] = request
            elif request.messages is not None:
                rendered = self._render(place, request)
                if isinstance(rendered, BadLine):
                    items[place] = rendered
                else:
                    without.append(rendered)
            elif isinstance(request.prompt, str):
                with_special.append((place, request, request.prompt))
            else:
                items[place] = self._read_prompts(request)
        self._tokenize(self._without_long(with_special, items), items, add_special_tokens=True)
        self._tokenize(self._without_long(without, items), items, add_special_tokens=False)
        return [item for item in items if item is not None]

    def _render(self, place: int, request: LineRequest) -> _Rendered | BadLine:
        assert request.messages is not None
        try:
            return place, *self._rendered(request)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))

    def _rendered(self, request: LineRequest) -> tuple[LineRequest, str]:
        """A chat line's prompt, and the line with what its tools and the model's reasoning change."""
        assert request.messages is not None
        asked, reply = request.tool_request, request.reply
        if not isinstance(reply, OpenAIReply) or (asked is None and not self._tools.has_reasoning):
            return request, render_chat(self._prompts, request.messages, request.template_options)
        use = self._tools.use_of(asked)
        text = render_chat(self._prompts, request.messages, request.template_options, tools=use.tool_use.tools)
        is_inside = use.is_inside(text)
        reply = reply.with_format(use.format(is_inside))
        params = self._tools.params_of(request.params, use, is_inside)
        return msgspec.structs.replace(request, reply=reply, params=params), text

    def _read_prompts(self, request: LineRequest) -> Work | BadLine:
        """Token ids, or several prompts."""
        given = request.prompts or [request.prompt or []]
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        try:
            for text in texts:
                self._prompts.check_long_text(text)
            read = self._prompts.read(given)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))
        tokens = b"".join([prompt.token_ids.tobytes() for prompt in read])
        if request.prompts is None:
            return self._work(request, tokens, None)
        parts = LineParts(tuple([len(prompt.token_ids) for prompt in read]), request.is_embedding)
        return self._work(request, tokens, "".join(texts), parts)

    def _without_long(self, rendered: list[_Rendered], items: list[Work | BadLine | None]) -> list[_Rendered]:
        """Returns the list without texts that are much too long, which become errors."""
        check, kept = self._prompts.check_long_text, []
        for one in rendered:
            try:
                check(one[2])
                kept.append(one)
            except (RequestError, ConfigError) as error:
                items[one[0]] = BadLine(one[1].reply, _as_request_error(error))
        return kept

    def _tokenize(
        self, rendered: list[_Rendered], items: list[Work | BadLine | None], *, add_special_tokens: bool
    ) -> None:
        if not rendered:
            return
        texts = [text for _, _, text in rendered]
        try:
            encoded = self._prompts.tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        except (RequestError, ConfigError) as error:
            if len(rendered) == 1:
                ((place, request, _),) = rendered
                items[place] = BadLine(request.reply, _as_request_error(error))
                return
            for one in rendered:  # find the bad one
                self._tokenize([one], items, add_special_tokens=add_special_tokens)
            return
        for (place, request, text), ids in zip(rendered, encoded, strict=True):
            items[place] = self._work(request, pack(f"{len(ids)}i", *ids), text)

    def _work(self, request: LineRequest, tokens: bytes, text: str | None, parts: LineParts | None = None) -> Work:
        if parts is None and request.is_embedding:
            parts = LineParts((len(tokens) // TOKEN_BYTES,), is_embedding=True)
        question = None
        if self._num_questions < NUM_QUESTIONS:
            self._num_questions += 1
            question = request.question[:QUESTION_LEN]
        num_text_bytes = 0
        if text is not None:
            num_text_bytes = len(text) if text.isascii() else len(text.encode())
        return Work(
            request.reply,
            request.params,
            tokens,
            request.cache_salt,
            request.seed,
            request.notes,
            question,
            num_text_bytes,
            parts,
        )


def _as_request_error(error: RequestError | ConfigError) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error), param="prompt", code="no_tokenizer")
