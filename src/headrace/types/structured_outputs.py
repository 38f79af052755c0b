"""The form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.arguments import refuses_unknown
from headrace.errors import RequestError
from headrace.types.checks import refusal

JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # in JSON answers; bounded, since weak models would not stop
MAX_GRAMMAR_LEN = 1 << 17  # characters of a schema, regex, grammar or list of choices


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """A model's reasoning at the start of its answer, where no grammar applies. The answer proper starts after the
    first of `end_texts`, special tokens included."""

    end_texts: tuple[str, ...]
    start_token_id: int | None = None  # the reasoning starts with this token, if there is any; None: it has started
    max_tokens: int | None = None  # after so many tokens `end_token_ids` follow; None: no limit
    end_token_ids: tuple[int, ...] = ()


@refuses_unknown(RequestError)
@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that an answer must have: exactly one of these fields. Names are vLLM's; a `json` object becomes text.
    None of them: any form, after a reasoning of limited length.

    Only what needs no tokenizer is checked here; the rest is checked when the grammar is compiled.
    """

    json: Mapping[str, Any] | str | None = None  # a JSON schema
    regex: str | None = None  # the whole answer matches it
    choice: Sequence[str] | None = None  # the answer is one of these
    grammar: str | None = None  # in Lark or GBNF notation
    json_object: bool = False  # any JSON object
    reasoning: ReasoningSpan | None = None  # what may come before; set by the front, which knows the model's format
    asked_as: str = field(default="structured_outputs", compare=False)  # the parameter name in error messages

    def __post_init__(self) -> None:
        named = {"json": self.json, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        given = [name for name, value in named.items() if value is not None]
        if not isinstance(self.json_object, bool):
            raise self.refused(f"json_object must be true or false, got {self.json_object!r}")
        if not isinstance(self.reasoning, ReasoningSpan | None):
            raise self.refused("reasoning cannot be set; it is known from the model")
        if len(given) + self.json_object != 1 and not (self.is_any and self._limits_reasoning):
            got = ", ".join([*given, *(["json_object"] if self.json_object else [])]) or "none"
            raise self.refused(f"give exactly one of json, regex, choice, grammar and json_object, got {got}")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text(self.json))
        for name in ("regex", "grammar"):
            value = named[name]
            if value is not None and not (isinstance(value, str) and value):
                raise self.refused(f"{name} must be non-empty text, got {value!r}")
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices(self.choice))
        if len(self.source) > MAX_GRAMMAR_LEN:
            num_chars = len(self.source)
            raise self.refused(f"{self.kind} has {num_chars:,} characters; at most {MAX_GRAMMAR_LEN:,} are allowed")
        try:
            self.source.encode("utf-8")
        except UnicodeEncodeError:
            raise self.refused(f"{self.kind} is not valid Unicode: it contains a lone surrogate") from None

    @classmethod
    def of(cls, given: object) -> StructuredOutputs:
        """Builds it from what the user passed: an instance, or a mapping with its fields."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise refusal("structured_outputs", given, "StructuredOutputs or a mapping with its fields")
        try:
            return cls(**{str(name): value for name, value in given.items()})
        except RequestError as error:
            raise RequestError(str(error), param=error.param or "structured_outputs") from None

    @classmethod
    def of_checked(cls, fields: Mapping[str, Any]) -> StructuredOutputs:
        """See `SamplingParams.of_checked`."""
        outputs = object.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(outputs, name, tuple(value) if isinstance(value, list) else value)
        if (span := fields["reasoning"]) is not None:
            lists = {name: tuple(value) for name, value in span.items() if isinstance(value, list)}
            object.__setattr__(outputs, "reasoning", ReasoningSpan(**span | lists))
        return outputs

    @property
    def kind(self) -> str:
        names = ("json", "regex", "choice", "grammar")
        found = next((name for name in names if getattr(self, name) is not None), None)
        return found or ("json_object" if self.json_object else "any")

    @property
    def is_any(self) -> bool:
        """Whether the answer may have any form, after its reasoning."""
        return self.kind == "any"

    @property
    def _limits_reasoning(self) -> bool:
        return self.reasoning is not None and self.reasoning.max_tokens is not None

    @property
    def source(self) -> str:
        """The field that was given, as text."""
        if self.is_any:
            return ""
        value = getattr(self, self.kind)
        if self.kind == "json_object":
            return '{"type":"object"}'
        return json.dumps(value, ensure_ascii=False) if self.kind == "choice" else str(value)

    def refused(self, message: str) -> RequestError:
        name = self.asked_as if isinstance(self.asked_as, str) else "structured_outputs"
        return RequestError(f"{name}: {message}", param=name)

    def _schema_text(self, schema: object) -> str:
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError:
            raise self.refused("the JSON schema is nested too deeply") from None
        except (TypeError, ValueError) as error:
            raise self.refused(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(value, Mapping):
            raise self.refused(f"a JSON schema must be an object, got {type(value).__name__}")
        return text

    def _choices(self, given: object) -> tuple[str, ...]:
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise self.refused(f"choice must be a list of at least one text, got {given!r}")
        if not all(isinstance(text, str) and text for text in given):
            raise self.refused("every choice must be non-empty text")
        return tuple(given)


StructuredOutputsParams = StructuredOutputs  # vLLM's name
