"""Parameters that are no fields of the structs in `schema/`, and fields that a batch line refuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.openai.errors import not_supported

_log = logging.getLogger(__name__)

# Accepted with any value and without effect: they label a request or account for it.
LABELS = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "user",
    }
)

# Hints that clients send by default. Accepted with any value and ignored: an answer without them is a right one.
# `reasoning_effort` is a field of chat requests; here it is that of requests without a chat template.
HINTS = frozenset({"prediction", "reasoning", "reasoning_effort", "store", "verbosity"})

# Known and not supported. Refused unless the value is null or one of these, which ask for the default behaviour.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "ec_transfer_params": (),
    "enable_response_messages": (False,),  # a field of responses; here it is that of others
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True, False),  # a field of chat requests; here it is that of others
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "previous_input_messages": (),
    "prompt_cache_options": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_assistant_tokens_mask": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),  # a field of chat requests; here it is that of others
    "top_a": (0,),
    "vllm_xargs": (),
    "web_search_options": (),
}
REASONS = {
    "audio": "only text is read and written",
    "chat_template": "the template is the model's",
    "conversation": "use previous_response_id, or send the whole conversation as input",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "kv_transfer_params": "prefill and decode run in one engine",
    "prompt_embeds": "no tensors are read from clients",
    "suffix": "models here continue text and do not insert it",
    "thinking_token_budget": "only chats have reasoning of their own",
}

# Fields that the server reads and a batch line refuses, with the values that a batch line accepts. The first is named
# in the error. `add_special_tokens` depends on the endpoint: a chat template writes special tokens itself.
NOT_IN_BATCH: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "priority": (0,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "stream": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
}
# The same for the fields that only responses have: apart, as they are likely names of data in plain lines.
NOT_IN_RESPONSE_LINES: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "enable_response_messages": (False,),
    "previous_response_id": (),
    "truncation": ("disabled",),
}
BATCH_REASONS = {
    "background": "a batch job runs in the background as a whole",
    "previous_response_id": "a batch job stores no responses; send the whole conversation as input",
    "priority": "a batch job chooses its own order",
    "stream": "a batch job writes whole answers",
}


@cache
def note_ignored(name: str) -> None:
    """Log that a parameter is ignored, once for each name."""
    _log.warning("%s in a request is ignored: it has no effect here (this is logged once)", name)


def refusal(name: str, value: Any, neutral: tuple[Any, ...], reasons: Mapping[str, str]) -> RequestError | None:
    """The error for a value that is neither null nor neutral; None if it is. true and 1 are different values."""
    if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        return None
    reason = f" ({reasons[name]})" if name in reasons else ""
    way_out = f"leave it out or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else "leave it out"
    return not_supported(name, f"{name} is not supported{reason}; {way_out}")


def refuse_in_batch(request: msgspec.Struct) -> None:
    """Refuse the fields of a request that a batch line cannot have."""
    for name, neutral in {**NOT_IN_BATCH, **NOT_IN_RESPONSE_LINES}.items():
        value = getattr(request, name, None)
        if value is not None and (error := refusal(name, value, neutral, BATCH_REASONS)) is not None:
            raise error
    is_chat = hasattr(request, "messages")
    special = getattr(request, "add_special_tokens", None)
    if (error := refusal("add_special_tokens", special, (not is_chat,), {})) is not None:
        raise error
