"""Rules of Lark grammars that force tool calls; see `grammar.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.text.tools.calls import parameter_types
from headrace.types import JSON_WHITESPACE, StructuredOutputs

_OPTIONS = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
_MAX_COUNTED = 256  # characters of a text that are counted; more would need too many states
_SHARED = ("$defs", "definitions")  # what references in a part of a schema point to


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """The rule of a JSON text that matches a schema."""
    return f"{name}: %json {json_text({**_OPTIONS, **schema})}"


@dataclass(frozen=True)
class ToolRule:
    """A tool that may be called: `id` makes the names of its rules unique."""

    id: int
    name: str
    schema: Mapping[str, Any]  # of its arguments, an object

    @property
    def call(self) -> str:
        return f"call_{self.id}"

    @property
    def arguments(self) -> str:
        return f"args_{self.id}"

    def json_arguments(self) -> str:
        """Returns the rule of the arguments as a JSON object."""
        return json_rule(self.arguments, {"type": "object", **self.schema})

    def parameters(self) -> list[ParameterRule]:
        """Returns the parameters, those that are required first."""
        properties = self.schema.get("properties") or {}
        required = set(self.schema.get("required") or ())
        shared = {key: self.schema[key] for key in _SHARED if key in self.schema}
        found = [
            ParameterRule(f"{self.id}_{place}", name, {**shared, **schema} if shared else schema, name in required)
            for place, (name, schema) in enumerate(properties.items())
        ]
        return sorted(found, key=lambda parameter: not parameter.is_required)


@dataclass(frozen=True)
class ParameterRule:
    id: str
    name: str
    schema: Mapping[str, Any]
    is_required: bool

    @property
    def rule(self) -> str:
        return f"param_{self.id}"

    @property
    def value(self) -> str:
        return f"value_{self.id}"

    def json_value(self) -> str:
        """Returns the rule of its value as JSON."""
        schema = self.schema if isinstance(self.schema, Mapping) else {}
        return json_rule(self.value, schema)

    @property
    def repeats(self) -> str:
        """How many characters its text may have, as a regex says it."""
        longest = self.schema.get("maxLength") if isinstance(self.schema, Mapping) else None
        return f"{{0,{longest}}}" if isinstance(longest, int) and 0 < longest <= _MAX_COUNTED else "*"

    @property
    def choices(self) -> list[str] | None:
        """The texts that it may be, if it is one of some texts."""
        values = self.schema.get("enum") if isinstance(self.schema, Mapping) else None
        return list(values) if isinstance(values, list) and all(isinstance(value, str) for value in values) else None


def json_text(schema: Mapping[str, Any]) -> str:
    return str(StructuredOutputs(json=schema, asked_as="tools").source)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def any_call(tools: Sequence[ToolRule]) -> str:
    return f"call: {' | '.join(tool.call for tool in tools)}"


def several(item: str, separator: str, max_calls: int) -> str:
    """Returns one to `max_calls` items; `separator` is text as Lark writes it, or nothing."""
    return item if max_calls == 1 else f"{item} ({separator} {item}){{0,{max_calls - 1}}}"


def object_calls(tools: Sequence[ToolRule], *, name_key: str = "name", key: str = "arguments") -> list[str]:
    """Returns the rules of calls that are JSON objects with a name and arguments."""
    lines = [any_call(tools)]
    for tool in tools:
        prefix = f"{{{quoted(name_key)}: {quoted(tool.name)}, {quoted(key)}: "
        lines += [f'{tool.call}: {quoted(prefix)} {tool.arguments} "}}"', tool.json_arguments()]
    return lines


def named_calls(tools: Sequence[ToolRule], before: Callable[[str], str], after: str) -> list[str]:
    """Returns the rules of calls whose name stands before their arguments; `before` and `after` write Lark."""
    lines = [any_call(tools)]
    for tool in tools:
        lines += [f"{tool.call}: {before(tool.name)} {tool.arguments} {after}", tool.json_arguments()]
    return lines


def tagged_calls(
    tools: Sequence[ToolRule], *, before: Callable[[str], str], opened: Callable[[str], str], close: str, after: str
) -> list[str]:
    """Returns the rules of calls with parameters between tags. All arguments are text; the value of a parameter that is
    text ends at its closing tag."""
    lines = [any_call(tools)]
    for tool in tools:
        parameters = tool.parameters()
        used = " ".join(each.rule if each.is_required else f"{each.rule}?" for each in parameters)
        lines.append(f"{tool.call}: {quoted(before(tool.name))} {used} {quoted(after)}")
        for each in parameters:
            lines += _tagged(each, opened(each.name), close, is_text=_is_text(tool, each))
    return lines


def _is_text(tool: ToolRule, parameter: ParameterRule) -> bool:
    return parameter_types(tool.schema).get(parameter.name) == ("string",)


def _tagged(parameter: ParameterRule, opened: str, close: str, *, is_text: bool) -> list[str]:
    if is_text and parameter.choices is None:
        return [
            f"{parameter.rule}: {quoted(opened)} {parameter.value}",
            f"{parameter.value}[suffix={quoted(close)}]: /(.|\\n){parameter.repeats}/",
        ]
    rule = f"{parameter.rule}: {quoted(opened)} {parameter.value} {quoted(close)}"
    if is_text and parameter.choices is not None:
        return [rule, f"{parameter.value}: {' | '.join(map(quoted, parameter.choices))}"]
    return [rule, parameter.json_value()]


def python_calls(tools: Sequence[ToolRule]) -> list[str]:
    """Returns the rules of calls in Python's notation; values are written as in JSON."""
    lines = [any_call(tools)]
    for tool in tools:
        parameters = tool.parameters()
        lines.append(f'{tool.call}: {quoted(tool.name + "(")} first_{tool.id}_0 ")"')
        for place, each in enumerate(parameters):
            skip = "" if each.is_required else f" | first_{tool.id}_{place + 1}"
            lines.append(f"first_{tool.id}_{place}: {each.rule} more_{tool.id}_{place + 1}{skip}")
            more = f'", " {each.rule}' if each.is_required else f'(", " {each.rule})?'
            lines.append(f"more_{tool.id}_{place}: {more} more_{tool.id}_{place + 1}")
            lines += [f"{each.rule}: {quoted(each.name + '=')} {each.value}", each.json_value()]
        lines += [f'first_{tool.id}_{len(parameters)}: ""', f'more_{tool.id}_{len(parameters)}: ""']
    return lines
