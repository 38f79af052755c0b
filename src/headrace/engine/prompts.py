"""Converts prompts to token ids: text, token ids, vLLM's prompt dictionaries, chat messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.engine.grammars import Grammars
from headrace.errors import ConfigError, RequestError
from headrace.sched.limits import context_error
from headrace.text import ChatTemplate, Tokenizer
from headrace.types import SamplingParams, StructuredOutputs, TokenIds

Prompt = str | Sequence[int] | Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]

COMPARED_STEP = 16  # tokens; the default block size
LONG_TEXT = 16  # characters for each token of the context; texts have about four to a token


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    text: str | None  # None when the user gave token ids
    token_ids: TokenIds
    second_start: int | None = None  # where the second text of a pair starts, for models with token types


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """A prompt and its continuation, each of at least one token."""

    text: str | None  # of the prompt
    context: TokenIds
    continuation: TokenIds


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A list of integers is one prompt, a list of anything else is several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray, memoryview, Set)) or not isinstance(prompts, Iterable):
        rule = "text, token ids, a prompt dictionary or a list of these"
        raise RequestError(f"prompts must be {rule}, got {prompts!r}", param="prompts")
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items


def as_conversations(messages: Messages | Sequence[Messages]) -> list[Messages]:
    """Return a list of conversations, from one conversation (a list of messages) or several."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(
            f"messages must be a list of messages, or a list of such lists, got {messages!r}", param="messages"
        )
    items: list[Any] = list(messages)
    return [items] if items and isinstance(items[0], Mapping) else items


def not_sampling_params(given: object) -> RequestError:
    return RequestError(f"sampling_params must be SamplingParams, got {given!r}", param="sampling_params")


