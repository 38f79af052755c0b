"""Parses a line of the input into a request, or into the error that it becomes. Reads no files and needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import msgspec

from headrace.engine.prompts import Messages
from headrace.errors import RequestError, nearest
from headrace.jobs.formats.reader import MAX_LINE_BYTES, InputLine
from headrace.jobs.input.field_names import BodyNames, PlainNames
from headrace.jobs.input.fields import (
    UNTIL_CONTEXT_ENDS,
    ParamsReader,
    as_response,
    read_chat,
    read_completion,
    read_plain,
    read_response,
    sampling_names,
    with_overrides,
)
from headrace.jobs.input.openai_lines import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    RESPONSES,
    SCORE,
    Endpoint,
    OpenAIReply,
    PooledFields,
    is_openai,
    read_body,
    read_endpoint,
    read_pooled_body,
)
from headrace.jobs.input.plain_lines import (
    DEFAULT_PROMPT_TOKENS,
    PlainReply,
    as_members,
    carried_columns,
    idle_columns,
    is_plain,
)
from headrace.jobs.input.reply import UnknownReply, encode
from headrace.jobs.input.template import LineTemplate
from headrace.openai.errors import MODEL_NOT_FOUND
from headrace.openai.prompts import template_variables
from headrace.openai.response_items import as_messages
from headrace.openai.responses import ResponseFields, response_tools, response_variables
from headrace.openai.sampling import DEFAULT_COMPLETION_TOKENS, check_label, check_num_sequences
from headrace.openai.schema.chat import ChatRequest
from headrace.sched.sequence import sequence_seed
from headrace.types import SamplingParams

POOLING_PARAMS = SamplingParams(seed=0)  # nothing is sampled

AnyReply: TypeAlias = PlainReply | OpenAIReply | UnknownReply


class LineRequest(msgspec.Struct, frozen=True, gc=False):
    """A valid line. One of `prompt`, `prompts` and `messages` is set."""

    reply: AnyReply
    params: SamplingParams  # shared by all lines that give the same values
    prompt: str | list[int] | None = None
    messages: Messages | None = None
    template_options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    cache_salt: str | None = None
    seed: int | None = None  # the line's own, where `params` has none
    notes: tuple[str, ...] = ()  # warnings for the summary
    prompts: list[str | list[int]] | None = None  # instead of `prompt`, if the line has several
    pooled: PooledFields | None = None  # the prompts are embedded or scored; `params` is not used
    tool_request: ChatRequest | None = None  # if it has tools, which `LinePreparer` reads: they need the tokenizer
    adapter: str | None = None  # None: the model itself

    @property
    def question(self) -> str:
        """The prompt, or the last message: shown beside an answer. The first of several prompts."""
        if self.messages is not None:
            return str(self.messages[-1].get("content", ""))
        prompt = self.prompt if self.prompts is None else self.prompts[0]
        return prompt if isinstance(prompt, str) else f"{len(prompt or ()):,} token ids"


class BadLine(msgspec.Struct, frozen=True, gc=False):
    reply: AnyReply
    error: RequestError


class LineParser:
    """Applies the job's sampling defaults and seed. The same line gives the same request on every machine.
    With a template, lines are data and the template makes a request of each."""

    def __init__(
        self,
        defaults: Mapping[str, Any],
        *,
        seed: int,
        model_name: str,
        template: LineTemplate | None = None,
        overrides: Mapping[str, Any] | None = None,
        is_redone: Callable[[int], bool] = lambda index: False,
        adapters: Collection[str] = (),
        model_names: Collection[str] = (),
    ) -> None:
        """`overrides` replace the parameters of repeated lines, and of no others. `adapters`: names that `model` of a
        line may have beside the model's own, which are `model_name` and `model_names`."""
        self._adapters = adapters
        self._template = template
        self._seed = seed
        self._model_name = model_name
        self._model_names = (None, model_name, *model_names)
        self._plain_readers = {
            tokens: ParamsReader(read_plain, {"max_tokens": tokens, **defaults})
            for tokens in (UNTIL_CONTEXT_ENDS, DEFAULT_PROMPT_TOKENS)
        }
        self._body_readers = {
            CHAT: ParamsReader(read_chat, {"max_tokens": UNTIL_CONTEXT_ENDS, **defaults}),
            COMPLETIONS: ParamsReader(read_completion, {"max_tokens": DEFAULT_COMPLETION_TOKENS, **defaults}),
            RESPONSES: ParamsReader(read_response, {"max_tokens": UNTIL_CONTEXT_ENDS, **defaults}),
        }
        self._overrides = overrides or {}
        self._is_redone = is_redone
        self._decoder = msgspec.json.Decoder()
        self._plain_names = PlainNames()
        self._body_names = BodyNames()

    def parse(self, line: InputLine) -> LineRequest | BadLine:
        try:
            decoded = self._decode(line)
        except RequestError as error:
            is_data = self._template is not None or line.problem is not None
            return BadLine(PlainReply(line.index) if is_data else UnknownReply(line.index), error)
        if self._template is not None:
            return self._parse_data(line, decoded, self._template)
        if is_plain(decoded):
            return self._parse_plain(line, decoded)
        if is_openai(decoded):
            return self._parse_openai(line, decoded)
        missing = RequestError(
            "no prompt: a line needs 'prompt' or 'messages', or OpenAI's custom_id, method, url and body",
            param="prompt",
            code="missing_prompt",
        )
        return BadLine(PlainReply(line.index, self._plain_names.of(decoded).carried_of(decoded)), missing)

    def _decode(self, line: InputLine) -> dict[str, Any]:
        if line.problem is not None:
            raise RequestError(line.problem, code="invalid_row")
        if line.is_too_long:
            raise RequestError(f"longer than {MAX_LINE_BYTES // 2**20} MiB", code="line_too_long")
        try:
            decoded = self._decoder.decode(line.data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _not_json(line.data, error) from None
        if not isinstance(decoded, dict):
            raise RequestError(f"a line must be a JSON object, got {_kind(decoded)}", code="invalid_json")
        return decoded

    def _parse_data(self, line: InputLine, row: dict[str, Any], template: LineTemplate) -> LineRequest | BadLine:
        reply = PlainReply(line.index, as_members(carried_columns(row, template.messages_column)))
        try:
            fields = template.fields(row)
            messages = _read_messages(fields) if "messages" in fields else None
            default = DEFAULT_PROMPT_TOKENS if messages is None else UNTIL_CONTEXT_ENDS
            params = self._params(line, {}, (), default_max_tokens=default)
            return LineRequest(
                reply,
                params,
                fields.get("prompt"),
                messages,
                seed=self._seed_of(line, params),
                notes=idle_columns(row),
            )
        except RequestError as error:
            return BadLine(reply, error)

    def _parse_plain(self, line: InputLine, fields: dict[str, Any]) -> LineRequest | BadLine:
        names = self._plain_names.of(fields)
        reply = PlainReply(line.index, names.carried_of(fields))
        try:
            names.check(fields)
            messages = _plain_messages(fields)
            default = DEFAULT_PROMPT_TOKENS if messages is None else UNTIL_CONTEXT_ENDS
            params = self._params(line, fields, names.sampling, default_max_tokens=default)
            return LineRequest(
                reply,
                params,
                _read_prompt(fields) if messages is None else None,
                messages,
                _template_options(fields, messages),
                _cache_salt(fields),
                self._seed_of(line, params),
                names.notes,
                adapter=self._adapter_of(fields.get("model")) if self._adapters else None,
            )
        except RequestError as error:
            return BadLine(reply, error)

    def _parse_openai(self, line: InputLine, envelope: dict[str, Any]) -> LineRequest | BadLine:
        custom_id = envelope.get("custom_id")
        given_id = custom_id if isinstance(custom_id, str) else None
        try:
            endpoint = read_endpoint(envelope)
        except RequestError as error:
            other_id = b"" if custom_id is None or given_id is not None else encode(custom_id)
            return BadLine(OpenAIReply(line.index, given_id, None, other_id), error)
        reply = OpenAIReply(line.index, given_id, endpoint)
        try:
            if endpoint in (EMBEDDINGS, RERANK, SCORE):
                return self._parse_pooled(envelope["body"], endpoint, reply)
            if endpoint == RESPONSES:
                return self._parse_response(line, envelope["body"], reply)
            return self._parse_body(line, envelope["body"], endpoint, reply)
        except RequestError as error:
            return BadLine(reply, error)

    def _parse_body(self, line: InputLine, body: dict[str, Any], endpoint: Endpoint, reply: OpenAIReply) -> LineRequest:
        if self._overrides and self._is_redone(line.index):
            body = with_overrides(body, self._overrides)
        params = self._body_readers[endpoint].read(body, self._body_names.of(body, endpoint))
        read = read_body(body, endpoint)
        if read.prompts is not None:
            check_num_sequences(params, len(read.prompts))
        if endpoint == COMPLETIONS and not params.skip_special_tokens:
            reply = msgspec.structs.replace(reply, shows_special=True)
        adapter = self._adapter_of(read.model)
        if adapter is not None:
            reply = msgspec.structs.replace(reply, adapter=adapter)
        return LineRequest(
            reply,
            params,
            read.prompt,
            read.messages,
            read.template_options,
            read.cache_salt,
            self._seed_of(line, params),
            self._notes_on_model(read.model),
            read.prompts,
            tool_request=read.tool_request,
            adapter=adapter,
        )

    def _parse_pooled(self, body: dict[str, Any], endpoint: Endpoint, reply: OpenAIReply) -> LineRequest:
        """Nothing is sampled: the job's defaults, seed and overrides have no effect."""
        read = read_pooled_body(body, endpoint)
        is_one = len(read.prompts) == 1 and read.fields.is_plain
        adapter = self._adapter_of(read.model)
        return LineRequest(
            msgspec.structs.replace(reply, shape=read.format, adapter=adapter),
            POOLING_PARAMS,
            read.prompts[0] if is_one else None,
            cache_salt=read.cache_salt,
            notes=self._notes_on_model(read.model),
            prompts=None if is_one else read.prompts,
            pooled=read.fields,
            adapter=adapter,
        )

    def _parse_response(self, line: InputLine, body: dict[str, Any], reply: OpenAIReply) -> LineRequest:
        if self._overrides and self._is_redone(line.index):
            body = with_overrides(body, self._overrides, limit_name="max_output_tokens")
        params = self._body_readers[RESPONSES].read(body, self._body_names.of(body, RESPONSES))
        request = as_response(body)
        check_label("cache_salt", request.cache_salt)
        check_label("request_id", request.request_id)
        tools, adapter = response_tools(request), self._adapter_of(request.model)
        return LineRequest(
            msgspec.structs.replace(reply, shape=ResponseFields.of(request, params), adapter=adapter),
            params,
            None,
            as_messages(request),
            response_variables(request),
            request.cache_salt,
            self._seed_of(line, params),
            self._notes_on_model(request.model),
            tool_request=tools if tools.tools else None,
            adapter=adapter,
        )

    def _params(
        self, line: InputLine, fields: dict[str, Any], names: tuple[str, ...], *, default_max_tokens: int | None
    ) -> SamplingParams:
        if self._overrides and self._is_redone(line.index):
            fields = with_overrides(fields, self._overrides)
            names = sampling_names(fields)
        return self._plain_readers[default_max_tokens].read(fields, names)

    def _seed_of(self, line: InputLine, params: SamplingParams) -> int | None:
        """Derived from the line's index, so that the answer does not depend on what ran before."""
        return None if params.seed is not None else sequence_seed(self._seed, line.index + 1)

    def _adapter_of(self, asked: object) -> str | None:
        """The adapter that a line's `model` names. In a job with adapters a name that is none of them is refused: it
        may be a misspelt one."""
        if not self._adapters or asked in self._model_names:
            return None
        if not isinstance(asked, str) or asked not in self._adapters:
            guess = nearest(str(asked), self._adapters).rstrip("?")
            raise RequestError(
                f"there is no model or adapter {asked!r}{guess}; the job has adapters "
                f"{', '.join(self._adapters)}, and {self._model_name!r} or no name is the model itself",
                param="model",
                code=MODEL_NOT_FOUND,
            )
        return asked

    def _notes_on_model(self, asked: object) -> tuple[str, ...]:
        if asked in self._model_names or asked in self._adapters:
            return ()
        return (f"model {asked!r} was asked for, {self._model_name!r} answered",)


def _plain_messages(fields: Mapping[str, Any]) -> Messages | None:
    """The messages of a plain line; None if it has a prompt."""
    if fields.get("messages") is None and "prompt" in fields:
        return None
    if fields.get("prompt") is not None:
        raise RequestError("'prompt' and 'messages' are both given; give one", param="prompt")
    return _read_messages(fields)


def _read_messages(fields: Mapping[str, Any]) -> Messages:
    messages = fields.get("messages")
    if messages is None:
        raise RequestError("messages are missing", param="messages", code="missing_prompt")
    if not isinstance(messages, list) or set(map(type, messages)) != {dict}:
        raise RequestError("messages must be a list of at least one message, each an object", param="messages")
    return messages


def _read_prompt(fields: Mapping[str, Any]) -> str | list[int]:
    prompt = fields.get("prompt")
    if prompt is None:
        raise RequestError("prompt is missing", param="prompt", code="missing_prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]  # completions allow a list of prompts; a list of one prompt is that prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    if isinstance(prompt, list) and all(isinstance(item, (str, list)) for item in prompt):
        raise RequestError(
            f"{len(prompt)} prompts in one line; give each a line of its own, or use OpenAI's batch format",
            param="prompt",
        )
    raise RequestError(f"prompt must be text or a list of token ids, got {_kind(prompt)}", param="prompt")


def _template_options(fields: Mapping[str, Any], messages: Messages | None) -> dict[str, Any]:
    options, effort = fields.get("chat_template_kwargs"), fields.get("reasoning_effort")
    if messages is None:
        for name, value in (("reasoning_effort", effort), ("chat_template_kwargs", options or None)):
            if value is not None:
                raise RequestError(f"{name} needs messages: it is for the chat template", param=name)
        return {}
    if effort is not None and not isinstance(effort, str):
        raise RequestError(f"reasoning_effort must be text, got {_kind(effort)}", param="reasoning_effort")
    if options is None:
        return template_variables(None, effort)
    if not isinstance(options, dict):
        raise RequestError(
            f"chat_template_kwargs must be an object, got {_kind(options)}", param="chat_template_kwargs"
        )
    return template_variables(options, effort)


def _cache_salt(fields: Mapping[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be text, got {_kind(salt)}", param="cache_salt")
    check_label("cache_salt", salt)
    return salt


def _not_json(data: bytes, error: Exception) -> RequestError:
    """The standard library's parser has better error messages. It is slow, but bad lines are rare."""
    try:
        json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as invalid:
        return RequestError(f"invalid UTF-8 at byte {invalid.start + 1} of the line", code="invalid_utf8")
    except json.JSONDecodeError as invalid:
        problem = invalid.msg.removesuffix(" at")  # some of its messages end so
        return RequestError(f"invalid JSON: {problem} at column {invalid.colno}", code="invalid_json")
    except RecursionError:
        return RequestError("invalid JSON: nested too deeply", code="invalid_json")
    if b"\\ud" in data.lower():
        return RequestError("invalid JSON: a \\u escape is half a character (a lone surrogate)", code="invalid_json")
    return RequestError(f"invalid JSON: {error}", code="invalid_json")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
