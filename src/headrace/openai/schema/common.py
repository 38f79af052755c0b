"""The fields that chat and completion requests share: sampling, under OpenAI's and vLLM's names."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields for sampling. None: the field is not given; the defaults are those of `SamplingParams`."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class FormFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """With the newer name of `max_tokens`, and SGLang's names of two forms of an answer, which become
    `structured_outputs`."""

    max_completion_tokens: int | None = None  # OpenAI's for chats; clients send it with completions too
    regex: str | None = None
    ebnf: str | None = None

    def __post_init__(self) -> None:
        named = {"regex": self.regex, "grammar": self.ebnf}
        given = {name: value for name, value in named.items() if value is not None}
        if given and self.structured_outputs is not None:
            raise ValueError("give only one of regex, ebnf and structured_outputs")
        if given:
            self.structured_outputs = given
            self.regex = self.ebnf = None
