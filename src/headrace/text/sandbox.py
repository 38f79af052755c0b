"""Runs one model's Jinja templates: what they may see, and how much work they may cause.

Limits apply to the iterations of all `for` loops, the size of what an operator creates, and the output. There is no
limit on recursive macro calls and on the time within a single filter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from itertools import islice
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headrace.errors import RequestError

MAX_ITERATIONS = 1_000_000  # iterations of all loops of one rendering together
MAX_SIZE = 2**24  # characters of output, or items of a value that an operator creates
_MAX_BITS = 4096  # of an integer
_CHUNKS_AT_ONCE = 16  # of output, between two checks of its size
_DICT_NAMES = frozenset(dir(dict))

# What template code can raise, besides Jinja's own errors.
_PYTHON_ERRORS = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)

_turns_left: ContextVar[list[int]] = ContextVar("_turns_left")


class _Refusal(jinja2.TemplateError):
    """The template's own raise_exception."""


class _BoundError(jinja2.TemplateError):
    """The template asked for more than is allowed."""


class Sandbox:
    """One environment, and the templates compiled in it."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        turns = _turns_left.set([MAX_ITERATIONS])
        try:
            template = self._compile(source)
            context = template.new_context({**template.globals, **variables}, shared=True)
            return _collect(template.root_render_func(context))
        except _Refusal as error:
            raise _failed(f"refuses these messages: {error.message}") from error
        except jinja2.TemplateSyntaxError as error:
            raise _failed(f"cannot be compiled: line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise _failed(f"failed: {error.message}") from error
        except _PYTHON_ERRORS as error:
            raise _failed(f"failed: {type(error).__name__}: {error}") from error
        finally:
            _turns_left.reset(turns)

    def variables(self, source: str) -> set[str]:
        """Returns the names that a template reads from its input; not its own names nor the sandbox's functions."""
        try:
            parsed = self._environment.parse(source)
        except jinja2.TemplateSyntaxError:
            return set()  # rendering reports the error
        return meta.find_undeclared_variables(parsed) - self._environment.globals.keys()

    def syntax_error(self, source: str) -> str | None:
        """Returns the place and the message of the first error in a template; None if it can be compiled."""
        try:
            self._environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            return f"line {error.lineno}: {error.message}"
        return None

    def _compile(self, source: str) -> jinja2.Template:
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = self._environment.from_string(_bounded(source, self._environment))
            template.globals = dict(template.globals)  # Jinja's chained mappings take a third of a short rendering
        return template


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters.update(tojson=_tojson, _counted=_counted, _sized=_sized)
        del self.globals["lipsum"]
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_make_dict, namespace=_PlainNamespace
        )

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Looks up `message.role` as a key first. Jinja tries attributes first, which a dictionary of messages never
        has."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_product(left, right)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return _check_size(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """{% generation %}: marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable of the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _PlainNamespace(Namespace):
    """Refuses names with a leading underscore, which could imitate Python's own attributes."""

    def __init__(self, /, *mappings: Any, **values: Any) -> None:
        super().__init__(*mappings, **values)
        for name in {**dict(*mappings), **values}:
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _bounded(source: str, environment: _Environment) -> nodes.Template:
    """Returns the template's tree, with a counter around each loop's iterable and a size check on what `~` joins."""
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        loop.iter = _filtered(loop.iter, "_counted", environment)
    for parent in list(tree.find_all(nodes.Node)):
        for name, child in list(parent.iter_fields()):
            setattr(parent, name, _map_concats(child, lambda node: _filtered(node, "_sized", environment)))
    return tree


def _map_concats(field: Any, wrap: Callable[[nodes.Concat], nodes.Filter]) -> Any:
    if isinstance(field, nodes.Concat):
        return wrap(field)
    if isinstance(field, list):
        return [_map_concats(item, wrap) for item in field]
    return field


def _filtered(node: nodes.Node, name: str, environment: _Environment) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=environment)


@jinja2.pass_context  # keeps the compiler from evaluating it in advance
def _counted(_: Context, items: Iterable[Any]) -> Iterator[Any]:
    turns = _turns_left.get()
    for item in items:
        turns[0] -= 1
        if turns[0] < 0:
            raise _BoundError(f"its loops take more than {MAX_ITERATIONS:,} iterations")
        yield item


@jinja2.pass_context
def _sized(_: Context, value: Any) -> Any:
    return _check_size(value)


def _check_size(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)) and len(value) > MAX_SIZE:
        raise _BoundError(f"it creates a value of more than {MAX_SIZE:,} items")
    return value


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_BITS:
        raise _BoundError(f"it creates a number of more than {_MAX_BITS:,} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(count, int) and len(value) * count > MAX_SIZE:
            raise _BoundError(f"it creates a value of more than {MAX_SIZE:,} items")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _collect(chunks: Iterator[str]) -> str:
    parts: list[str] = []
    size = 0
    while True:
        some = list(islice(chunks, _CHUNKS_AT_ONCE))
        size += sum(map(len, some))
        if size > MAX_SIZE:
            raise _BoundError(f"its output is longer than {MAX_SIZE:,} characters")
        parts += some
        if len(some) < _CHUNKS_AT_ONCE:
            return "".join(parts)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dumps JSON; unlike Jinja's own filter, escapes nothing for HTML and keeps non-ASCII text."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _failed(problem: str) -> RequestError:
    return RequestError(f"the model's chat template {problem}", param="messages")
