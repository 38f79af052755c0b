"""Prepares lines for the engine: parses, renders chat templates, tokenizes in batches.

Nothing here depends on other lines, so it can run in another process (`prepare_process`). Checks that do are in
`job_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import pack
from typing import Any

import msgspec
import numpy as np

from headrace.engine.pooling import check_dimensions, check_scoring, check_task
from headrace.engine.pooling_prompts import PoolingReader
from headrace.engine.prompts import PromptReader, TokenizedPrompt
from headrace.errors import ConfigError, RequestError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.lines import AnyReply, BadLine, LineParser, LineRequest
from headrace.jobs.input.openai_lines import OpenAIReply, PooledFields
from headrace.jobs.input.tool_lines import ToolLines
from headrace.models.pooler import PoolerSpec, PoolerTask
from headrace.openai.parser_names import AUTOMATIC, ParserNames
from headrace.openai.prompts import render_chat
from headrace.openai.scoring import RerankFormat, ScoreFormat
from headrace.types import SamplingParams, TokenIds

NUM_QUESTIONS = 64  # first lines whose prompts are kept, to show one beside its answer
QUESTION_LEN = 1_000
TOKEN_BYTES = 4


class LineParts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The prompts of a line that is not simply one prompt to continue. Each is a request of its own to the engine; the
    line is done when all of them are."""

    prompt_lens: tuple[int, ...]  # their tokens follow each other in `Work.tokens`
    task: PoolerTask | None = None  # they are embedded or classified, and the line's `params` are not used
    use_activation: bool | None = None  # see `PoolingParams`
    dimensions: int | None = None
    second_starts: tuple[int | None, ...] = ()  # where the second text of each pair starts; empty: there are none

    @property
    def is_pooled(self) -> bool:
        return self.task is not None


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
    adapter: str | None = None  # None: the model itself

    @property
    def token_ids(self) -> TokenIds:
        """A copy, since torch needs a writable array."""
        return np.frombuffer(bytearray(self.tokens), np.int32)

    @property
    def num_sequences(self) -> int:
        """Of the engine, for all prompts."""
        if self.parts is None:
            return self.params.num_sequences
        return len(self.parts.prompt_lens) * (1 if self.parts.is_pooled else self.params.num_sequences)

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

    def __init__(
        self,
        parser: LineParser,
        prompts: PromptReader,
        parser_names: ParserNames = AUTOMATIC,
        *,
        pooler: PoolerSpec | None = None,
    ) -> None:
        self._parser = parser
        self._prompts = prompts
        self._pooler = pooler
        self._pooling = PoolingReader(prompts, pooler)
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
                text = request.prompt if request.pooled is None else self._pooling.with_prompt(request.prompt)
                with_special.append((place, request, text))
            elif request.pooled is not None:
                items[place] = self._read_pooled(request, request.pooled)
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
        parts = LineParts(tuple([len(prompt.token_ids) for prompt in read]))
        return self._work(request, tokens, "".join(texts), parts)

    def _read_pooled(self, request: LineRequest, asked: PooledFields) -> Work | BadLine:
        """Texts to embed with options of their own, several texts, or pairs to score."""
        try:
            read, reply = self._pooled_prompts(request, asked)
        except (RequestError, ConfigError) as error:
            return BadLine(request.reply, _as_request_error(error))
        is_pairs = asked.num_first > 0
        scores_by_cosine = is_pairs and self._pooler is not None and self._pooler.task == "embed"
        parts = LineParts(
            tuple([len(prompt.token_ids) for prompt in read]),
            "embed" if self._pooler is None else self._pooler.task,
            True if scores_by_cosine else asked.use_activation,
            asked.dimensions,
            tuple([prompt.second_start for prompt in read]) if is_pairs else (),
        )
        tokens = b"".join([prompt.token_ids.tobytes() for prompt in read])
        texts = "".join([prompt for prompt in request.prompts or () if isinstance(prompt, str)])
        return self._work(msgspec.structs.replace(request, reply=reply), tokens, texts or None, parts)

    def _pooled_prompts(self, request: LineRequest, asked: PooledFields) -> tuple[list[TokenizedPrompt], AnyReply]:
        given: list[Any] = request.prompts or [request.prompt]
        if asked.num_first:
            check_scoring(self._pooler)
            firsts, seconds = given[: asked.num_first], given[asked.num_first :]
            pairs = self._pooling.read_pairs(firsts, seconds, truncate=asked.truncate)
            reply = request.reply
            assert isinstance(reply, OpenAIReply) and isinstance(reply.shape, RerankFormat | ScoreFormat)
            shape = msgspec.structs.replace(reply.shape, num_first=pairs.num_first)
            return pairs.prompts, msgspec.structs.replace(reply, shape=shape)
        check_task(self._pooler, "embed")
        check_dimensions(self._pooler, asked.dimensions)
        read = self._pooling.read(
            given,
            prompt_name=asked.prompt_name,
            truncate=asked.truncate,
            add_special_tokens=asked.add_special_tokens,
        )
        return read, request.reply

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
        if parts is None and request.pooled is not None:
            parts = LineParts((len(tokens) // TOKEN_BYTES,), "embed")
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
            request.adapter,
        )


def _as_request_error(error: RequestError | ConfigError) -> RequestError:
    return error if isinstance(error, RequestError) else RequestError(str(error), param="prompt", code="no_tokenizer")
