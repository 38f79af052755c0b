"""Messages between a job and the process that prepares its lines: msgpack of known types.

    job ─▶ process   a Setup, then batches of lines
    process ─▶ job   a Batch for each

Sampling parameters are sent once per batch for all lines that share them, and are rebuilt from their fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.engine.prompts import PromptReader
from headrace.errors import RequestError
from headrace.jobs.formats.reader import InputLine
from headrace.jobs.input.lines import AnyReply, BadLine, LineParser
from headrace.jobs.input.prepare import Items, LineParts, LinePreparer, Work
from headrace.jobs.input.template import LineTemplate
from headrace.models.pooler import PoolerSpec
from headrace.openai.parser_names import AUTOMATIC, ParserNames
from headrace.text import ChatTemplate, Tokenizer
from headrace.types import SamplingParams

MAX_REMEMBERED = 1024


class SentTokenizer(msgspec.Struct, frozen=True):
    backend: str
    special_tokens: Mapping[str, str]
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    templates: dict[str, str] | None
    template_tokens: Mapping[str, str]
    template_defaults: Mapping[str, Any]
    has_token_types: bool = True

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SentTokenizer:
        template = tokenizer.chat_template
        return cls(
            tokenizer.serialized(),
            tokenizer.special_tokens,
            tokenizer.vocab_size,
            tokenizer.eos_token_ids,
            None if template is None else template.templates,
            {} if template is None else template.special_tokens,
            {} if template is None else template.defaults,
            tokenizer.has_token_types,
        )

    def restored(self) -> Tokenizer:
        return Tokenizer.of_serialized(
            self.backend,
            special_tokens=self.special_tokens,
            chat_template=None
            if self.templates is None
            else ChatTemplate(self.templates, self.template_tokens, self.template_defaults),
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            has_token_types=self.has_token_types,
        )


class Setup(msgspec.Struct, frozen=True):
    """Everything needed to build a `LinePreparer`."""

    defaults: Mapping[str, Any]
    seed: int
    model_name: str
    template: LineTemplate | None
    vocab_size: int
    tokenizer: SentTokenizer | None
    max_model_len: int | None = None
    parser_names: ParserNames = AUTOMATIC
    pooler: PoolerSpec | None = None
    adapters: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ()

    def preparer(self) -> LinePreparer:
        parser = LineParser(
            self.defaults,
            seed=self.seed,
            model_name=self.model_name,
            template=self.template,
            adapters=self.adapters,
            model_names=self.model_names,
        )
        tokenizer = None if self.tokenizer is None else self.tokenizer.restored()
        prompts = PromptReader(tokenizer, self.vocab_size, max_model_len=self.max_model_len)
        return LinePreparer(parser, prompts, self.parser_names, pooler=self.pooler)


class _Work(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    reply: AnyReply
    params: int  # index into the batch's list
    tokens: bytes
    cache_salt: str | None
    seed: int | None
    notes: tuple[str, ...]
    question: str | None
    num_text_bytes: int
    parts: LineParts | None
    adapter: str | None


class _BadLine(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    reply: AnyReply
    message: str
    param: str | None
    code: str


class _Batch(msgspec.Struct, array_like=True):
    params: list[msgspec.Raw]
    items: list[_Work | _BadLine]


_encode = msgspec.msgpack.Encoder().encode
_decode_setup = msgspec.msgpack.Decoder(Setup).decode
_decode_lines = msgspec.msgpack.Decoder(list[InputLine]).decode
_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_fields = msgspec.msgpack.Decoder(dict[str, Any]).decode


def encode_setup(setup: Setup) -> bytes:
    return _encode(setup)


def decode_setup(frame: bytes) -> Setup:
    return _decode_setup(frame)


def encode_lines(lines: list[InputLine]) -> bytes:
    return _encode(lines)


def decode_lines(frame: bytes) -> list[InputLine]:
    return _decode_lines(frame)


class ItemWriter:
    """Packs prepared batches. Equal parameters may be sent twice; different ones are never merged."""

    def __init__(self) -> None:
        self._last: tuple[SamplingParams, msgspec.Raw] | None = None

    def frame(self, items: Items) -> bytes:
        numbers: dict[int, int] = {}  # by id() of the parameters, which the items keep alive
        batch = _Batch([], [])
        for item in items:
            if isinstance(item, BadLine):
                error = item.error
                batch.items.append(_BadLine(item.reply, str(error), error.param, error.code))
                continue
            number = numbers.get(id(item.params))
            if number is None:
                number = numbers[id(item.params)] = len(batch.params)
                batch.params.append(self._raw(item.params))
            batch.items.append(
                _Work(
                    item.reply,
                    number,
                    item.tokens,
                    item.cache_salt,
                    item.seed,
                    item.notes,
                    item.question,
                    item.num_text_bytes,
                    item.parts,
                    item.adapter,
                )
            )
        return _encode(batch)

    def _raw(self, params: SamplingParams) -> msgspec.Raw:
        if self._last is None or self._last[0] is not params:
            self._last = (params, msgspec.Raw(_encode(params)))
        return self._last[1]


class ItemReader:
    """Unpacks them. Equal parameters of all batches become one object."""

    def __init__(self) -> None:
        self._known: dict[bytes, SamplingParams] = {}

    def items(self, frame: bytes) -> Items:
        batch = _decode_batch(frame)
        params = [self._params(bytes(raw)) for raw in batch.params]
        return [
            Work(
                item.reply,
                params[item.params],
                item.tokens,
                item.cache_salt,
                item.seed,
                item.notes,
                item.question,
                item.num_text_bytes,
                item.parts,
                item.adapter,
            )
            if type(item) is _Work
            else _bad_line(item)
            for item in batch.items
        ]

    def _params(self, raw: bytes) -> SamplingParams:
        known = self._known.get(raw)
        if known is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            known = self._known[raw] = SamplingParams.of_checked(_decode_fields(raw))
        return known


def _bad_line(item: _Work | _BadLine) -> BadLine:
    assert isinstance(item, _BadLine)
    return BadLine(item.reply, RequestError(item.message, param=item.param, code=item.code))
