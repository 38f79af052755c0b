"""OpenAI's batch lines: {"custom_id", "method", "url", "body"} in, its output lines and completion objects out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from headrace.errors import RequestError, nearest
from headrace.jobs.input.fields import LABELS, SAMPLING_FIELDS, UNSUPPORTED, refuse_unknown, refuse_unsupported
from headrace.jobs.input.line_output import LineAnswer, LineOutput
from headrace.jobs.input.logprobs import chat_entries, completion_lists
from headrace.jobs.input.reply import ENGINE_ERROR, EXPIRED, POISON, JobFacts, encode, message_of, usage

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]

CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, for /v1/completions only
DUPLICATE_ID = "duplicate_custom_id"
ID_PREFIX = "batch_req_"
RESULT_START = b'{"id":"' + ID_PREFIX.encode()  # of output lines in this format, and of no others

_ENVELOPE = ("custom_id", "method", "url", "body")
_EXTRAS = frozenset({"cache_salt"})
_OWN_FIELDS = {CHAT: frozenset({"messages", "chat_template_kwargs"}), COMPLETIONS: frozenset({"prompt"})}
KNOWN_FIELDS = {
    endpoint: own | SAMPLING_FIELDS | LABELS | UNSUPPORTED.keys() | _EXTRAS for endpoint, own in _OWN_FIELDS.items()
}


def is_openai(line: Mapping[str, Any]) -> bool:
    return "body" in line or "url" in line


def read_endpoint(line: Mapping[str, Any]) -> Endpoint:
    """The url of a well-formed envelope."""
    is_plain_chat = len(line) == len(_ENVELOPE) and line.get("method") == "POST" and line.get("url") == CHAT
    if is_plain_chat and type(line.get("body")) is dict and type(line.get("custom_id")) is str and line["custom_id"]:
        return CHAT  # most lines
    for name in line:
        if name not in _ENVELOPE:
            raise _bad_envelope(f"unknown field {name!r} beside custom_id, method, url and body", name)
    custom_id, method, url = line.get("custom_id"), line.get("method"), line.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        raise _bad_envelope(f"custom_id must be a non-empty text, got {custom_id!r}", "custom_id")
    if method != "POST":
        raise _bad_envelope(f"method must be 'POST', got {method!r}", "method")
    if url not in list(_OWN_FIELDS):  # a list: what was given may have no hash
        known = " or ".join(_OWN_FIELDS)
        raise _bad_envelope(f"url must be {known}, got {url!r}{nearest(str(url), _OWN_FIELDS)}", "url")
    if not isinstance(line.get("body"), dict):
        raise _bad_envelope("body must be an object", "body")
    return CHAT if url == CHAT else COMPLETIONS


def check_body(body: Mapping[str, Any], endpoint: Endpoint) -> None:
    refuse_unsupported(body, UNSUPPORTED)
    refuse_unknown(body, KNOWN_FIELDS[endpoint])
    if not isinstance(body.get("cache_salt", ""), (str, type(None))):
        raise RequestError(f"cache_salt must be text, got {body['cache_salt']!r}", param="cache_salt")


def _bad_envelope(message: str, param: str) -> RequestError:
    return RequestError(message, param=param, code="invalid_line")


class OpenAIReply(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    index: int
    custom_id: str | None
    endpoint: Endpoint | None  # None: not even a request, so its error is the line's and has no response

    def answer(self, output: LineOutput, facts: JobFacts) -> bytes:
        kind, name, choice = _CHAT_NAMES if self.endpoint == CHAT else _TEXT_NAMES
        own_id, custom_id = b"%b-%d" % (facts.job_id_text, self.index), encode(self.custom_id)
        answers = output.answers
        choices = choice(answers[0], facts) if len(answers) == 1 else b",".join([choice(a, facts) for a in answers])
        body = (kind, own_id, name, facts.now(), facts.model_name_text, choices, usage(output))
        return _ANSWER % (own_id, custom_id, own_id, *body)

    def error(self, error: RequestError, facts: JobFacts) -> bytes:
        if error.code == EXPIRED:
            return self._line(facts, error={"code": error.code, "message": str(error)})
        message = message_of(error, self.index)
        if self.endpoint is None:
            return self._line(facts, error={"code": error.code, "message": message})
        is_ours = error.code in (ENGINE_ERROR, POISON)
        kind = "server_error" if is_ours else "invalid_request_error"
        body = {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}
        return self._line(facts, response=self._response(500 if is_ours else 400, body, facts))

    def _line(
        self, facts: JobFacts, *, response: _Response | None = None, error: dict[str, Any] | None = None
    ) -> bytes:
        return encode(_Line(facts.id_of(ID_PREFIX, self.index), self.custom_id, response, error))

    def _response(self, status_code: int, body: dict[str, Any], facts: JobFacts) -> _Response:
        return _Response(status_code, facts.id_of("req_", self.index), body)


# An error line's objects, their fields in the order in which they are written.


class _Line(msgspec.Struct, gc=False):
    id: str
    custom_id: str | None
    response: _Response | None
    error: dict[str, Any] | None


class _Response(msgspec.Struct, gc=False):
    status_code: int
    request_id: str
    body: dict[str, Any]


# Answers are written into texts: in less than half the time that objects take.

_ANSWER = (
    b'{"id":"batch_req_%b","custom_id":%b,"response":{"status_code":200,"request_id":"req_%b",'
    b'"body":{"id":"%b-%b","object":"%b","created":%d,"model":%b,"choices":[%b],"usage":%b,'
    b'"system_fingerprint":null}},"error":null}'
)
_CHAT_CHOICE = (
    b'{"index":%d,"message":{"role":"assistant","content":%b,"refusal":null},"logprobs":%b,"finish_reason":%b}'
)
_TEXT_CHOICE = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'


def _chat_choice(answer: LineAnswer, facts: JobFacts) -> bytes:
    logprobs = b"null"
    if answer.logprobs is not None:
        logprobs = encode({"content": chat_entries(answer.logprobs, facts.tokenizer), "refusal": None})
    return _CHAT_CHOICE % (answer.index, encode(answer.text), logprobs, encode(answer.finish_reason))


def _text_choice(answer: LineAnswer, facts: JobFacts) -> bytes:
    logprobs = b"null"
    if answer.logprobs is not None:
        logprobs = encode(completion_lists(answer.logprobs, facts.tokenizer))
    return _TEXT_CHOICE % (answer.index, encode(answer.text), logprobs, encode(answer.finish_reason))


_CHAT_NAMES = (b"chatcmpl", b"chat.completion", _chat_choice)
_TEXT_NAMES = (b"cmpl", b"text_completion", _text_choice)
