"""The same body gives the same answer over HTTP and as a batch line, or the same error.

Each case is sent once to the server's application, without a socket, and once as a line of a batch job. Both use the
same small model. What may differ is in `DIFFERENCES` and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from headrace.openai.fields import LABELS, NOT_IN_BATCH, NOT_IN_RESPONSE_LINES, UNSUPPORTED
from headrace.server.endpoints import ROUTES
from headrace.server.http.app import App, Services
from headrace.server.options import ServerOptions
from tests.server.serving import MODEL, FakeMetrics, FakeRequestQueue, FakeState

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 6, "temperature": 0},
    TEXT: {"prompt": "hi", "max_tokens": 6, "temperature": 0},
    RESPONSES: {"input": "hi", "max_output_tokens": 6, "temperature": 0},
    EMBEDDINGS: {"input": "hi"},
}
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "num_gpu_blocks_override": 256, "enable_prefix_caching": False}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
AGE = {"type": "function", "function": {"name": "age", "parameters": SCHEMA}}
BOTH_TOOLS = {"tools": [WEATHER, AGE]}
CALL_AGE = {"tool_choice": {"type": "function", "function": {"name": "age"}}}
RESPONSE_TOOLS = {
    "tools": [{"type": "function", **tool["function"], "strict": False} for tool in (WEATHER, AGE)]  # type: ignore[dict-item]
}
RESPONSE_CALL = {"tool_choice": {"type": "function", "name": "age"}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "age"}]}
EOS = 0  # of the tests' tokenizer
SPECIAL_TOKENS: dict[str, Any] = {"allowed_token_ids": [EOS], "ignore_eos": True, "logprobs": 0}

# Every difference between the two, with its reason.
DIFFERENCES = {
    "id": "ids of the request and of tool calls; a batch line derives the first from the job and the line",
    "created": "the time of the answer (in responses `created_at`)",
    "last digits of log-probabilities and embeddings": "they depend on what else is in the batch",
    "name of the model": "the server has --served-model-name; a job names the model it was given",
    "message prefix": "errors of a batch line start with 'line N: ', as people search for them in the input file",
    "another model": "a job answers lines for any model and notes it: batch files are written for another model's name",
    "max_tokens past the context": "a job shortens the answer, as one setting is for lines of many lengths",
    "store": "the server stores responses for requests that follow; a batch job stores none",
    **dict.fromkeys(
        (*NOT_IN_BATCH, *NOT_IN_RESPONSE_LINES), "read by the server only; a batch line refuses it by name"
    ),
    "add_special_tokens": "read by the server only; a batch line refuses it by name",
}

DIFFERENT = ("id", "call_id", "created", "created_at", "store")  # fields of answers

# Bodies that both answer, for both endpoints.
ANSWERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 3, "temperature": 1, "seed": 5},
    "largest n": {"n": 128, "max_tokens": 1},
    "best_of": {"n": 1, "best_of": 2, "temperature": 1, "seed": 5},
    "seed": {"temperature": 1, "seed": 17, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 1, "repetition_penalty": 1.2},
    "stop tokens": {"stop_token_ids": list(range(10, 25)), "max_tokens": 30},
    "stop string": {"stop": [chr(code) for code in range(97, 113)], "max_tokens": 40},
    "stop string included": {"stop": ["e", "a"], "include_stop_str_in_output": True, "max_tokens": 40},
    "logit_bias": {"logit_bias": {"65": 100}},
    "allowed tokens": {"allowed_token_ids": [65, 66]},
    "bad words": {"bad_words": ["the"], "bad_words_token_ids": [[65]]},
    "min_tokens": {"min_tokens": 3, "ignore_eos": True, "skip_special_tokens": False},
    "no max_tokens": {"max_tokens": None, "stop_token_ids": [65], "logit_bias": {"65": 100}},
    "response_format": {"response_format": FORMAT, "max_tokens": 60},
    "object with a schema": {"response_format": {"type": "json_object", "schema": SCHEMA}, "max_tokens": 60},
    "text format": {"response_format": {"type": "text"}},
    "structured_outputs": {"structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 30},
    "labels": {**dict.fromkeys(sorted(LABELS), "x"), "metadata": {"a": "b"}},
    "service_tier": {"service_tier": "default"},
    "hints": {
        "store": True,
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "low",
        "reasoning": {"effort": "high"},
    },
    "whole numbers": {"max_tokens": 4.0, "n": 2.0, "seed": 5.0},
    "nulls": {"n": None, "stop": None, "unheard_of": None, "logit_bias": None, "stream": None, "tools": None},
    "neutral": {"stream": False, "priority": 0, "detokenize": True, "use_beam_search": False, "echo": False},
    "salt and id": {"cache_salt": "a", "request_id": "mine"},
    "model": {"model": MODEL},
}
ANSWERED_CHAT: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3, "temperature": 1, "seed": 3},
    "no logprobs": {"logprobs": False, "top_logprobs": 0},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 4},
    "both maxima": {"max_completion_tokens": 6},
    "without reasoning": {"include_reasoning": False, "logprobs": True},
    "no tools": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    "tools": BOTH_TOOLS,
    "tools of several answers": {**BOTH_TOOLS, "n": 2, "temperature": 1, "seed": 4, "logprobs": True},
    "tools that are not used": {**BOTH_TOOLS, "tool_choice": "none", "response_format": FORMAT, "max_tokens": 60},
    "a call": {**BOTH_TOOLS, **CALL_AGE, "max_tokens": 200},
    "any call": {**BOTH_TOOLS, "tool_choice": "required", "max_tokens": 200, "parallel_tool_calls": False},
    "calls of several answers": {**BOTH_TOOLS, **CALL_AGE, "n": 3, "temperature": 1, "seed": 4, "max_tokens": 200},
    "call cut in its arguments": {**BOTH_TOOLS, **CALL_AGE, "max_tokens": 46},
    "call cut before its arguments": {**BOTH_TOOLS, **CALL_AGE, "max_tokens": 30},
    "call cut before its name": {**BOTH_TOOLS, **CALL_AGE, "max_tokens": 3},
    "one of two calls, cut before its name": {**BOTH_TOOLS, "tool_choice": "required", "max_tokens": 3},
    "effort": {"reasoning_effort": "high"},
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "several messages": {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]},
    "earlier tool call": {
        "messages": [
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]
    },
}
ANSWERED_TEXT: dict[str, dict[str, Any]] = {
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 4},
    "logprobs": {"logprobs": 3, "temperature": 1, "seed": 3},
    "only the chosen token": {"logprobs": 0},
    "offsets of special tokens": {**SPECIAL_TOKENS, "skip_special_tokens": False},
    "offsets without special tokens": SPECIAL_TOKENS,
    "several prompts, offsets": {**SPECIAL_TOKENS, "skip_special_tokens": False, "prompt": ["hi", "you"]},
    "default length": {"max_tokens": None},
    "effort": {"reasoning_effort": "high"},
    "token ids": {"prompt": [5, 6, 7]},
    "a list of one": {"prompt": ["hi"]},
    "a list of token ids": {"prompt": [[5, 6, 7]]},
    "several prompts": {"prompt": ["hi", "a longer one", "hi"]},
    "several token lists": {"prompt": [[5, 6, 7], [8], [9, 10]]},
    "several prompts, default length": {"prompt": ["hi", "you"], "max_tokens": None},
    "several prompts, n": {"prompt": ["hi", "you"], "n": 3, "temperature": 1, "seed": 5},
    "several prompts, best_of": {"prompt": ["hi", "you"], "n": 2, "best_of": 3, "temperature": 1, "seed": 5},
    "several prompts, stop": {"prompt": ["hi", "you"], "stop": [chr(code) for code in range(97, 113)]},
    "several prompts, stop tokens": {"prompt": ["hi", "you"], "stop_token_ids": list(range(10, 25)), "max_tokens": 30},
    "several prompts, logprobs": {"prompt": ["hi", "you"], "logprobs": 2},
    "several prompts, format": {"prompt": ["hi", "you"], "response_format": FORMAT, "max_tokens": 60},
    "several prompts, salt": {"prompt": ["hi", "you"], "cache_salt": "a", "request_id": "mine too"},
}

ANSWERED_RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no limit": {"max_output_tokens": None, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
    "instructions": {"instructions": "Be brief."},
    "messages": {
        "input": [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
            {"role": "user", "content": "well"},
        ]
    },
    "function call": {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        ]
    },
    "sampling": {"temperature": 1, "seed": 5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 0.5},
    "more sampling": {"repetition_penalty": 1.2, "frequency_penalty": 1, "ignore_eos": True},
    "logprobs": {"top_logprobs": 3, "include": ["message.output_text.logprobs"]},
    "only the chosen token": {"include": ["message.output_text.logprobs"]},
    "format": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, "max_output_tokens": 60},
    "text format": {"text": {"format": {"type": "text"}, "verbosity": "low"}},
    "labels": {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y"},
    "hints": {"store": True, "reasoning": {"effort": "high", "summary": "auto"}},
    "neutral": {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "truncation": "disabled"},
    "tools": RESPONSE_TOOLS,
    "tools that are not used": {**RESPONSE_TOOLS, "tool_choice": "none"},
    "a call": {**RESPONSE_TOOLS, **RESPONSE_CALL, "max_output_tokens": 200},
    "any call": {**RESPONSE_TOOLS, "tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False},
    "an allowed call": {**RESPONSE_TOOLS, "tool_choice": ALLOWED, "max_output_tokens": 200},
    "call cut in its arguments": {**RESPONSE_TOOLS, **RESPONSE_CALL, "max_output_tokens": 46},
    "call cut before its name": {**RESPONSE_TOOLS, **RESPONSE_CALL, "max_output_tokens": 3},
    "as coding agents ask": {
        **RESPONSE_TOOLS,
        "instructions": "Be brief.",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "a",
        "client_metadata": {"a": "b"},
    },
    "reasoning": {
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes?"}]},
            {"role": "user", "content": "well"},
        ]
    },
    "neutral state": {"background": False, "previous_response_id": None, "stream": False, "priority": 0},
    "salt, id and model": {"cache_salt": "a", "request_id": "one", "model": MODEL},
    "whole numbers": {"max_output_tokens": 4.0, "seed": 5.0},
}

ANSWERED_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a list of one": {"input": ["hi"]},
    "several texts": {"input": ["hi", "a longer one", "hi"]},
    "token ids": {"input": [5, 6, 7]},
    "a list of token ids": {"input": [[5, 6, 7]]},
    "several token lists": {"input": [[5, 6, 7], [8], [9, 10]]},
    "the largest list": {"input": ["a"] * 2048},
    "a whole context": {"input": [5] * 512},
    "float": {"encoding_format": "float"},
    "base64": {"encoding_format": "base64"},
    "several texts, base64": {"input": ["hi", "a longer one"], "encoding_format": "base64"},
    "labels": {"user": "me", "metadata": {"a": "b"}},
    "hints": {"store": True},
    "nulls": {"encoding_format": None, "dimensions": None, "unheard_of": None},
    "salt, id and model": {"cache_salt": "a", "request_id": "an embedding", "model": MODEL},
}

# Bodies that both refuse, for both endpoints.
REFUSED: dict[str, dict[str, Any]] = {
    "unknown": {"temprature": 1},
    "unsupported": {"suffix": "end"},
    "fraction of a token": {"max_tokens": 2.5},
    "service_tier": {"service_tier": "flex"},
    "guided": {"guided_json": {}},
    "text for a number": {"temperature": "warm"},
    "boolean for a number": {"temperature": False},
    "fraction": {"top_k": 1.5},
    "low": {"temperature": -1},
    "top_p": {"top_p": 0},
    "n": {"n": 129},
    "n zero": {"n": 0},
    "best_of": {"n": 3, "best_of": 2},
    "max_tokens": {"max_tokens": 0},
    "min_tokens": {"min_tokens": 9},
    "seed": {"seed": 2**70},
    "stop": {"stop": ""},
    "stops": {"stop": ["x"] * 17},
    "stop number": {"stop": [1]},
    "stop ids": {"stop_token_ids": list(range(40)), "min_tokens": 1},
    "bias": {"logit_bias": {"x": 1}},
    "bias type": {"logit_bias": [1]},
    "bias of no token": {"logit_bias": {"999999": 1}},
    "no allowed tokens": {"allowed_token_ids": []},
    "bad words": {"bad_words": [" "]},
    "stream_options": {"stream_options": {"include_usage": True}},
    "length_penalty": {"length_penalty": 2},
    "salt": {"cache_salt": ""},
    "salt type": {"cache_salt": 5},
    "request id": {"request_id": "a\nb"},
    "model type": {"model": 3},
    "format": {"response_format": {"type": "xml"}},
    "format type": {"response_format": "json"},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}},
    "object with a wrong schema": {"response_format": {"type": "json_object", "schema": 5}},
    "two structures": {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
    "structure misspelt": {"structured_outputs": {"regx": "a"}},
    "bad regex": {"structured_outputs": {"regex": "("}},
}
REFUSED_CHAT: dict[str, dict[str, Any]] = {
    "no messages": {"messages": None},
    "empty messages": {"messages": []},
    "messages type": {"messages": "hi"},
    "message type": {"messages": ["hi"]},
    "no role": {"messages": [{"content": "hi"}]},
    "role type": {"messages": [{"role": 1, "content": "x"}]},
    "two maxima": {"max_completion_tokens": 7},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 0},
    "min of completion tokens": {"max_tokens": None, "max_completion_tokens": 3, "min_tokens": 9},
    "top_logprobs alone": {"top_logprobs": 3},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "logprobs type": {"logprobs": 3},
    "prompt": {"prompt": "hi"},
    "template variable": {"chat_template_kwargs": {"nothing_reads_this": 1}},
    "reserved variable": {"chat_template_kwargs": {"tools": 1}},
    "tool_choice": {"tool_choice": "required"},
    "tools type": {"tools": "weather"},
    "tool type": {"tools": ["weather"]},
    "tool without a name": {"tools": [{"type": "function", "function": {}}]},
    "bad tool that is not used": {"tools": [{}], "tool_choice": "none"},
    "tool_choice misspelt": {**BOTH_TOOLS, "tool_choice": "requird"},
    "tool_choice of no tool": {"tools": [WEATHER], **CALL_AGE},
    "tools and a grammar": {**BOTH_TOOLS, "structured_outputs": {"regex": "a"}},
    "a call and a format": {**BOTH_TOOLS, **CALL_AGE, "structured_outputs": {"regex": "a"}},
    "tool with a bad schema": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}],
        "tool_choice": "required",
    },
    "too long": {"messages": [{"role": "user", "content": "x" * 600}]},
}
REFUSED_TEXT: dict[str, dict[str, Any]] = {
    "two maxima": {"max_completion_tokens": 7},
    "no prompt": {"prompt": None},
    "empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "mixed prompts": {"prompt": ["a", 1]},
    "token outside": {"prompt": [10**6]},
    "logprobs": {"logprobs": 21},
    "logprobs type": {"logprobs": True},
    "messages": {"messages": MESSAGES},
    "too long": {"prompt": [5] * 512},
    "one of several is too long": {"prompt": ["hi", "x" * 600]},
    "one of several is empty": {"prompt": ["hi", ""]},
    "one of several is outside": {"prompt": [[5], [10**6]]},
    "too many prompts": {"prompt": ["hi"] * 1025},
    "too many sequences": {"prompt": ["hi"] * 100, "n": 100},
}


REFUSED_RESPONSES: dict[str, dict[str, Any]] = {
    "no input": {"input": None},
    "empty input": {"input": []},
    "input type": {"input": 5},
    "item": {"input": [{"type": "computer_call"}]},
    "stored item": {"input": [{"type": "item_reference", "id": "x"}]},
    "image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "role": {"input": [{"content": "hi"}]},
    "too long": {"input": "x" * 600},
    "unknown": {"temprature": 1},
    "names of chats": {"max_tokens": 5},
    "n": {"n": 2},
    "max_output_tokens": {"max_output_tokens": 0},
    "temperature": {"temperature": -1},
    "top_logprobs": {"top_logprobs": 21},
    "include": {"include": ["file_search_call.results"]},
    "tool of a chat": {"tools": [WEATHER]},
    "tool of the server": {"tools": [{"type": "web_search"}]},
    "tool with an unknown field": {"tools": [{"type": "function", "name": "f", "colour": "red"}]},
    "tool_choice": {"tool_choice": "required"},
    "tool_choice of the server": {**RESPONSE_TOOLS, "tool_choice": {"type": "file_search"}},
    "tool_choice of no tool": {**RESPONSE_TOOLS, "tool_choice": {"type": "function", "name": "wind"}},
    "no allowed tools": {**RESPONSE_TOOLS, "tool_choice": {**ALLOWED, "tools": []}},
    "tools and a grammar": {**RESPONSE_TOOLS, "structured_outputs": {"regex": "a"}},
    "effort": {"reasoning": {"effort": 3}},
    "reasoning of another server": {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
    "conversation": {"conversation": "conv_1"},
    "text": {"text": {"tone": "warm"}},
    "format": {"text": {"format": {"type": "xml"}}},
    "schema": {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "wrong"}}}},
    "metadata": {"metadata": {"a": 1}},
    "user": {"user": 5},
    "instructions": {"instructions": 5},
    "salt": {"cache_salt": ""},
    "request id": {"request_id": "a\nb"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "template variable": {"chat_template_kwargs": {"nothing_reads_this": 1}},
}

REFUSED_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "no input": {"input": None},
    "empty input": {"input": ""},
    "no inputs": {"input": []},
    "input type": {"input": 5},
    "mixed inputs": {"input": ["a", 1]},
    "nested inputs": {"input": [[["a"]]]},
    "token outside": {"input": [10**6]},
    "one of several is empty": {"input": ["hi", ""]},
    "one of several is outside": {"input": [[5], [10**6]]},
    "too many inputs": {"input": ["hi"] * 2049},
    "too long": {"input": [5] * 513},
    "one of several is too long": {"input": ["hi", "x" * 600]},
    "far too long": {"input": "word " * 4000},
    "format": {"encoding_format": "int8"},
    "format type": {"encoding_format": 5},
    "dimensions": {"dimensions": 16},
    "dimensions type": {"dimensions": "small"},
    "unknown": {"encoding": "float"},
    "unsupported": {"prompt_embeds": "AAAA"},
    "names of completions": {"prompt": "hi"},
    "salt": {"cache_salt": ""},
    "salt type": {"cache_salt": 5},
    "request id": {"request_id": "a\nb"},
    "model type": {"model": 3},
}


def cases(shared: dict[str, Any], own: dict[str, dict[str, Any]]) -> dict[str, tuple[str, Any]]:
    """`shared`: for chats and completions; `own`: by path."""
    return {
        f"{path.split('/')[2]}: {name}": (path, {**GOOD[path], **more})
        for path, of_path in own.items()
        for name, more in (shared | of_path if path in (CHAT, TEXT) else of_path).items()
    }


GOOD_CASES = cases(
    ANSWERED,
    {CHAT: ANSWERED_CHAT, TEXT: ANSWERED_TEXT, RESPONSES: ANSWERED_RESPONSES, EMBEDDINGS: ANSWERED_EMBEDDINGS},
)
BAD_CASES = cases(
    REFUSED,
    {CHAT: REFUSED_CHAT, TEXT: REFUSED_TEXT, RESPONSES: REFUSED_RESPONSES, EMBEDDINGS: REFUSED_EMBEDDINGS},
)
# The path, a field of `DIFFERENCES`, and a body that only the server reads.
SERVER_ONLY: dict[str, tuple[str, str, Any]] = {
    "stream": (CHAT, "stream", {"stream": True}),
    "stream of a response": (RESPONSES, "stream", {"stream": True}),
    "priority of a response": (RESPONSES, "priority", {"priority": 1}),
    "background": (RESPONSES, "background", {"background": True}),
    "state": (RESPONSES, "previous_response_id", {"previous_response_id": "resp_1"}),
    "truncation": (RESPONSES, "truncation", {"truncation": "auto"}),
    "add_generation_prompt": (CHAT, "add_generation_prompt", {"add_generation_prompt": False}),
    "continue_final_message": (CHAT, "continue_final_message", {"continue_final_message": True}),
    "special tokens of a chat": (CHAT, "add_special_tokens", {"add_special_tokens": True}),
    "special tokens": (TEXT, "add_special_tokens", {"add_special_tokens": False}),
    "echo": (TEXT, "echo", {"echo": True}),
    "echo of a chat": (CHAT, "echo", {"echo": True}),
    "prompt_logprobs": (TEXT, "prompt_logprobs", {"prompt_logprobs": 1}),
    "return_token_ids": (TEXT, "return_token_ids", {"return_token_ids": True}),
    "return_tokens_as_token_ids": (TEXT, "return_tokens_as_token_ids", {"return_tokens_as_token_ids": True}),
    "truncate_prompt_tokens": (TEXT, "truncate_prompt_tokens", {"truncate_prompt_tokens": 1}),
    "truncation_side": (TEXT, "truncation_side", {"truncation_side": "right"}),
    "use_beam_search": (TEXT, "use_beam_search", {"use_beam_search": True, "n": 2}),
    "priority": (TEXT, "priority", {"priority": 1}),
}


class Both:
    """The server's application and the lines of one job."""

    def __init__(self, directory: Path, engine: AsyncEngine, lines: dict[str, Any]) -> None:
        self.directory = directory
        self.lines = lines
        self._services = Services(
            engine=engine,
            options=ServerOptions(),
            queue=FakeRequestQueue(),
            metrics=FakeMetrics(),
            model_name=MODEL,
            state=FakeState(),
        )
        self._app = App(self._services, ROUTES)

    def http(self, path: str, body: Any) -> tuple[int, Any]:
        """The status and the body of the answer."""
        return asyncio.run(self._post(path, json.dumps(body).encode()))

    async def _post(self, path: str, body: bytes) -> tuple[int, Any]:
        sent: list[Any] = []
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return given.pop() if given else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await asyncio.wait_for(self._app(scope, receive, send), 60)
        text = b"".join(message.get("body", b"") for message in sent[1:])
        return sent[0]["status"], text if text.startswith(b"data:") else json.loads(text)

    def line(self, name: str) -> tuple[int, Any]:
        """The same for a batch line."""
        response = self.lines[name]["response"]
        return response["status_code"], response["body"]


