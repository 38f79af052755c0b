"""Chat templates: what they render, against transformers, and what they must not reach."""

from __future__ import annotations

import enum
import time
from typing import Any

import pytest

from headrace.errors import ModelError, RequestError
from headrace.text import ChatTemplate
from headrace.text.template import named_templates

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Say "hi" & <b>bye</b> — ünï'},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "More?"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}]

TEMPLATES = {
    "first_and_last": """
{{- bos_token -}}
{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}(none){% endif %}
    {{- '[' ~ message['role'] ~ '] ' ~ message['content'] | trim }}{{ '\\n' if not loop.last else eos_token }}
{% endfor %}
{%- if add_generation_prompt %}[assistant] {% endif %}""",
    "namespace_and_slices": """
{%- set ns = namespace(system='', count=0) %}
{%- if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% set ns.count = ns.count + 1 %}
{{- ns.count }}/{{ loop.length }}-{{ loop.revindex }} {% endfor %}
{{ ns.system }}""",
    "tojson": """
{%- for tool in tools or [] %}{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}{% endfor %}{{ messages[1].content | tojson }}""",
    "macros_and_filters": """
{%- macro turn(role, text) %}<|{{ role | upper }}|>{{ text | replace('i', 'I') }}{% endmacro -%}
{%- for message in messages | selectattr('role', 'equalto', 'user') | list %}{{ turn(message.role, message.content) }}
{% endfor %}{{ messages | map(attribute='role') | join(',') }}""",
    "break_and_continue": """
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{{- message.content }}|
{%- if loop.index0 == 2 %}{% break %}{% endif %}
{%- endfor %}""",
    "generation_blocks": """
{%- set mark = 'outer' %}
{%- for message in messages %}{% if message.role == 'assistant' %}{% generation %}
{% set mark = 'inner' %}{{ message.content }}{{ mark }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% endfor %}{{ mark }}""",
    "generation_has_its_own_variables": """
{%- set mark = 'outer' %}{% generation %}{% set mark = 'inner' %}{{ mark }}{% endgeneration %}{{ mark }}""",
    "defined_and_none": """
{{- tools is defined }} {{ tools is none }} {{ documents is none }} {{ thinking is defined and thinking }}
{%- for message in messages if message.role != 'user' %}{{ message.name is defined }}{{ message.get('x', 'none') }}
{%- else %}empty{% endfor %}""",
    "dict_items_and_math": """
{%- for key, value in dict(a=1, b=2).items() %}{{ key }}={{ value * 3 + 1 }};{% endfor %}
{{- 'ab' * 3 }}{{ 2 ** 8 }}{{ (messages | length) % 2 == 0 }}{{ range(3) | list }}{{ '%s!' % 'x' }}""",
}


def transformers_text(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=template, **variables, **SPECIAL_TOKENS)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, with_tools: bool) -> None:
    variables: dict[str, Any] = {"add_generation_prompt": with_tools, "tools": TOOLS if with_tools else None}
    expected = transformers_text(TEMPLATES[name], CHAT, **variables)
    assert ChatTemplate(TEMPLATES[name], SPECIAL_TOKENS).render(CHAT, **variables) == expected
    assert expected.strip()


def test_extra_arguments_are_variables_of_the_template() -> None:
    assert ChatTemplate("{{ enable_thinking }} {{ bos_token }}").render(CHAT, enable_thinking=False) == "False "


def test_the_date_can_be_asked_for() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render(CHAT) == time.strftime("%Y")


def test_tools_use_the_template_made_for_them() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert (template.render(CHAT), template.render(CHAT, tools=TOOLS)) == ("plain", "with tools")


def test_named_templates_are_read_from_a_list() -> None:
    named = named_templates([{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}])
    assert ChatTemplate(named).render(CHAT) == "a"
    assert ChatTemplate(named_templates("c")).render(CHAT) == "c"
    assert named_templates(None) == {}


def test_templates_without_a_default_are_named_in_the_error() -> None:
    with pytest.raises(RequestError, match="rag, tool_use"):
        ChatTemplate({"rag": "b", "tool_use": "c"}).render(CHAT)


