"""Converts the inputs of a pooling model to token ids: the model's own prompts, pairs of texts, truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from headrace.engine.prompts import Prompt, PromptReader, TokenizedPrompt, text_of
from headrace.errors import RequestError
from headrace.models.pooler import DOCUMENT_PROMPTS, QUERY_PROMPTS, PoolerSpec

# How Qwen3's rerankers were trained to read a query and a document. Other texts would get other scores.
_QWEN3_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_QWEN3_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class PairPrompts:
    """The prompts of pairs of texts: one for each pair, or, for an embedding model, one for each text."""

    prompts: list[TokenizedPrompt]
    num_first: int | None  # how many of them are first texts; None: each is a pair


class PoolingReader:
    """Thread-safe. Without a pooler, the model generates, and its inputs are those of `PromptReader`."""

    def __init__(self, reader: PromptReader, pooler: PoolerSpec | None) -> None:
        self._reader = reader
        self._pooler = pooler
        self._max_model_len = reader.max_model_len

    def read(
        self,
        prompts: Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[TokenizedPrompt]:
        """Inputs of one text each, with the prompt of this name before them, or else the model's default prompt."""
        return self._read(prompts, self._prompt(prompt_name), truncate, add_special_tokens, param)

    def read_role(
        self, texts: Sequence[str], *, prompt_names: tuple[str, ...], truncate: int | None, param: str
    ) -> list[TokenizedPrompt]:
        """Texts for one purpose: with the first of these prompts that the model has, or else its default prompt."""
        before = "" if self._pooler is None else self._pooler.role_prompt(prompt_names)
        return self._read(texts, before, truncate, True, param)

    def with_prompt(self, text: str) -> str:
        """The text as the model reads it by default."""
        return self._prompt(None) + self._prepared(text)

    def read_pairs(
        self, firsts: Sequence[str], seconds: Sequence[str], *, truncate: int | None = None, param: str = "documents"
    ) -> PairPrompts:
        """`firsts` are one text, or one for each of `seconds`."""
        assert self._pooler is not None
        if not self._pooler.is_cross_encoder:
            queries = self.read_role(firsts, prompt_names=QUERY_PROMPTS, truncate=truncate, param=param)
            documents = self.read_role(seconds, prompt_names=DOCUMENT_PROMPTS, truncate=truncate, param=param)
            return PairPrompts(queries + documents, len(queries))
        for text in (*firsts, *seconds):
            self._check_long(text, truncate, param)
        heads, tails = ([self._prepared(text) for text in texts] for texts in (firsts, seconds))
        limit = self._limit(truncate)
        if self._pooler.template == "qwen3_reranker" and not heads[0].startswith("<|im_start|>"):
            return PairPrompts(self._in_template(heads, tails, limit), None)
        encoded = self._reader.tokenizer.encode_pairs(heads, tails, max_len=limit)
        return PairPrompts(
            [TokenizedPrompt(None, np.array(e.token_ids, np.int32), e.second_start) for e in encoded], None
        )

    def _in_template(self, firsts: list[str], seconds: list[str], limit: int | None) -> list[TokenizedPrompt]:
        heads = firsts * len(seconds) if len(firsts) == 1 else firsts
        pairs = zip(heads, seconds, strict=True)
        bodies = [f"<Instruct>: {_QWEN3_TASK}\n<Query>: {first}\n<Document>: {second}" for first, second in pairs]
        encode = partial(self._reader.tokenizer.encode_batch, add_special_tokens=False)
        (start, end), middles = encode([_QWEN3_START, _QWEN3_END]), encode(bodies)
        room = None if limit is None else max(0, limit - len(start) - len(end))
        return [TokenizedPrompt(None, np.array([*start, *middle[:room], *end], np.int32)) for middle in middles]

    def _read(
        self, prompts: Sequence[Prompt], before: str, truncate: int | None, add_special_tokens: bool, param: str
    ) -> list[TokenizedPrompt]:
        limit = self._limit(truncate)
        texts = [text_of(prompt) for prompt in prompts]
        for text in texts:
            if text is not None:
                self._check_long(text, truncate, param)
        made = [
            prompt if text is None else before + self._prepared(text)
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        read = self._reader.read(made, add_special_tokens=add_special_tokens)
        if limit is None:
            return read
        cut = partial(self._reader.tokenizer.encode_truncated, max_len=limit, add_special_tokens=add_special_tokens)
        return [one if len(one.token_ids) <= limit else _truncated(one, limit, cut) for one in read]

    def _prepared(self, text: str) -> str:
        return text.lower() if self._pooler is not None and self._pooler.lowers_text else text

    def _check_long(self, text: str, truncate: int | None, param: str) -> None:
        if truncate is None:
            self._reader.check_long_text(text, param=param)

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if self._max_model_len is None:
            return None if truncate == -1 else truncate
        if truncate > self._max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens ({truncate}) is more than the {self._max_model_len} tokens of the context",
                param="truncate_prompt_tokens",
            )
        return self._max_model_len if truncate == -1 else truncate

    def _prompt(self, name: str | None) -> str:
        if name is None:
            return "" if self._pooler is None else self._pooler.default_prompt
        found = None if self._pooler is None else self._pooler.prompt(name)
        if found is None:
            known = ", ".join(known for known, _ in self._pooler.prompts) if self._pooler is not None else ""
            raise RequestError(
                f"prompt_name {name!r}: the model has no prompt of this name (it has: {known or 'none'})",
                param="prompt_name",
            )
        return found


def _truncated(prompt: TokenizedPrompt, limit: int, cut: Callable[[str], list[int]]) -> TokenizedPrompt:
    if prompt.text is None:
        return TokenizedPrompt(None, prompt.token_ids[:limit])
    return TokenizedPrompt(prompt.text, np.array(cut(prompt.text), np.int32))