def run_lines(model: Path, directory: Path, given: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """The output lines of a job with these paths and bodies, by their custom ids."""
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    lines = [{"custom_id": name, "method": "POST", "url": path, "body": body} for name, (path, body) in given.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_job(JobSpec(input=str(source), output=str(output), config=_config(model), max_error_rate=1.0), quiet=True)
    return {line["custom_id"]: line for line in map(json.loads, output.read_text().splitlines())}


def _config(model: Path) -> EngineConfig:
    return EngineConfig(model=str(model), **SETTINGS)


@pytest.fixture(scope="module")
def both(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """All lines are one job's: a job for each would start an engine for each."""
    only = {f"server only: {name}": (path, {**GOOD[path], **more}) for name, (path, _, more) in SERVER_ONLY.items()}
    others = {
        "another model": (TEXT, {**GOOD[TEXT], "model": "gpt-9"}),
        "past the context": (TEXT, {"prompt": [5] * 500, "max_tokens": 100, "temperature": 0}),
    }
    directory = tmp_path_factory.mktemp("contract")
    lines = run_lines(tiny_directory, directory, {**prefixed("good"), **prefixed("bad"), **only, **others})
    engine = AsyncEngine(str(tiny_directory), **SETTINGS)
    yield Both(directory, engine, lines)
    asyncio.run(engine.close())


def prefixed(kind: str) -> dict[str, tuple[str, Any]]:
    chosen = GOOD_CASES if kind == "good" else BAD_CASES
    return {f"{kind} {name}": case for name, case in chosen.items()}


def comparable(value: Any) -> Any:
    """Without what differs by its nature, and with embeddings as numbers."""
    if isinstance(value, dict):
        if isinstance(value.get("embedding"), str):
            floats = np.frombuffer(base64.b64decode(value["embedding"]), "<f4")
            return {**value, "embedding": {"base64": floats.tolist()}}
        return {name: comparable(item) for name, item in value.items() if name not in DIFFERENT}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def about(value: Any) -> Any:
    """Equal to the same value with other last digits of its floats: they depend on what else is in the batch."""
    if isinstance(value, dict):
        return {name: about(item) for name, item in value.items()}
    if isinstance(value, list):
        return [about(item) for item in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


@pytest.mark.parametrize("name", GOOD_CASES)
def test_an_answer_is_the_same_over_http_and_as_a_batch_line(both: Both, name: str) -> None:
    status, body = both.http(*GOOD_CASES[name])
    assert status == 200, body
    line_status, line_body = both.line(f"good {name}")
    assert line_status == 200, line_body
    line_body["model"] = body["model"]  # the server's name for it; the job uses the model's path
    assert comparable(line_body) == about(comparable(body))
    assert line_body.keys() == body.keys()


def test_embeddings_are_not_all_alike(both: Both) -> None:
    """A comparison of both sides says little if every embedding is the same."""
    first, second, third = (item["embedding"] for item in both.line("good embeddings: several texts")[1]["data"])
    assert third == pytest.approx(first, abs=1e-3) and second != pytest.approx(first, abs=1e-2)


@pytest.mark.parametrize("cut", ["", " cut in its arguments", " cut before its arguments", " cut before its name"])
def test_a_batch_line_calls_a_tool(both: Both, cut: str) -> None:
    name = f"call{cut}" if cut else "a call"
    (choice,) = both.line(f"good chat: {name}")[1]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"], choice["message"]["content"]) == ("function", "age", None)
    assert choice["finish_reason"] == ("length" if cut else "tool_calls")
    assert bool(call["function"]["arguments"]) == (cut in ("", " cut in its arguments"))


@pytest.mark.parametrize("name", BAD_CASES)
def test_an_error_is_the_same_over_http_and_as_a_batch_line(both: Both, name: str) -> None:
    status, body = both.http(*BAD_CASES[name])
    line_status, line_body = both.line(f"bad {name}")
    assert status == line_status == 400, (body, line_body)
    number, _, message = line_body["error"]["message"].partition(": ")
    assert number.startswith("line ")
    assert {**line_body["error"], "message": message} == body["error"]


@pytest.mark.parametrize("name", SERVER_ONLY)
def test_a_field_for_the_server_only_is_refused_by_its_name(both: Both, name: str) -> None:
    _, field, _ = SERVER_ONLY[name]
    assert field in DIFFERENCES and field not in UNSUPPORTED.keys() - {"echo"}
    status, body = both.line(f"server only: {name}")
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, field, "unsupported_parameter")


def test_every_field_for_the_server_only_has_a_case() -> None:
    assert NOT_IN_BATCH.keys() <= {field for _, field, _ in SERVER_ONLY.values()}


def test_a_job_answers_lines_for_another_model(both: Both) -> None:
    assert both.http(TEXT, {**GOOD[TEXT], "model": "gpt-9"})[0] == 404
    assert both.line("another model")[0] == 200


def test_a_job_shortens_an_answer_to_the_context(both: Both) -> None:
    status, body = both.http(TEXT, {"prompt": [5] * 500, "max_tokens": 100, "temperature": 0})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    status, body = both.line("past the context")
    assert status == 200 and body["usage"]["total_tokens"] <= 512
