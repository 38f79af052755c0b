"""Chat templates: a model's own Jinja text turns messages into a prompt.

Templates are untrusted. They run in Jinja's immutable sandbox, see only plain data, and their loops, joined texts and
output are limited. jinja2 is imported when the first template is rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError, RequestError

if TYPE_CHECKING:
    from headrace.text.sandbox import Sandbox

Message = Mapping[str, Any]

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_JSON_SCALARS = (str, int, float, bool, type(None))


class ChatTemplate:
    """One model's templates: 'default', and 'tool_use' if there is one for tools."""

    def __init__(
        self,
        templates: Mapping[str, str] | str,
        special_tokens: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        """`special_tokens` ('bos_token' and the like) are variables of the template; so are `defaults`, which a
        request may override."""
        self.templates = {_DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self.special_tokens = dict(special_tokens or {})
        self.defaults = dict(defaults or {})
        self._sandbox: Sandbox | None = None
        self._variables: frozenset[str] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> str:
        """Renders the prompt. It contains special tokens as text, so encode it with add_special_tokens=False."""
        try:
            variables = {
                "documents": None,
                **self.special_tokens,
                **{name: plain(value, name) for name, value in (self.defaults | extra).items()},
                "messages": read_messages(messages),
                "tools": plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
            }
        except RecursionError as error:
            raise RequestError("the messages or tools are nested too deeply to be read", param="messages") from error
        return self._open_sandbox().render(self._choose(has_tools=bool(tools)), variables)

    @property
    def variables(self) -> frozenset[str]:
        """The input variables that these templates read."""
        if self._variables is None:
            sandbox = self._open_sandbox()
            self._variables = frozenset(name for text in self.templates.values() for name in sandbox.variables(text))
        return self._variables

    @property
    def syntax_error(self) -> str | None:
        """The first error in these templates; None if all can be rendered."""
        errors = map(self._open_sandbox().syntax_error, self.templates.values())
        return next((error for error in errors if error is not None), None)

    def _choose(self, *, has_tools: bool) -> str:
        if has_tools and _WITH_TOOLS in self.templates:
            return self.templates[_WITH_TOOLS]
        if _DEFAULT in self.templates:
            return self.templates[_DEFAULT]
        if len(self.templates) == 1:
            return next(iter(self.templates.values()))
        names = ", ".join(sorted(self.templates))
        raise RequestError(f"this model's chat templates are {names}, none of them 'default'; send a prompt instead")

    def _open_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            from headrace.text.sandbox import Sandbox

            self._sandbox = Sandbox()
        return self._sandbox


def named_templates(value: Any) -> dict[str, str]:
    """Reads a `chat_template` setting: nothing, one text, or a list of {name, template}."""
    if not value:
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    try:
        return {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(
            "chat_template must be text or a list of objects with 'name' and 'template'; correct tokenizer_config.json"
        ) from error


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages as plain data, with content parts joined by line breaks."""
    is_list = type(messages) is list or (isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)))
    if not is_list or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    return [_read_message(message, index) for index, message in enumerate(messages)]


def _read_message(message: Any, index: int) -> dict[str, Any]:
    if type(message) is dict and len(message) == 2:  # the fast path: most messages
        role, content = message.get("role"), message.get("content")
        if type(role) is str and role and type(content) is str:
            return {"role": role, "content": content}
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise _refuse(place, f"must be an object with role and content, got {_kind(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refuse(f"{place}.role", f"must be a name such as 'user', got {role!r}")
    read: dict[str, Any] = plain(message, place, skip="content")
    # An assistant's message that only calls tools has no text.
    may_be_empty = role == "assistant" and bool(message.get("tool_calls"))
    content = message.get("content")
    return {**read, "content": "" if content is None and may_be_empty else _read_content(content, f"{place}.content")}


def _read_content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _refuse(place, f"must be text or a list of text parts, got {_kind(content)}")
    return "\n".join(_read_part(part, f"{place}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, place: str) -> str:
    if isinstance(part, str):
        return str.__str__(part)
    kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
    if kind != "text" or not isinstance(part.get("text"), str):
        raise _refuse(place, f"must be a part of type 'text' with a text, got {kind!r}; this model reads text only")
    return str.__str__(part["text"])


def plain(value: Any, place: str, *, skip: str | None = None) -> Any:
    """Returns a copy made of JSON types: an object with methods could escape the sandbox."""
    if type(value) in _JSON_SCALARS:
        return value
    if isinstance(value, Mapping):
        return {_key(key, place): plain(item, f"{place}.{key}") for key, item in value.items() if key != skip}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str):  # for example a member of an enum
        return str.__str__(value)
    raise _refuse(place, f"must be JSON (text, numbers, lists, objects), got {_kind(value)}")


def _key(key: Any, place: str) -> str:
    if isinstance(key, str):
        return str.__str__(key)
    raise _refuse(place, f"must have text as keys, got {key!r}")


def _refuse(place: str, problem: str) -> RequestError:
    return RequestError(f"{place} {problem}", param=place.partition("[")[0].partition(".")[0])


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__