def template_options(
    chat_template: str | None,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    more: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Collect the options of `render`. The names in `more` are not checked: only the template knows its variables."""
    named = {"chat_template": chat_template, "add_generation_prompt": add_generation_prompt, "tools": tools}
    if twice := sorted((named.keys() | {"messages"}) & (more or {}).keys()):
        raise RequestError(f"{twice[0]!r} is an argument of its own, not one of chat_template_kwargs", param=twice[0])
    return named | dict(more or {})


def prefix(prompt: Prompt) -> tuple[str, Sequence[int]]:
    """Return a sort key that puts prompts with the same prefix next to each other.

    One token per block is compared: that is much faster, and the prefix cache shares whole blocks only.
    """
    if isinstance(prompt, str):
        return prompt, ()
    if isinstance(prompt, Mapping):
        return prompt.get("prompt") or "", (prompt.get("prompt_token_ids") or ())[::COMPARED_STEP]
    return "", prompt[::COMPARED_STEP]


class PromptReader:
    """Turns prompts into token ids with the model's tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        grammars: Grammars | None = None,
        *,
        max_model_len: int | None = None,
    ) -> None:
        """Without `max_model_len`, no text is too long to be tokenized."""
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._grammars = grammars
        self._vocab_size = vocab_size

    @property
    def max_model_len(self) -> int | None:
        return self._max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError("the model has no tokenizer: give token ids, or a tokenizer with tokenizer=...")
        return self._tokenizer

    def read(self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True) -> list[TokenizedPrompt]:
        """Tokenize all prompts in one call, so that the tokenizer can use its threads."""
        texts = [text_of(prompt) for prompt in prompts]
        given = [text for text in texts if text is not None]
        encoded = iter(self.tokenizer.encode_batch(given, add_special_tokens=add_special_tokens) if given else ())
        return [
            TokenizedPrompt(text, np.array(next(encoded), np.int32) if text is not None else self._ids_of(prompt))
            for prompt, text in zip(prompts, texts, strict=True)
        ]

    def read_within_context(
        self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[TokenizedPrompt]:
        """Like `read`, but a text that is much too long for the context is refused by its start."""
        for prompt in prompts:
            self.check_long_prompt(prompt, param=param)
        return self.read(prompts, add_special_tokens=add_special_tokens)

    def check_long_prompt(self, prompt: Prompt, *, param: str = "prompt") -> None:
        """Like `check_long_text`, for a prompt in any form. Token ids are not limited here."""
        if (text := text_of(prompt)) is not None:
            self.check_long_text(text, param=param)

    def check_long_text(self, text: str, *, param: str = "prompt") -> None:
        """Refuse a text that is much too long for the context before all of it is tokenized, which takes a minute and
        gigabytes for 50 MB. Its start decides: it must have twice the tokens, since the cut may change the last ones.
        """
        max_model_len = self._max_model_len
        if max_model_len is None or len(text) <= LONG_TEXT * max_model_len:
            return
        start_len = LONG_TEXT * max_model_len // 2
        while start_len < len(text):
            num_tokens = len(self.tokenizer.encode(text[:start_len], add_special_tokens=False))
            if num_tokens > 2 * max_model_len:
                raise context_error(
                    f"your prompt has {len(text)} characters, the first {start_len} of which are {num_tokens} tokens. "
                    "Please reduce the length of the prompt, or raise max_model_len.",
                    max_model_len,
                    param=param,
                )
            start_len *= 2

    def read_pairs(self, prompts: Sequence[Prompt], continuations: Sequence[Prompt]) -> list[TokenizedPair]:
        """Tokenize prompts with one continuation each.

        Two texts are tokenized as one joined text, as a model would see them. The continuation starts at the first
        token that differs from the tokens of the prompt alone. Token ids are not changed. A text that is much too long
        for the context is refused by its start.
        """
        heads = self.read_within_context(prompts)
        tails = self.read_within_context(continuations, add_special_tokens=False, param="continuation")
        is_text = [head.text is not None and tail.text is not None for head, tail in zip(heads, tails, strict=True)]
        joined = [f"{h.text}{t.text}" for h, t, both in zip(heads, tails, is_text, strict=True) if both]
        wholes = iter(self.read(joined))
        return [
            _pair(i, head, next(wholes).token_ids if is_text[i] else np.concatenate([head.token_ids, tail.token_ids]))
            for i, (head, tail) in enumerate(zip(heads, tails, strict=True))
        ]

    def render(self, messages: Messages, *, chat_template: str | None = None, **options: Any) -> str:
        """Render a conversation with the given chat template, or the model's. The text includes special tokens."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            raise RequestError(f"messages must be a list of messages, got {messages!r}", param="messages")
        template = self.tokenizer.chat_template
        if chat_template is not None:
            template = ChatTemplate(chat_template, self.tokenizer.special_tokens)
        if template is None:
            raise RequestError(
                "the model has no chat template; give one, or use generate() or a prompt instead of messages",
                param="messages",
            )
        return template.render(messages, **options)

    def with_tokens(self, params: SamplingParams) -> SamplingParams:
        """Replace bad words by their token ids, each with and without a leading space.

        A grammar is compiled here, which may take a while. An invalid one is refused; the engine reuses a valid one.
        """
        if self._grammars is not None and isinstance(params.structured_outputs, StructuredOutputs):
            self._grammars.compile(params.structured_outputs)
        if not params.bad_words:
            return params
        tokenizer = self.tokenizer
        texts = [space + word.lstrip() for word in params.bad_words for space in ("", " ")]
        encoded = map(tuple, tokenizer.encode_batch(texts, add_special_tokens=False))
        sequences = dict.fromkeys((*params.bad_words_token_ids, *(word for word in encoded if word)))
        return replace(params, bad_words=(), bad_words_token_ids=tuple(sequences))

    def _ids_of(self, prompt: Prompt) -> TokenIds:
        raw = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        try:
            wide = _whole_numbers(raw)
        except (TypeError, ValueError, OverflowError):
            raise RequestError("a prompt must be text or a list of token ids", param="prompt") from None
        if wide.ndim != 1:
            raise RequestError(
                f"a prompt must be text or a flat list of token ids, got one of {wide.ndim} dimensions", param="prompt"
            )
        if len(wide) and (wide.min() < 0 or wide.max() >= self._vocab_size):
            outside = wide[(wide < 0) | (wide >= self._vocab_size)][0]
            raise RequestError(
                f"token id {outside} is out of vocabulary, which has {self._vocab_size:,} tokens", param="prompt"
            )
        return wide.astype(np.int32)


def _whole_numbers(values: Any) -> npt.NDArray[np.int64]:
    """Convert to integers without rounding: fractions are refused."""
    if type(values) is list and values:
        if isinstance(values[0], bool):
            raise ValueError("not integers")
        return np.frombuffer(array("q", values), np.int64)  # takes two thirds of the time of np.array
    numbers = np.array(values)
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ValueError("not integers")
    return numbers.astype(np.int64)


def _pair(index: int, head: TokenizedPrompt, whole: TokenIds) -> TokenizedPair:
    shortest = min(len(head.token_ids), len(whole))
    differs = np.flatnonzero(head.token_ids[:shortest] != whole[:shortest])
    num_context = int(differs[0]) if len(differs) else shortest
    if num_context == 0:
        raise RequestError(f"prompt {index} has no tokens to continue", param="prompts", code="empty_prompt")
    if num_context == len(whole):
        raise RequestError(f"continuation {index} has no tokens", param="continuations", code="empty_continuation")
    return TokenizedPair(head.text, whole[:num_context], whole[num_context:])


def text_of(prompt: Prompt) -> str | None:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or len(prompt) != 1:
            raise RequestError(
                f"a prompt dictionary has either 'prompt' or 'prompt_token_ids', got {sorted(prompt)}", param="prompt"
            )
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"'prompt' must be text, got {type(text).__name__}", param="prompt")
        return text
    return None
