"""The parameters that requests may carry and that are not fields of ours: those without effect, and those refused."""

from __future__ import annotations

from typing import Any

# Without effect: they name, label or account for a request. With any value.
LABELS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "session_id",
        "user",
    }
)

# Known and not supported: refused unless null or one of these values, which ask for what is done anyway.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True, False),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (),
    "top_a": (0,),
    "truncation_side": ("left",),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "web_search_options": (),
}
REASONS = {
    "audio": "this server reads and writes text",
    "background": "nothing is stored",
    "chat_template": "templates come with the model, never with a request",
    "conversation": "nothing is stored; send the whole conversation as input",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "previous_response_id": "nothing is stored; send the whole conversation as input",
    "prompt_embeds": "no tensors are read from clients",
    "store": "nothing is stored",
    "suffix": "the model continues text, and does not fill it in",
}