def test_a_malformed_list_of_templates_is_an_error() -> None:
    with pytest.raises(ModelError, match="'name' and 'template'"):
        named_templates([{"title": "default"}])


def test_text_parts_are_joined_and_other_fields_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{{ messages[0].content }}/{{ messages[0].name }}")
    assert template.render([{"role": "user", "content": parts, "name": "Ann"}]) == "a\nb/Ann"


def test_a_call_of_tools_needs_no_content() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    template = ChatTemplate("{{ messages[0].content }}{{ messages[0].tool_calls[0].function.arguments | tojson }}")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": calls}]) == '{"x": 1}'


@pytest.mark.parametrize(
    "messages, path",
    [
        ([], "messages must be a list"),
        ("hello", "messages must be a list"),
        ([CHAT[0], "hello"], r"messages\[1\] must be an object"),
        ([CHAT[0], {"content": "x"}], r"messages\[1\]\.role must be"),
        ([{"role": "user"}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content\[0\] .*'image_url'"),
        ([{"role": "user", "content": [5]}], r"messages\[0\]\.content\[0\] .*'int'"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\]\.extra must be JSON"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], r"messages\[0\]\.extra must have text as keys"),
    ],
)
def test_an_invalid_message_is_refused_with_its_path(messages: Any, path: str) -> None:
    with pytest.raises(RequestError, match=path) as caught:
        ChatTemplate("{{ messages }}").render(messages)
    assert caught.value.param == "messages"


def test_messages_nested_without_end_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(RequestError, match="nested too deeply"):
        ChatTemplate("{{ messages }}").render([{"role": "user", "content": "x", "extra": nested}])


def test_an_enumeration_as_role_is_plain_text_to_the_template() -> None:
    class Role(enum.StrEnum):
        USER = "user"

    assert ChatTemplate("{{ messages[0].role }}").render([{"role": Role.USER, "content": ""}]) == "user"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for %}", "cannot be compiled: line 1"),
        ("{{ messages + 1 }}", "failed: TypeError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ nothing.at.all }}", "failed: 'nothing' is undefined"),
        ("{{ nothing | tojson }}", "failed: TypeError: .*not JSON serializable"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "failed: RecursionError"),
        ("{% include 'other' %}", "failed: "),
    ],
)
def test_a_failing_template_is_a_refused_request_that_quotes_it(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(template).render(CHAT)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__globals__.__builtins__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__base__ }}{{ dict.mro() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 'x' %}",
        "{{ namespace(__call__='x') }}",
        "{% import 'os' as os %}",
        "{{ lipsum() }}",
    ],
)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError):
        ChatTemplate(template).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("source", ["{{ open('/etc/hostname').read() }}", "{{ os.system('true') }}", "{{ eval('1') }}"])
def test_builtins_and_modules_are_not_there(source: str) -> None:
    with pytest.raises(RequestError, match="is undefined"):
        ChatTemplate(source).render(CHAT)


@pytest.mark.parametrize(
    "template, bound",
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "iterations"),
        ("{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "output is longer"),
        ("{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "value of"),
        ("{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "value of"),
        ("{{ ('x' * 999999999) | length }}", "value of"),
        ("{{ ([0] * 999999999) | length }}", "value of"),
        ("{{ 9 ** 999999999 }}", "number of"),
        ("{% set ns = namespace(n=9) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}", "number of"),
        ("{{ range(999999999) | list }}", "Range too big"),
    ],
)
def test_a_template_cannot_work_without_end(template: str, bound: str) -> None:
    with pytest.raises(RequestError, match=bound):  # without a bound, none of them ends in a test's time
        ChatTemplate(template).render(CHAT)


def test_a_template_knows_what_it_reads_from_outside() -> None:
    template = ChatTemplate(
        {
            "default": "{% for m in messages %}{{ m.content + tail }}{% endfor %}{% set own = 1 %}{{ own }}"
            "{% if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}"
            "{% set tools = tools if tools is defined else none %}{{ raise_exception('no') if thinks is false }}",
            "tool_use": "{% macro show(x) %}{{ x }}{% endmacro %}{{ show(depth) }}",
        }
    )
    assert template.variables == {"messages", "tail", "date", "tools", "thinks", "depth"}
    assert ChatTemplate("{% if %}").variables == frozenset()
